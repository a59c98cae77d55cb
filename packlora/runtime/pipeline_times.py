"""When forwards and backwards ran on the stages of a pipeline, and what was predicted: report/timeline.py shows it.

On a GPU they are timed by events; the device is not waited for until the pipeline is dry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from packlora.base.device import choose_device
from packlora.config import Run
from packlora.engine.memory import peak_memory
from packlora.parallel.pipeline import Links
from packlora.report.events import PipelineRan
from packlora.runtime.job import Job
from packlora.runtime.machine_speed import machine_flops
from packlora.runtime.prepared_job import ModelShape
from packlora.runtime.profiler import model_flops
from packlora.schedule.cost import CostModel
from packlora.schedule.simulate import simulate
from packlora.schedule.types import Microbatch

DRAWN = 48
"""Slots of a timeline that are kept."""
Span = tuple[str, int, float, float]
"""forward or backward; the slot; start and end in seconds since the epoch, so that stages of one machine agree."""


class StageClock:
    def __init__(self, device: torch.device) -> None:
        self.cuda, self.device = device.type == "cuda", device
        self._spans: list[tuple[str, int, Any, Any]] = []
        self._began = 0.0
        self._base: Any = None

    def begin(self) -> None:
        """Begin to time, while nothing runs."""
        self._spans.clear()
        if self.cuda:
            torch.cuda.synchronize(self.device)
            self._base = self._now()
            self._began = time.time()

    @contextmanager
    def span(self, kind: str, slot: int) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((kind, slot, start, self._now()))

    def taken(self) -> list[Span]:
        """Spans that have run since it began, in order; the device is waited for."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return [(kind, slot, self._seconds(start), self._seconds(end)) for kind, slot, start, end in self._spans]

    def _now(self) -> Any:
        if not self.cuda:
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        if not self.cuda:
            return float(moment)
        return self._began + float(self._base.elapsed_time(moment)) / 1e3


class PipelineTimes:
    """Report of the first stage on a pipeline each time that it has run dry.

    Args:
        cost: predicts the time of microbatches on each stage.
    """

    def __init__(self, run: Run, shape: ModelShape, links: Links, device: torch.device, cost: CostModel) -> None:
        self.run, self.shape, self.links, self.device, self.cost = run, shape, links, device, cost
        self.clock, self._longest = StageClock(device), 0
        self._slots: list[tuple[int, Microbatch | None]] = []

    def begin(self) -> None:
        """Forget the slots, while the pipeline is dry."""
        self._slots.clear()
        self.clock.begin()

    def entered(self, window: int, microbatch: Microbatch | None) -> None:
        """A slot enters: the first round of its window, and the microbatch of this replica, if it runs one."""
        self._slots.append((window, microbatch))

    def told(self, jobs: Mapping[str, Job]) -> PipelineRan | None:
        """None where nothing ran, and but for the first process. All processes of a chain call it."""
        microbatches, spans = [own or Microbatch() for _, own in self._slots], self.clock.taken()
        is_longest, self._longest = len(spans) > self._longest, max(self._longest, len(spans))
        busy = sum(end - start for *_, start, end in spans)
        ends = min((start for *_, start, _ in spans), default=0.0), max((end for *_, end in spans), default=0.0)
        told = self.links.gather([busy, peak_memory(self.device), *ends, spans if is_longest else []])
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
            **timelines(microbatches, self.cost, [own for *_, own in told], begin),
        )  # fmt: skip


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
        shares: list[dict[str, int]] = []
        for one in microbatches[:shown]:
            shares.append({})
            for placed in one.samples:
                shares[-1][placed.job] = shares[-1].get(placed.job, 0) + placed.length
        predicted = [
            (one.stage, one.kind, one.microbatch, one.start, one.end)
            for one in foreseen.spans
            if one.microbatch < shown and shares[one.microbatch]
        ]
        found |= {"jobs": tuple(shares), "spans": tuple(spans), "predicted_spans": tuple(predicted)}
    return found
