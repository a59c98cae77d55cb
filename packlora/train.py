"""Training a run: everything from the run file to a loop that is ready, which is trainer.py's.

packlora train run.yaml          or          packlora.train("run.yaml")
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from packlora import checkpoint, profiler
from packlora.adapters.attach import attach, keep_outputs
from packlora.adapters.linear import Router
from packlora.adapters.peft_files import load_adapter
from packlora.config import Run, load_run, run_from
from packlora.errors import InputError
from packlora.files import lock_folder, remove_leftovers, write_json
from packlora.job import Job
from packlora.model import Base, load_base
from packlora.prepare import Prepared, check_output, prepare
from packlora.profiler import Profile
from packlora.record import run_record
from packlora.trainer import Result, Trainer

FLOAT16_SCALE = 4096.0
"""Losses are multiplied with this before a float16 backward and gradients divided after it, so that small ones survive."""


def train(
    run: Run | Mapping[str, Any] | str | Path,
    *,
    overrides: list[str] | None = None,
    resume: bool = False,
    max_steps: int | None = None,
) -> Result:
    """Train all jobs of a run.

    Args:
        run: a run file, a dict of the same keys, or a Run. Relative paths in the latter two start at the current folder.
        overrides: dotted.key=value changes to a run file or a dict.
        resume: continue the run in output_dir (a folder without one starts afresh).
        max_steps: stop every job after this many optimizer steps.

    Raises:
        InputError: something is wrong with the input; nothing was trained.
    """
    run = _run_of(run, overrides)
    if run.schedule.padding_multiple != 1:
        raise InputError(
            f"schedule: padding_multiple is {run.schedule.padding_multiple}, but training packs samples without padding, "
            "which no kernel here needs; leave it at 1. `packlora plan` shows what padding would cost"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("started on several processes, but this version trains on one device")
    with _unmake_folder(Path(run.output_dir)), contextlib.ExitStack() as held:
        saved = check_output(run, resume)
        held.enter_context(lock_folder(Path(run.output_dir)))
        held.enter_context(deterministic())
        trainer = _set_up(run, saved, max_steps)
        return trainer.fit()


def _set_up(run: Run, saved: dict[str, Any] | None, max_steps: int | None) -> Trainer:
    """Everything before the first step; run.json is the first thing that is written. saved: that of the run to resume."""
    output_dir = Path(run.output_dir)

    # 1. Check everything that can be wrong.
    prepared = prepare(run, max_steps)

    # 2. Load the base model once and put all adapters on it.
    base = load_base(run, prepared.tokenizer)
    router, adapters = attach(base.model, {job.config.name: job.spec for job in prepared.jobs}, run.seed)
    jobs = []
    for item, adapter in zip(prepared.jobs, adapters, strict=True):
        if item.config.adapter.init_from is not None:
            load_adapter(item.config.adapter.init_from, adapter)
        scale = FLOAT16_SCALE if run.dtype == "float16" else 1.0
        jobs.append(Job(item.config, item.data, item.eval_encoded.samples, adapter, scale))
    if base.device.type == "cuda":  # where activations are what memory goes to
        base.kept_outputs = keep_outputs(base.model, router, adapters)

    # 3. Choose the size of microbatches where that is left to us.
    known = _choose_budget(run, prepared, base, router, jobs, saved)

    # 4. Continue where checkpoints say, or start.
    record = run_record(prepared, base, jobs, known)
    if saved is not None:
        _same_data(saved, record)
        record["created"] = saved["created"]
        record["warnings"] += [text for text in saved["warnings"] if text not in record["warnings"]]
        record["warnings"] += [
            f"resumed with {name} {now}, begun with {saved['versions'][name]}"
            for name, now in record["versions"].items()
            if saved["versions"].get(name, now) != now
        ]
        for job in jobs:
            folder = output_dir / job.name
            if folder.exists():
                remove_leftovers(folder)
                checkpoint.restore(folder, job)
    remove_leftovers(output_dir)
    write_json(output_dir / "run.json", record)
    return Trainer(run, prepared, base, router, jobs, record, known)


def _choose_budget(
    run: Run, prepared: Prepared, base: Base, router: Router, jobs: list[Job], saved: dict[str, Any] | None
) -> Profile:
    """What is known of the model on this device; sets the budget where the run file leaves it to the profiler.

    A resumed run keeps the budget that it had. On a CPU, where a larger one brings nothing, it is the usual one.
    """
    if run.max_tokens_per_microbatch != "auto":
        return profiler.profile(run, prepared)
    if saved is not None and saved["config"]["max_tokens_per_microbatch"] == "auto":
        prepared.budget = max(int(saved["schedule"]["budget"]), prepared.longest)
        return profiler.profile(run, prepared)
    known = profiler.profile(run, prepared, base, router, jobs)
    if base.device.type == "cuda":
        prepared.budget = profiler.choose(profiler.predictions(prepared, [known])).budget
    return known


def _same_data(saved: dict[str, Any], record: dict[str, Any]) -> None:
    """A run goes on only with the samples that it began with."""
    for name, now in record["jobs"].items():
        before = saved["jobs"].get(name, {})
        if before.get("data_hash") != now["data_hash"]:
            raise InputError(
                f"job {name!r}: its data has changed since the run began ({before.get('samples')} training and "
                f"{before.get('eval_samples')} held-out samples then, {now['samples']} and {now['eval_samples']} now)"
            )


@contextlib.contextmanager
def _unmake_folder(folder: Path) -> Iterator[None]:
    """Bad input leaves no trace: an output folder that was made for this run goes again if nothing was written to it."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except InputError:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """The same bits every time, also on a GPU; put back afterwards."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # with warn_only the attention kernels would stay as they are
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill


def _run_of(run: Run | Mapping[str, Any] | str | Path, overrides: list[str] | None) -> Run:
    if isinstance(run, str | Path):
        return load_run(run, overrides)
    if isinstance(run, Mapping):
        return run_from(run, overrides)
    if not isinstance(run, Run):
        raise InputError(f"a run is the path of a run file, a dict or a packlora.Run; got {type(run).__name__}")
    if overrides:
        raise InputError("overrides change a run file or a dict; change the Run itself")
    return run


class _CallableModule(types.ModuleType):
    """Importing this module binds the name packlora.train to it; packlora.train(...) must work all the same."""

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
