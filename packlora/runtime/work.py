"""What the samples of a run are predicted to take, before a model is loaded: jobs are placed on devices by it.

Times come from shapes alone, at a speed that is the same for every process and every session (WORK_FLOPS): all of them find
the same layout. So they are good for comparing jobs and microbatches, and for nothing else; seconds are profiler.py's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packlora.base.device import choose_device
from packlora.parallel.layout import Layout
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiler import analytic_cost
from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch

WORK_FLOPS = {"cuda": 4e14, "cpu": 4e10}
"""FLOP/s, by device. It sets what is fixed for a microbatch against what its tokens take."""


class Work:
    """Predicted times of a run's samples: layers and a job's own adapter by tokens, attention by the squares of lengths, the
    output layer by label tokens.

    samples: by job, of each of its samples. fixed: of a microbatch, however little is in it.

    Args:
        experts_on: devices that hold the experts together.
    """

    def __init__(self, prepared: PreparedRun, experts_on: int = 1) -> None:
        flops = WORK_FLOPS[choose_device(prepared.run.device).type]
        cost = analytic_cost(prepared.run, prepared, flops, experts_on=experts_on)
        self.fixed = cost.fixed * (1 + cost.backward_ratio)
        self.samples = {job.data.name: _seconds(prepared, job, flops, experts_on) for job in prepared.jobs}
        self._prepared, self._flops = prepared, flops

    def staged(self, layout: Layout) -> CostModel | None:
        """Of the stages of a layout's pipelines; None where it has none."""
        if layout.pipeline == 1:
            return None
        run, experts_on = self._prepared.run, 1 if layout.exchange else layout.expert
        return analytic_cost(run, self._prepared, self._flops, stages=layout.pipeline, experts_on=experts_on)

    def jobs(self) -> dict[str, float]:
        """By job, of all its samples on one device, with its share of what is fixed for a microbatch."""
        each = self.fixed / self._prepared.budget
        return {
            job.data.name: job.data.total(self.samples[job.data.name] + each * job.data.planned.lengths)
            for job in self._prepared.jobs
        }

    def of(self, microbatch: Microbatch) -> float:
        """Of a microbatch; 0 of a no-op."""
        if microbatch.is_noop:
            return 0.0
        return self.fixed + sum(self._sample(placed.job, placed.sample) for placed in microbatch.samples)

    def _sample(self, job: str, number: int) -> float:
        """Of a stream, the first samples stand for all."""
        known = self.samples[job]
        return float(known[number % len(known)])


def _seconds(prepared: PreparedRun, job: PreparedJob, flops: float, experts_on: int) -> np.ndarray:
    """Of each sample of a job."""
    cost = analytic_cost(prepared.run, replace(prepared, jobs=[job]), flops, experts_on=experts_on)
    lengths = job.data.planned.lengths.astype(np.float64)
    layers = cost.per_token * lengths + cost.per_token_squared * lengths**2
    head = cost.head_per_token / job.data.label_share * job.data.num_labels
    seconds: np.ndarray = layers * (1 + cost.backward_ratio) + head * (1 + cost.head_backward_ratio)
    return seconds
