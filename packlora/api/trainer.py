"""Trainer: a run of jobs on one base model, made of Python objects. What it builds is a `packlora.Run`, as a run file does."""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packlora.api.job import Job, tree_of
from packlora.config import Run
from packlora.errors import InputError, quoted
from packlora.given import GIVEN, MEMORY, Given
from packlora.result import Result
from packlora.run_file import run_from

if TYPE_CHECKING:
    from packlora.api.borrowed import Borrowed

OF_LOADED = ("dtype", "device", "revision", "quantization", "trust_remote_code")
"""Keys of a run that a loaded model answers itself."""


class Trainer:
    """A run: jobs that are trained at the same time on one frozen base model.

    Args:
        model: folder or hub id of the base model, or a loaded transformers model. The latter is trained in place: its own
            weights, dtype and device are used, nothing is copied, and it is as before when `train` returns.
        jobs: at least one `Job`.
        output_dir: folder for adapters, checkpoints, logs and the report: new, empty, or one that holds this run.
        tokenizer: in the place of the base model's; needed with a loaded model that names no folder or hub id.
        callbacks: functions of one event (packlora.events), and transformers' TrainerCallback objects.
        run_keys: further keys of a run file, such as seed, save_every, eval_every or max_tokens_per_microbatch.

    Raises:
        InputError: a key is unknown or its value is not accepted, or an object is none that can be used.
    """

    run: Run
    """The checked run; its keys are those of a run file."""

    def __init__(
        self, model: Any, jobs: Iterable[Job], output_dir: str | Path, tokenizer: Any = None,
        callbacks: Iterable[Any] | None = (),
        **run_keys: Any,
    ) -> None:  # fmt: skip
        if not isinstance(output_dir, str | os.PathLike):
            raise InputError(f"output_dir is {quoted(output_dir)}; give the path of a folder")
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise InputError(f"tokenizer is {quoted(tokenizer)}; give what AutoTokenizer.from_pretrained has loaded")
        loaded = None if isinstance(model, str | os.PathLike) else _borrowed(model)
        name = str(model) if loaded is None else _name_of(loaded.model, tokenizer, run_keys)
        self._callbacks = _listed(() if callbacks is None else callbacks, "callbacks")
        tree, self._given = _run_tree(name, loaded, _listed(jobs, "jobs"), tokenizer, run_keys)
        self.run = run_from(tree | {"output_dir": os.fspath(output_dir)})

    def train(self, resume: bool = False) -> Result:
        """Train all jobs.

        Args:
            resume: go on with the run in output_dir, from its newest checkpoints, to the bits of a run without interruption; a
                folder without a run begins one. Rows and functions in memory must be those that the run began with.

        Returns:
            Result of the run; `result["name"]` is that of a job.

        Raises:
            As packlora.train.
        """
        loaded = self._given.model
        if loaded is None:
            return self._train(resume)
        from packlora.api.borrowed import borrowed

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("a loaded model is trained by one process; give its name or folder to train it by several")
        with borrowed(loaded.model):
            result = self._train(resume)
        for job in result.jobs.values():
            job.base = loaded.model
        return result

    def _train(self, resume: bool) -> Result:
        from packlora.api.callbacks import subscribers_of
        from packlora.runtime.run import train

        token = GIVEN.set(self._given)
        try:
            return train(self.run.model_copy(deep=True), resume=resume, subscribers=subscribers_of(self._callbacks))
        finally:
            GIVEN.reset(token)


def _listed(values: Any, what: str) -> list[Any]:
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise InputError(f"{what} are a list; got {type(values).__name__}")
    return list(values)


def _borrowed(model: Any) -> Borrowed:
    from packlora.api.borrowed import Borrowed

    return Borrowed(model)


def _name_of(model: Any, tokenizer: Any, run_keys: Mapping[str, Any]) -> str:
    """base_model of a loaded model: the folder or hub id that it names, or `memory:model`."""
    for key in OF_LOADED:
        if key in run_keys:
            raise InputError(f"{key}: is the loaded model's own; leave it out, or give the name of the model")
    name = getattr(model, "name_or_path", "") or ""
    if not name and tokenizer is None:
        raise InputError("tokenizer is missing: the loaded model names no folder or hub id that has one")
    return name or f"{MEMORY}model"


def _run_tree(
    name: str, loaded: Borrowed | None, jobs: list[Job], tokenizer: Any, run_keys: Mapping[str, Any]
) -> tuple[dict[str, Any], Given]:
    """The run as in a run file, and the objects that its `memory:` texts stand for."""
    tree: dict[str, Any] = {**run_keys, "base_model": name, "jobs": []}
    if loaded is not None:
        tree |= {"dtype": str(loaded.model.dtype).removeprefix("torch."), "device": str(loaded.model.device)}
    rows, losses = dict[str, Any](), dict[str, Any]()
    for job in jobs:
        if not isinstance(job, Job):
            raise InputError(f"jobs are packlora.Job objects; got {type(job).__name__}")
        own, own_rows, own_losses = tree_of(job)
        if job.has_usual_targets:
            own["adapter"]["target_modules"] = _usual_targets(job.name, name, loaded, run_keys)
        tree["jobs"].append(own)
        rows |= own_rows
        losses |= {text: (function, _source_digest(function)) for text, function in own_losses.items()}
    return tree, Given(rows, losses, loaded, None if tokenizer is None else copy.copy(tokenizer))


def _usual_targets(job: str, base_model: str, loaded: Borrowed | None, run_keys: Mapping[str, Any]) -> str | list[str]:
    """Modules that PEFT adapts in the base model where a LoraConfig names none."""
    from packlora.api.lora_config import usual_targets
    from packlora.base.demo_model import base_path
    from packlora.base.load import read_config

    if loaded is not None:
        return usual_targets(job, loaded.model.config.model_type)
    revision, trusted = run_keys.get("revision"), run_keys.get("trust_remote_code") is True
    return usual_targets(job, read_config(base_path(base_model), revision, trusted).model_type)


def _source_digest(function: Callable[..., Any]) -> str | None:
    """SHA-256 of a function's source; None where Python does not have it."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return None
