"""Job: one adapter to train, its data and its keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from packlora.api.rows import is_path, read_rows
from packlora.config import DataConfig, JobConfig, TrainConfig
from packlora.errors import InputError, quoted
from packlora.given import MEMORY, GivenRows
from packlora.run_file_errors import unknown_key

if TYPE_CHECKING:
    from peft import LoraConfig

ARGUMENTS = ("path", "eval_path", "eval_split", "objective")
"""Keys of a run file that arguments stand for."""
OF_ROLLOUT = ("reward", "environment_factory", "tools")
"""Keys of a rollout that functions may stand in."""
SECTIONS: dict[str, str | None] = {
    **{key: "data" for key in DataConfig.model_fields if key not in ARGUMENTS},
    **{key: "train" for key in TrainConfig.model_fields if key not in ARGUMENTS},
    **{key: None for key in JobConfig.model_fields if key not in ("name", "data", "adapter", "train")},
}
"""Section of a run file in which each key of a job stands; None: in the job itself."""


class Job:
    """One adapter to train on the base model of a `Trainer`.

    Args:
        name: of the job, and of its folder in output_dir.
        data: training rows: a path (as data.path of a run file, or a list of such), a list of mappings, a datasets.Dataset, an
            Arrow table, a data frame, or an iterable of mappings, which is read once, here.
        adapter: keys of a run file's `adapter`, or a peft.LoraConfig, whose defaults are PEFT's.
        eval_data: held-out rows, given as data; or a share of the rows, 0 < share < 1, drawn by the job's seed.
        objective: a loss of your own: a function of the labels' log-probabilities and the rows, or FILE.py:FUNCTION.
        keys: further keys of a run file's job, of `data`, `train` and the job itself, without their section.

    Raises:
        InputError: a key is unknown, or data are no rows. Values of keys are checked by the Trainer.
    """

    def __init__(
        self, name: str, data: Any, adapter: Mapping[str, Any] | LoraConfig | None = None, eval_data: Any = None,
        objective: Callable[..., Any] | str | None = None, **keys: Any,
    ) -> None:  # fmt: skip
        for key in keys:
            if key in ARGUMENTS:
                stands = {"path": "data", "eval_path": "eval_data", "eval_split": "eval_data"}[key]
                raise InputError(f"job {quoted(name)}: {key}: is the argument {stands} here")
            if key not in SECTIONS:
                raise InputError(f"job {quoted(name)}: {key}: {unknown_key(key, [*SECTIONS])}")
        self.name, self.objective, self.keys = name, objective, keys
        self.adapter, self.has_usual_targets = _adapter_keys(adapter, name)
        self.data = self._read(data, "data")
        self.eval_data = eval_data if eval_data is None or _is_share(eval_data) else self._read(eval_data, "eval_data")
        if _is_share(eval_data):
            self._check_share()

    def _check_share(self) -> None:
        if not 0 < self.eval_data < 1:
            raise InputError(
                f"job {quoted(self.name)}: eval_data is {self.eval_data}; a share of the rows is between 0 and 1"
            )

    def _read(self, data: Any, what: str) -> Any:
        """Paths as they are; rows as GivenRows."""
        if is_path(data):
            return [_text(one) for one in data] if isinstance(data, list) else _text(data)
        if self.keys.get("streaming"):
            raise InputError(
                f"job {quoted(self.name)}: streaming reads files while it trains, and {what} is in memory; leave streaming out"
            )
        try:
            return read_rows(data, self.name, what, self.keys.get("columns"))
        except RecursionError:
            raise InputError(
                f"job {quoted(self.name)}: {what} has a row that is nested too deep, or that holds itself"
            ) from None


def tree_of(job: Job) -> tuple[dict[str, Any], dict[str, GivenRows], dict[str, Callable[..., Any]]]:
    """The job as in a run file; and the rows and the losses that its `memory:` texts stand for."""
    tree: dict[str, Any] = {"name": job.name, "data": {}, "train": {}}
    for key, value in job.keys.items():
        section = SECTIONS[key]
        (tree if section is None else tree[section])[key] = value
    rows, losses = dict[str, GivenRows](), dict[str, Callable[..., Any]]()
    held_out = "eval_split" if _is_share(job.eval_data) else "eval_path"
    for key, data in (("path", job.data), (held_out, job.eval_data)):
        if isinstance(data, GivenRows):
            place = f"{MEMORY}{job.name}/{'train' if key == 'path' else 'eval'}"
            rows[place], data = data, place
        if data is not None:
            tree["data"][key] = data
    if callable(job.objective):
        losses[f"{MEMORY}{job.name}"] = job.objective
        tree["train"]["objective"] = f"{MEMORY}{job.name}"
    elif job.objective is not None:
        tree["train"]["objective"] = job.objective
    if isinstance(tree.get("rollout"), Mapping):
        for key in OF_ROLLOUT:
            tree["rollout"], functions = _named_functions(tree["rollout"], key, f"{MEMORY}{job.name}/{key}")
            losses |= functions
    if job.adapter is not None:
        tree["adapter"] = dict(job.adapter)
    return tree, rows, losses


def _named_functions(
    keys: Mapping[str, Any], key: str, prefix: str
) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Keys of a rollout with texts in the place of a key's functions, and the functions by these texts."""
    given, found = keys.get(key), dict[str, Callable[..., Any]]()

    def named(function: Any) -> Any:
        if not callable(function):
            return function
        place = f"{prefix}:{getattr(function, '__name__', 'function')}"
        found[place] = function
        return place

    texts = [named(one) for one in given] if isinstance(given, list) else named(given)
    return {**keys, **({key: texts} if key in keys else {})}, found


def _adapter_keys(adapter: Any, job: str) -> tuple[Mapping[str, Any] | None, bool]:
    """Keys of an adapter, and whether PEFT chooses its modules by the base model."""
    if adapter is None or isinstance(adapter, Mapping):
        return adapter, False
    from packlora.api.lora_config import adapter_keys

    keys = adapter_keys(adapter, job)
    return keys, "target_modules" not in keys


def _is_share(data: Any) -> bool:
    return isinstance(data, int | float)


def _text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path
