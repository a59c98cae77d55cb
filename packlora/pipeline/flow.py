"""Flow of slots through the stages of a pipeline: when forwards and backwards ran, and what was predicted. page.py shows it.

On a GPU they are timed by events; the device is not waited for until the pipeline is dry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packlora.base.device import choose_device
from packlora.config import Run
from packlora.engine.engine import Engine
from packlora.engine.memory import TokenBudget, peak_memory
from packlora.engine.passes import Executor
from packlora.events import PipelineRan
from packlora.parallel.alone import Alone
from packlora.pipeline.engine import StageEngine
from packlora.pipeline.links import Links
from packlora.pipeline.passes import Span, StageClock
from packlora.pipeline.timeline import simulate
from packlora.runtime.flow import Flow
from packlora.runtime.job import Job
from packlora.runtime.machine_speed import machine_flops
from packlora.runtime.prepared_job import ModelShape
from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch

DRAWN = 48
"""Slots of a timeline that are kept."""


class StageFlow(Flow):
    """Flow through a stage. The first stage reports each time that the pipeline has run dry.

    Args:
        clock: of the stage.
        predicted: time of microbatches on each stage.
        cost: see Flow.
    """

    def __init__(
        self, run: Run, shape: ModelShape, links: Links, clock: StageClock, predicted: CostModel, cost: CostModel
    ) -> None:
        self.run, self.shape, self.links, self.clock, self.predicted = run, shape, links, clock, predicted
        self.lag, self.cost = links.stages, cost
        self._longest = 0
        self._slots: list[tuple[int, Microbatch | None]] = []

    def engine(self, executor: Executor, group: Alone, budget: TokenBudget) -> Engine:
        """See Flow."""
        return StageEngine(executor, self.links, budget)

    def begin(self) -> None:
        """See Flow: forget the slots."""
        self._slots.clear()
        self.clock.begin()

    def entered(self, window: int, microbatch: Microbatch | None) -> None:
        """See Flow."""
        self._slots.append((window, microbatch))

    def ran(self, jobs: Mapping[str, Job]) -> PipelineRan | None:
        """See Flow. None where nothing ran, and but for the first process."""
        microbatches, spans = [own or Microbatch() for _, own in self._slots], self._spans()
        is_longest, self._longest = len(spans) > self._longest, max(self._longest, len(spans))
        busy = sum(end - start for *_, start, end in spans)
        ends = min((start for *_, start, _ in spans), default=0.0), max((end for *_, end in spans), default=0.0)
        told = self.links.gather([busy, peak_memory(self.clock.device), *ends, spans if is_longest else []])
        if not self.links.leads or not spans:
            return None
        begin, end = min(first for _, _, first, *_ in told), max(last for *_, last, _ in told)
        seconds, stages = end - begin, self.links.stages
        speed = machine_flops(choose_device(self.run.device), self.run.dtype)
        return PipelineRan(
            window=self._slots[0][0], slots=len(microbatches), noops=sum(one.is_noop for one in microbatches),
            tokens=sum(one.num_tokens for one in microbatches), seconds=seconds, busy=tuple(own for own, *_ in told),
            bubble=1 - sum(own for own, *_ in told) / (stages * seconds), peak_memory=tuple(own for _, own, *_ in told),
            mfu=model_flops(self.shape, jobs, microbatches) / (seconds * stages * speed),
            **timelines(microbatches, self.predicted, [own for *_, own in told], begin),
        )  # fmt: skip

    def _spans(self) -> list[Span]:
        """Spans of the clock, with slots as numbers."""
        slots = [number for number, (_, own) in enumerate(self._slots) if own is not None]
        return [(kind, slots[number], start, end) for kind, number, start, end in self.clock.taken()]


def timelines(
    microbatches: Sequence[Microbatch], cost: CostModel, told: Sequence[Sequence[Span]], begin: float
) -> dict[str, Any]:  # fmt: skip
    """Predictions and timelines of the first slots, as PipelineRan has them.

    Args:
        told: by stage, its spans; begin: of the first of them.
    """
    foreseen = simulate(microbatches, cost)
    found: dict[str, Any] = {"predicted_seconds": foreseen.makespan, "predicted_bubble": foreseen.bubble}
    shown = min(len(microbatches), DRAWN)
    spans = [
        (stage, kind, slot, start - begin, end - begin)
        for stage, own in enumerate(told)
        for kind, slot, start, end in own if slot < shown
    ]  # fmt: skip
    if spans:
        shares = [one.tokens_by_job for one in microbatches[:shown]]
        predicted = [
            (one.stage, one.kind, one.microbatch, one.start, one.end)
            for one in foreseen.spans
            if one.microbatch < shown and shares[one.microbatch]
        ]
        found |= {"jobs": tuple(shares), "spans": tuple(spans), "predicted_spans": tuple(predicted)}
    return found


def model_flops(shape: ModelShape, jobs: Mapping[str, Job], microbatches: Sequence[Microbatch]) -> float:
    """Floating-point operations of forward and backward: frozen linear layers and the output layer twice, without gradients of
    their weights, a token's own adapter three times; of experts those that a token goes to; attention scores are not
    counted."""
    head, frozen = 4 * shape.hidden * shape.vocabulary, shape.linear_parameters + shape.routed_parameters
    idle = 1 - shape.routed_parameters / shape.expert_parameters if shape.expert_parameters else 0.0
    each = {
        name: 4 * frozen
        + 6 * (job.adapter.num_parameters - idle * job.adapter.on_experts)
        + head * job.data.label_share
        for name, job in jobs.items()
    }
    return sum(placed.length * each[placed.job] for one in microbatches for placed in one.samples)
