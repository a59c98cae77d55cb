"""Limits: what needs a base model in one piece, and what a base model in parts, or with experts, does not take."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from transformers import PreTrainedModel

from packlora.adapters.kinds import PARAMETERS, is_known_linear, is_linear
from packlora.adapters.spec import AdapterSpec
from packlora.base.device import choose_device
from packlora.config import Run
from packlora.errors import InputError
from packlora.parallel.tensor import check_cut
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun


def check_parallel(prepared: PreparedRun, skeleton: PreTrainedModel) -> None:
    """Raises InputError where the model cannot be divided as the run file asks."""
    parallel = prepared.run.parallel
    asked = [f"parallel.{key}" for key in parallel.ways if key != "pipeline"]
    for key in asked:
        for job in prepared.jobs:
            refuse(job, key, None if key == "parallel.expert" else whole_alone(job.spec, skeleton))
    if prepared.form is not None:
        for job in prepared.jobs:
            refuse(job, prepared.form.key, copied_alone(job.spec, skeleton), takes_more=True)
    if parallel.package is not None:
        import_module(f"{parallel.package}.placement").PLACEMENT.check(prepared, skeleton)
    if parallel.offload_base and choose_device(prepared.run.device).type == "cpu":
        prepared.warnings.append(
            "parallel.offload_base changes nothing here: on a CPU weights are on the host as it is"
        )
    check_cut(skeleton, parallel)


def refuse(job: PreparedJob, key: str, found: str | None, takes_more: bool = False) -> None:
    """Raises InputError where a key of the run file does not take a job.

    Args:
        found: part of the job that it does not take; None where there is nothing such.
        takes_more: whether it takes data that has more than texts.
    """
    name = job.config.name
    if found is not None:
        raise InputError(f"job {name!r}: {found}, which {key} does not take; leave one of them out")
    if job.beside_texts and not takes_more:
        raise InputError(
            f"job {name!r}: its data has {job.beside_texts}, which {key} does not take in this version; leave it out"
        )


def whole_alone(spec: AdapterSpec, skeleton: PreTrainedModel) -> str | None:
    """Part of a job that needs a base model in one piece; None where there is nothing such."""
    head = skeleton.get_output_embeddings()

    def outside(path: str, kind: str, module: torch.nn.Module) -> str | None:
        inside = kind == "linear" and module is not head
        return None if inside else f"{path} is trained, outside of the linear layers inside of the model"

    return _first(spec, skeleton, outside)


def copied_alone(spec: AdapterSpec, skeleton: PreTrainedModel) -> str | None:
    """Part of a job that needs linear layers of floats; None where there is nothing such."""
    head = skeleton.get_output_embeddings()

    def copied(path: str, kind: str, module: torch.nn.Module) -> str | None:
        is_copy = kind in ("copy", "tokens") and is_linear(module) and module is not head
        return f"a copy of {path} is trained" if is_copy else None

    return _first(spec, skeleton, copied)


def _first(
    spec: AdapterSpec, skeleton: PreTrainedModel, problem_of: Callable[[str, str, torch.nn.Module], str | None]
) -> str | None:
    """First problem of the modules that a job trains, or None. problem_of: takes path, kind and module."""
    for path, own in spec.modules.items():
        if own.kind not in PARAMETERS:
            module = skeleton.get_submodule(path)
            if found := _of_another_type(path, module) or problem_of(path, own.kind, module):
                return found
    return None


def _of_another_type(path: str, module: torch.nn.Module) -> str | None:
    if is_linear(module) and not is_known_linear(module):
        return f"{path} is adapted, of type {type(module).__name__}"
    return None


def needs_whole_base(prepared: PreparedRun) -> bool:
    """Whether a job, or a key of the run file, takes the whole base model on every device."""
    return keeps_whole(prepared.run) or any(needs_whole(job, prepared) is not None for job in prepared.jobs)


def keeps_whole(run: Run) -> bool:
    """Whether a key of the run file takes the whole base model on every device."""
    return bool(run.offload_embedding or run.activation_offloading)


def needs_whole(job: PreparedJob, prepared: PreparedRun) -> str | None:
    """Part of a job that takes the whole base model on every device; None where a part does."""
    if job.beside_texts:
        return f"its data has {job.beside_texts}"
    return None if prepared.encoder is None else whole_alone(job.spec, prepared.encoder.skeleton)
