"""Checkpoints of jobs: written whole or not at all, and found again.

    <job>/checkpoint-<step>/   adapter_config.json, adapter_model.safetensors, optimizer.safetensors, last_good.safetensors,
                               trainer_state.json
    <job>/                     the finished adapter and its trainer_state.json (written last: it marks the job as ended)

Everything else that a job needs to go on (sample order, dropout, learning rate) is a function of the run file and the step.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from packlora.adapters.peft_files import load_adapter, save_adapter, state_dict, write_card
from packlora.errors import InputError
from packlora.files import write_folder, write_json, write_tensors
from packlora.job import Job

STATE, OPTIMIZER, LAST_GOOD = "trainer_state.json", "optimizer.safetensors", "last_good.safetensors"
NAME = re.compile(r"checkpoint-(\d+)")


def save_checkpoint(folder: Path, job: Job) -> Path:
    """Write <folder>/checkpoint-<step>; it appears under its name only when it is complete and on the disk."""
    path = folder / f"checkpoint-{job.step}"
    folder.mkdir(parents=True, exist_ok=True)

    def write(out: Path) -> None:
        save_adapter(out, job.adapter)
        write_tensors(out / OPTIMIZER, _optimizer_tensors(job))
        if job.last_good is not None:
            write_tensors(out / LAST_GOOD, job.last_good)
        write_json(out / STATE, job.trainer_state())

    write_folder(path, write)
    return path


def save_result(folder: Path, job: Job) -> None:
    """Write the job's ended adapter directly into <folder>, the state last."""
    save_adapter(folder, job.adapter)
    last = job.log_history[-1]["loss"] if job.log_history else float("nan")
    lines = [f"{job.step} optimizer steps, {job.tokens_seen} tokens, last training loss {last:.4f}."]
    if job.failure:
        lines.append(f"Stopped early: {job.failure}.")
    write_card(folder, job.adapter, lines)
    write_json(folder / STATE, job.trainer_state())


def _optimizer_tensors(job: Job) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in job.parameters.items():
        for key, value in job.optimizer.state[parameter].items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value)
    return tensors


def restore(folder: Path, job: Job) -> None:
    """Continue a job from its newest checkpoint in <folder>, if there is one; recognise a job that has ended.

    Raises:
        InputError: the checkpoint is not of this job (other layers, shapes or optimizer state).
    """
    ended = _read_state(folder / STATE) if (folder / STATE).exists() else None
    if ended is not None and ended["status"] == "failed":
        load_adapter(folder, job.adapter)
        _take_state(job, ended)
        return
    steps = sorted(int(match[1]) for path in folder.glob("checkpoint-*") if (match := NAME.fullmatch(path.name)))
    if not steps:
        return
    path = folder / f"checkpoint-{steps[-1]}"
    load_adapter(path, job.adapter)
    _take_state(job, _read_state(path / STATE))
    _restore_optimizer(path / OPTIMIZER, job)
    if (path / LAST_GOOD).exists():
        good = _load_tensors(path / LAST_GOOD, job)
        job.last_good = {key: good[key].to(tensor) for key, tensor in state_dict(job.adapter).items()}
    job.status = "running"
    if ended is not None and job.step >= job.data.num_steps:
        job.status = "done"


def _load_tensors(file: Path, job: Job) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
        return tensors
    except (OSError, SafetensorError) as error:
        raise InputError(f"job {job.name!r}: cannot read {file}: {error}") from None


def _restore_optimizer(file: Path, job: Job) -> None:
    """Every parameter must have its state, of its shape, and nothing else may be there."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in _load_tensors(file, job).items():
        name, _, leaf = key.rpartition("/")
        state.setdefault(name, {})[leaf] = value
    if state.keys() != job.parameters.keys() - job.untrained:
        odd = sorted(state.keys() ^ (job.parameters.keys() - job.untrained))[0]
        raise InputError(f"job {job.name!r}: {file} does not fit the adapter: {odd} is in only one of them")
    for name, moments in state.items():
        parameter = job.parameters[name]
        for leaf, value in moments.items():
            if leaf != "step" and value.shape != parameter.shape:
                raise InputError(
                    f"job {job.name!r}: {file}: {name}/{leaf} is {tuple(value.shape)}, should be {tuple(parameter.shape)}"
                )
        job.optimizer.state[parameter] = {
            leaf: value if leaf == "step" else value.to(parameter.device) for leaf, value in moments.items()
        }


def _take_state(job: Job, state: dict[str, Any]) -> None:
    job.step, job.status, job.failure = state["global_step"], state["status"], state["failure"]
    job.tokens_seen, job.log_history = state["num_input_tokens_seen"], state["log_history"]
    job.untrained = set(state["untrained"])


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {file}: {error}") from None
    return state
