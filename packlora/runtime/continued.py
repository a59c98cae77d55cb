"""A job that continues the adapter in a folder (`init_from`), or is held to one (`reference`): what is in such a folder, held
against the run file and the model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from packlora.adapters.names import NAMED, resolve
from packlora.adapters.reading import read_start, read_tensors, stored_keys, tensor_shapes
from packlora.adapters.spec import AdapterSpec
from packlora.config import AdapterConfig
from packlora.config.adapter_file import OURS_ALONE, read_config
from packlora.config.peft import as_asked, peft_config
from packlora.errors import InputError
from packlora.lora_config import LoraConfig

UNTOLD = ("orthogonal", "loftq")
"""Values of init_lora_weights in whose place an adapter_config.json says true (adapters/files.py)."""


def continued_config(adapter: AdapterConfig, base_model: str, revision: str | None, job: str) -> LoraConfig:
    """The configuration of a job with `init_from`: that of the file, and no disagreement with the run file.

    lora_dropout may be changed by the run file; everything else that is set in both must agree. Keys that choose modules by
    their names are held against each other on the model, in check_start. Of a folder of which half is trained the run file
    speaks in terms of that half.
    """
    assert adapter.init_from is not None
    found, start = read_config(adapter.init_from, job), continued_start(adapter)
    if start is not None:
        found.init_lora_weights = start
        if adapter.lora_dropout and "lora_dropout" in adapter.model_fields_set:
            raise InputError(
                f"job {job!r}: {adapter.init_from} began with {start}, and lora_dropout {adapter.lora_dropout:g} would "
                "drop the principal part of the base; set lora_dropout: 0"
            )
    wanted = _wanted(adapter, base_model, revision)
    untold = {"init_lora_weights"} if found.init_lora_weights is True and wanted.init_lora_weights in UNTOLD else set()
    for key in sorted(adapter.model_fields_set - OURS_ALONE - {"lora_dropout", *NAMED, *untold}):
        if (in_file := getattr(found, key)) != getattr(wanted, key):
            raise _disagreement(adapter, key, in_file if start is None else as_asked(found, key), job)
    if "lora_dropout" in adapter.model_fields_set:
        found.lora_dropout = adapter.lora_dropout
    found.base_model_name_or_path, found.revision = wanted.base_model_name_or_path, revision
    return found


def _wanted(adapter: AdapterConfig, base_model: str, revision: str | None) -> LoraConfig:
    """Settings that a run file asks for, with the start of the folder where it names none."""
    start = continued_start(adapter)
    if start is not None and "init_lora_weights" not in adapter.model_fields_set:
        adapter = adapter.model_copy(update={"init_lora_weights": start})
    return peft_config(adapter, base_model, revision)


def _disagreement(adapter: AdapterConfig, key: str, in_file: Any, job: str) -> InputError:
    shown = sorted(in_file) if isinstance(in_file, set) else in_file
    return InputError(
        f"job {job!r}: adapter.{key} is {getattr(adapter, key)!r}, but {adapter.init_from} was made with {shown!r}; "
        "leave the key out to take the file's"
    )


def check_start(adapter: AdapterConfig, spec: AdapterSpec, model: PreTrainedModel, job: str) -> None:
    """Hold the folder that a job begins with against the model, which may be without weights.

    Args:
        adapter: of the run file, with init_from.
        spec: of its continued_config.

    Raises:
        InputError: the run file names other modules, or the tensors are not those of the adapter.
    """
    assert adapter.init_from is not None
    asked = copy.copy(spec.peft)
    written = [key for key in NAMED if key in adapter.model_fields_set]
    wanted = _in_words_of_folders(_wanted(adapter, "", None), written, spec, model, job)
    for key in written:
        setattr(asked, key, getattr(wanted, key))
        if getattr(wanted, key) != getattr(spec.peft, key) and not _chooses_the_same(asked, spec, model, job):
            in_file = getattr(spec.peft, key) if continued_start(adapter) is None else as_asked(spec.peft, key)
            raise _disagreement(adapter, key, in_file, job)
    read_tensors(adapter.init_from, tensor_shapes(spec, model), job, spec.read_as)


def _in_words_of_folders(
    wanted: LoraConfig, written: list[str], spec: AdapterSpec, model: PreTrainedModel, job: str
) -> LoraConfig:
    """Keys that choose modules as a folder has them, which names experts and routers under target_parameters, and their ranks
    in patterns, also where the run file names them under target_modules."""
    keys = NAMED if "target_modules" in written else written
    try:
        return resolve(replace(spec.peft, **{key: getattr(wanted, key) for key in keys}), model, job).peft
    except InputError:  # of keys that go with others of the folder
        return wanted


def _chooses_the_same(asked: LoraConfig, spec: AdapterSpec, model: PreTrainedModel, job: str) -> bool:
    """Whether a configuration adapts the modules of a spec, each in its size."""

    def chosen(one: AdapterSpec) -> dict[str, tuple[Any, ...]]:
        return {path: (own.kind, own.rank, own.scaling, own.tokens) for path, own in one.modules.items()}

    try:
        return chosen(resolve(asked, model, job)) == chosen(spec)
    except InputError:
        return False


def check_reference(folder: str, spec: AdapterSpec, model: PreTrainedModel, job: str) -> None:
    """Hold the adapter that is a job's reference against the job's own, whose place it takes for a forward.

    Args:
        spec: of the job's adapter.

    Raises:
        InputError: it is none, or computes with other modules, ranks or scalings.
    """
    found = resolve_folder(folder, model, job)
    ours, theirs = (
        {
            path: (own.kind, own.rank, own.scaling, own.use_dora, own.train_bias, own.tokens)
            for path, own in one.modules.items()
        }
        for one in (spec, found)
    )
    if others := [path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path)]:
        raise InputError(
            f"job {job!r}: train.reference {folder} is not like the job's adapter on {others[0]}; give one with the "
            "job's modules, ranks and alphas, or base"
        )
    read_tensors(folder, tensor_shapes(spec, model), job, spec.read_as)


def resolve_folder(folder: str | Path, model: PreTrainedModel, job: str) -> AdapterSpec:
    """Resolve an adapter folder on a model, see names.resolve. Raises InputError also where it is no adapter folder."""
    return resolve(read_config(str(folder), job), model, job, keys=stored_keys(folder))


def continued_start(adapter: AdapterConfig) -> str | None:
    """The start of a folder of `init_from` of which a job goes on with the trained half; None where it trains all of it."""
    assert adapter.init_from is not None
    asked = adapter.init_lora_weights if "init_lora_weights" in adapter.model_fields_set else None
    return None if asked is True else read_start(adapter.init_from)


def start_note(adapter: AdapterConfig) -> str | None:
    """Note on a folder of `init_from` that began with what is in the weights of its base."""
    if adapter.init_from is None or (start := read_start(adapter.init_from)) is None:
        return None
    if continued_start(adapter) is None:
        return (
            f"init_lora_weights: true trains all of its ranks, also the half that held what {adapter.init_from} began with by "
            f"{start}"
        )
    return (
        f"it goes on as {start}, as {adapter.init_from} says: the first half of its ranks is trained, the other one stays; "
        "init_lora_weights: true trains both"
    )
