"""Limits: what a run may not have where its base model is cut into stages, found before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from packlora.adapters.spec import AdapterSpec
from packlora.config import CUT_OPTIMS
from packlora.errors import InputError
from packlora.pipeline.checks import check_stages
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.wholeness import refuse

KEY = "parallel.pipeline"


def check(prepared: PreparedRun, skeleton: PreTrainedModel) -> None:
    """Raises InputError where the model cannot be cut into the stages that the run file asks for."""
    stages, layers = prepared.run.parallel.stages, prepared.shape.layers
    for job in prepared.jobs:
        refuse(job, KEY, tied_in_stages(job.spec))
    if stages > layers:
        raise InputError(f"{KEY} is {stages}, but the model has {layers} layers; give at most {layers}")
    check_stages(skeleton, layers, prepared.adapted)


def check_new(prepared: PreparedRun, items: Sequence[PreparedJob]) -> None:
    """Raises InputError where jobs cannot join a run on the stages of a pipeline."""
    for item in items:
        if found := needs_all_layers(item):
            raise InputError(
                f"job {item.config.name!r}: {found}, but every device has a part of the base model; leave that out"
            )
    if prepared.encoder is not None:
        adapted = {item.config.name: list(item.spec.modules) for item in items}
        check_stages(prepared.encoder.skeleton, prepared.shape.layers, adapted)


def tied_in_stages(spec: AdapterSpec) -> str | None:
    """Part of a job that needs both ends of a base model on one device; None where there is nothing such."""
    tied = next((path for path, own in spec.modules.items() if own.kind == "tied"), None)
    return None if tied is None else f"it trains rows of the embedding, to which {tied} is tied on another stage"


def needs_all_layers(job: PreparedJob) -> str | None:
    """Part of a job that takes all layers of the base model on every device; None where some do."""
    if job.beside_texts:
        return f"its data has {job.beside_texts}"
    if job.config.train.optim not in CUT_OPTIMS:
        return (
            f"its train.optim is {job.config.train.optim}, which steps whole jobs ({', '.join(CUT_OPTIMS)} step parts)"
        )
    return tied_in_stages(job.spec)
