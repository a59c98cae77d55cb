"""The jobs of a run on its base model: an adapter of each, with what it begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packlora.adapters.attach import Adapter, attach
from packlora.adapters.embeddings import change_embeddings
from packlora.base.model import Base
from packlora.config import Run
from packlora.engine.objectives.configured import change_of_embeddings
from packlora.engine.passes import Passes
from packlora.plans.cache import PlanCache
from packlora.plans.select import PlanChooser
from packlora.runtime.job import Job
from packlora.runtime.placement import Placement
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun

if TYPE_CHECKING:
    from packlora.engine.loss_scale import LossScale


def _scale(run: Run) -> LossScale | None:
    if run.dtype != "float16":
        return None
    from packlora.engine.loss_scale import LossScale

    return LossScale()


def make_job(run: Run, item: PreparedJob, adapter: Adapter, base: Base) -> Job:
    """A job before its first step, its adapter on the model."""
    if item.config.adapter.init_from is not None:
        from packlora.adapters.reading import load_adapter

        load_adapter(item.config.adapter.init_from, adapter)
    elif adapter.spec.of_weights:
        from packlora.adapters.starts import begin
        from packlora.runtime.starts import float_weights

        begin(base.model, adapter, item.data.seed, lambda: float_weights(run))
    return Job(
        item.config, item.data, item.eval_encoded.samples, adapter, _scale(run), prompts=item.prompts,
        router_coefficient=item.router_coefficient, chat_template=item.chat_template,
    )  # fmt: skip


def attach_jobs(prepared: PreparedRun, base: Base, placement: Placement) -> tuple[Passes, list[Job]]:
    """Put an adapter of each job onto the model."""
    cache = PlanCache(base.device)
    choosers = {ask: PlanChooser(base.device, cache, ask) for ask in dict.fromkeys(prepared.asks.values())}
    attached, adapters = attach(
        base.model,
        {job.config.name: job.spec for job in prepared.jobs},
        {job.config.name: job.data.seed for job in prepared.jobs},
        {path: choosers[ask] for path, ask in prepared.asks.items()},
        base.storage,
        None if base.modality is None else base.modality.example,
        prepared.recompute,
    )
    if placement.group.is_first:
        change_embeddings(base.model, attached, change_of_embeddings)
    jobs, whole = [], placement.group.whole(adapters)
    for item, adapter in zip(prepared.jobs, adapters, strict=True):
        job = make_job(prepared.run, item, adapter, base)
        whole(adapter, job.state)
        jobs.append(job)
    if prepared.run.keep_outputs:
        from packlora.runtime.keep_outputs import keep_outputs

        base.kept_outputs = keep_outputs(base.model)
    return placement.passes(base, attached), jobs
