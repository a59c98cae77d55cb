"""Pipelines among the layouts of a run: which there may be, and what each is predicted to take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from packlora.base.shape import decoder_layers
from packlora.errors import InputError
from packlora.parallel import layouts
from packlora.parallel.layout import Layout, Wave
from packlora.pipeline.checks import check_stages, needs_all_layers
from packlora.pipeline.estimate import largest_stage, on_stages, planning_cost
from packlora.pipeline.timeline import end_times
from packlora.runtime.choose import Replica
from packlora.runtime.prepared_job import trainable_parameters
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.wholeness import keeps_whole
from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch


def candidates(prepared: PreparedRun, devices: int, work: Mapping[str, float]) -> list[Layout]:
    """Pipelines of every length that the run file allows and the model can be cut into, where that is left to us; each job on
    as few of them as leave none without a job.

    Args:
        work: by job, what it is predicted to take.
    """
    parallel, encoder = prepared.run.parallel, prepared.encoder
    asked = parallel.pipeline == "auto" and not (parallel.divided or parallel.package)
    if not asked or prepared.form is not None or encoder is None:
        return []
    if keeps_whole(prepared.run) or any(needs_all_layers(job) is not None for job in prepared.jobs):
        return []
    try:
        check_stages(encoder.skeleton, prepared.shape.layers, prepared.adapted)
    except InputError:
        return []
    out = []
    for stages in range(2, min(devices, prepared.shape.layers) + 1):
        if devices % stages == 0:
            out += layouts.fewest(layouts.layouts(work, devices, pipeline=stages), parallel.devices_per_job)
    return out


class StagedReplica(Replica):
    """A replica that is a pipeline. See Replica."""

    def __init__(self, prepared: PreparedRun, layout: Layout) -> None:
        self.prepared, self.lag = prepared, layout.pipeline
        self.cost = planning_cost(prepared.run, prepared, self.lag)
        self.largest = largest_stage(prepared.run, prepared, self.lag)

    def times(
        self, waves: Sequence[Wave], seconds: Callable[[Microbatch], float], cost: CostModel
    ) -> tuple[float, float]:
        """See Replica. Each pipeline has its microbatch of every wave."""
        cost = on_stages(cost, self.prepared.run, self.prepared, self.lag)
        each = [[[cost.both(one, stage) for one in wave] for wave in waves] for stage in range(self.lag)]
        slowest = [[(max(f for f, _ in wave), max(b for _, b in wave)) for wave in stage] for stage in each]
        work = sum(f + b for stage in each for wave in stage for f, b in wave)
        return max((ends[-1] for ends in end_times(slowest)[1] if ends), default=0.0), work

    def at_ends(self, names: Collection[str]) -> int:
        """See Replica: parameters that are in no layer, of which one stage may have all."""
        if self.prepared.encoder is None:
            return 0
        skeleton, total = self.prepared.encoder.skeleton, 0
        inside = tuple(f"{path}." for path in decoder_layers(skeleton))
        for job in self.prepared.jobs:
            if job.data.name in names:
                own = {path: module for path, module in job.spec.modules.items() if not path.startswith(inside)}
                total += trainable_parameters(replace(job.spec, modules=own), skeleton)
        return total
