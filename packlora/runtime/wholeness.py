"""Limits: what needs a base model in one piece, and what a base model in parts, or with experts, does not take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from packlora.adapters.kinds import PARAMETERS, is_linear
from packlora.adapters.sharded import is_known_linear
from packlora.adapters.spec import AdapterSpec
from packlora.base.device import choose_device
from packlora.config import CUT_OPTIMS
from packlora.errors import InputError
from packlora.parallel.experts import check_experts, experts_of
from packlora.parallel.stage_checks import check_stages
from packlora.parallel.tensor import check_cut
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun


def check_parallel(prepared: PreparedRun, skeleton: PreTrainedModel) -> None:
    """Raises InputError where the model cannot be divided as the run file asks."""
    parallel, layers = prepared.run.parallel, prepared.shape.layers
    asked = {
        "parallel.tensor": parallel.tensor > 1, "parallel.pipeline": parallel.stages > 1,
        "parallel.shard_base": parallel.is_sharded, "parallel.expert": parallel.expert > 1,
    }  # fmt: skip
    if prepared.form is not None:
        asked[prepared.form.key] = True
    for key in (key for key, is_asked in asked.items() if is_asked):
        for job in prepared.jobs:
            if key == "parallel.pipeline":
                found = tied_in_stages(job.spec)
            elif prepared.form is not None and key == prepared.form.key:
                found = copied_alone(job.spec, skeleton)
            else:
                found = whole_alone(job.spec, skeleton)
            if found and key != "parallel.expert":
                raise InputError(f"job {job.config.name!r}: {found}, which {key} does not take; leave one of them out")
            if key.startswith("parallel.") and job.beside_texts:
                raise InputError(
                    f"job {job.config.name!r}: its data has {job.beside_texts}, which {key} does not take in this version; "
                    "leave it out"
                )
    if parallel.offload_base and choose_device(prepared.run.device).type == "cpu":
        prepared.warnings.append(
            "parallel.offload_base changes nothing here: on a CPU weights are on the host as it is"
        )
    if parallel.tensor > 1:
        check_cut(skeleton, parallel.tensor, parallel.sequence_parallel)
    shared = {"parallel.tensor": parallel.tensor, "parallel.expert": parallel.expert}
    key = " times ".join(name for name, size in shared.items() if size > 1)
    if parallel.expert > 1 or (parallel.tensor > 1 and experts_of(skeleton)):
        check_experts(skeleton, parallel.tensor * parallel.expert, key)
    if parallel.stages > layers:
        raise InputError(
            f"parallel.pipeline is {parallel.stages}, but the model has {layers} layers; give at most {layers}"
        )
    if parallel.stages > 1:
        check_stages(skeleton, layers, prepared.adapted)


def tied_in_stages(spec: AdapterSpec) -> str | None:
    """Part of a job that needs both ends of a base model on one device; None where there is nothing such."""
    tied = next((path for path, own in spec.modules.items() if own.kind == "tied"), None)
    return None if tied is None else f"it trains rows of the embedding, to which {tied} is tied on another stage"


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


def needs_whole_base(prepared: PreparedRun, staged: bool = False) -> bool:
    """Whether a job takes the whole base model on every device. staged: or all of its layers."""
    return any(needs_whole(job, prepared, staged) is not None for job in prepared.jobs)


def needs_whole(job: PreparedJob, prepared: PreparedRun, staged: bool) -> str | None:
    """Part of a job that takes the whole base model on every device; None where a part does. staged: a part that is some
    layers."""
    if job.beside_texts:
        return f"its data has {job.beside_texts}"
    if staged and job.config.train.optim not in CUT_OPTIMS:
        return (
            f"its train.optim is {job.config.train.optim}, which steps whole jobs ({', '.join(CUT_OPTIMS)} step parts)"
        )
    if prepared.encoder is None:
        return None
    return tied_in_stages(job.spec) if staged else whole_alone(job.spec, prepared.encoder.skeleton)
