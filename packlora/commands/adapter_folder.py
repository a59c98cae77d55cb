"""A finished adapter folder with the model that it belongs to: what merge, export, generate, chat and eval begin with."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.adapters.files import CONFIG
from packlora.adapters.names import resolve
from packlora.adapters.reading import base_note, model_type, read_tensors, stored_keys, tensor_shapes
from packlora.adapters.spec import AdapterSpec
from packlora.base.demo_model import base_path
from packlora.base.load import own_skeleton
from packlora.config import JobConfig, Run
from packlora.config.adapter_file import named_adapters, read_config
from packlora.errors import InputError
from packlora.lora_config import LoraConfig
from packlora.ops.twin import twin_of
from packlora.report.journal import read_record
from packlora.runtime.checkpoint import NAME
from packlora.runtime.resume import moment_of
from packlora.sweep.page import copied_from


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder that was held against its base model.

    base: folder or hub id of the base model. skeleton: the base model without weights, of the class that its folder names.
    base_config: what that folder says. tensors: of the adapter, by the keys of its file, float32 or float64. note: that the
    adapter names another base model, None where it does not.
    """

    path: Path
    config: LoraConfig
    base: str
    skeleton: PreTrainedModel
    base_config: Any
    spec: AdapterSpec
    tensors: dict[str, torch.Tensor]
    note: str | None


def open_adapter(path: Path, base_model: str | None) -> AdapterFolder:
    """Read an adapter folder; of the base model its configuration alone.

    Args:
        base_model: where to load the base from; None is the adapter's base_model_name_or_path.

    Raises:
        InputError: the adapter or the base cannot be used, or the adapter was made for another architecture.
    """
    check_folder(path)
    config = read_config(str(path), path.name)
    if base_model is None and config.base_model_name_or_path is None:
        raise InputError(f"{path} names no base model; give one with --base-model, in Python base_model=")
    base = base_path(base_model or named_base(path, str(config.base_model_name_or_path)))
    note = base_note(str(path), base)
    kinds = [model_type(where) for where in (str(config.base_model_name_or_path), base)]
    with of_the_base():
        skeleton, base_config = own_skeleton(base, config.revision)
    twin = twin_of(skeleton)
    if note and all(kinds) and kinds[0] != kinds[1] and (twin is None or twin.model.config.model_type != kinds[0]):
        raise InputError(f"{note}: the architectures differ; give a base model of the first kind")
    spec = resolve(config, skeleton, path.name, keys=stored_keys(path))
    tensors = read_tensors(path, tensor_shapes(spec, skeleton), path.name, spec.read_as)
    return AdapterFolder(path, config, base, skeleton, base_config, spec, tensors, note)


def named_base(folder: Path, named: str) -> str:
    """The base model that an adapter names. A relative folder, which older files may name, was seen from the folder that the
    run was started in: where it is not here, the nearest one above the adapter that has it counts."""
    if os.path.isdir(named) or os.path.isabs(named):
        return named
    above = [parent / named for parent in Path(os.path.abspath(folder)).parents]
    return str(next((place for place in above if os.path.isfile(place / "config.json")), named))


def check_folder(path: Path) -> None:
    """Raises InputError where a path is no adapter's; of a run's it names the adapters."""
    if (path / CONFIG).exists():
        return
    if not (path / "run.json").is_file():
        what = f"it holds no {CONFIG}" if path.is_dir() else "there is no such folder"
        says = named_adapters(path) or f"{what}; that of a run's job is OUTPUT_DIR/JOB"
        raise InputError(f"{path} is not a PEFT adapter folder: {says}")
    found = [shlex.quote(str(file.parent)) for file in sorted(path.glob(f"*/{CONFIG}"))]
    has = f"its adapters are {', '.join(found)}" if found else "and no job of it has ended yet"
    raise InputError(f"{path} is not a PEFT adapter folder but that of a run; {has}")


@contextlib.contextmanager
def of_the_base() -> Iterator[None]:
    """Adds to an InputError about the base model how another one is named."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}; --base-model names another one") from None


@dataclass(frozen=True, slots=True)
class Trained:
    """Training of an adapter according to the run.json in its run's folder. began: the current time as chat templates saw
    it."""

    run: Run
    job: JobConfig
    began: datetime


def trained_by(path: Path) -> Trained | None:
    """The run and the job that wrote a folder, a finished adapter, a sweep's best one or a checkpoint; None where it stands
    elsewhere, or where its run.json is not what this version writes."""
    path = Path(os.path.abspath(path))
    job = path.parent if NAME.fullmatch(path.name) else path
    try:
        record = read_record(job.parent)
        run = Run.model_validate_json(json.dumps(record["config"]))
        joins = [change["join"] for change in record.get("changes", ()) if change.get("join")]
        joined = [JobConfig.model_validate_json(json.dumps(join)) for join in joins]
        clock = record.get("clock")
        moment = moment_of(None if clock is None else datetime.fromisoformat(clock), record["created"])
        name = copied_from(job)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return next((Trained(run, one, moment) for one in [*run.jobs, *joined] if one.name == name), None)


def same_base(folders: Sequence[Path], base_model: str | None) -> tuple[str, str | None]:
    """Folder or hub id, and revision, of the base model that adapters share.

    Raises:
        InputError: they name none, or several.
    """
    for folder in folders:
        check_folder(folder)
    configs = {folder: read_config(str(folder), folder.name) for folder in folders}
    if base_model is not None:
        return base_path(base_model), None
    named = {}
    for folder, config in configs.items():
        if config.base_model_name_or_path is None:
            raise InputError(f"{folder} names no base model; give one with --base-model, in Python base_model=")
        named[folder] = named_base(folder, config.base_model_name_or_path), config.revision
    if len(set(named.values())) > 1:
        listed = ", ".join(f"{folder} that of {base}" for folder, (base, _) in named.items())
        raise InputError(f"the adapters are of several base models ({listed}); --base-model says which to load")
    (base, revision), *_ = named.values()
    return base_path(str(base)), revision
