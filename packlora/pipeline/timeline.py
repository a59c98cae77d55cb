"""The timeline of a pipeline that runs microbatches in 1F1B order without ever flushing.

Stage s of S runs S - s forwards, then a backward and a forward in turn, over all microbatches of a run. An optimizer step of a
job on a stage follows the backward of the last microbatch of its global batch there, and costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch


@dataclass(frozen=True, slots=True)
class Span:
    """One forward or backward of one microbatch on one stage; start and end in the cost model's unit."""

    stage: int
    kind: str
    """forward or backward"""
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """busy: per stage. bubble: part of the stages' time in which nothing runs, from the first start to the last end."""

    spans: tuple[Span, ...]
    makespan: float
    bubble: float
    busy: tuple[float, ...]


def simulate(microbatches: Sequence[Microbatch], cost: CostModel) -> Timeline:
    """Run the microbatches, no-ops included, on the stages of the cost model. Messages take no time."""
    stages = cost.devices
    times = [[cost.both(microbatch, stage) for microbatch in microbatches] for stage in range(stages)]
    forward, backward = end_times(times)
    spans = []
    for stage in range(stages):
        for number, (ahead, back) in enumerate(times[stage]):
            spans.append(Span(stage, "forward", number, forward[stage][number] - ahead, forward[stage][number]))
            spans.append(Span(stage, "backward", number, backward[stage][number] - back, backward[stage][number]))
    spans.sort(key=lambda span: (span.stage, span.start, span.end))
    busy = tuple(sum(ahead + back for ahead, back in times[stage]) for stage in range(stages))
    end = max((ends[-1] for ends in backward if ends), default=0.0)
    bubble = max(1 - sum(busy) / (stages * end), 0.0) if end else 0.0
    return Timeline(tuple(spans), end, bubble, busy)


def makespan(microbatches: Sequence[Microbatch], cost: CostModel) -> float:
    """Time from the first start to the last end."""
    times = [[cost.both(microbatch, stage) for microbatch in microbatches] for stage in range(cost.devices)]
    return max((ends[-1] for ends in end_times(times)[1] if ends), default=0.0)


def end_times(times: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[list[float]], list[list[float]]]:
    """End times of forwards and backwards, by stage and microbatch, from the duration of each."""
    stages, count = len(times), len(times[0])
    forward: list[list[float]] = [[] for _ in range(stages)]
    backward: list[list[float]] = [[] for _ in range(stages)]
    clock = [0.0] * stages
    # On stage s the forward of microbatch i follows the backward of microbatch i - (S - s), which stage s + 1 has done one
    # turn earlier.
    for number in range(count + stages):
        for stage in range(stages):
            back = number - (stages - stage)
            if 0 <= back < count:
                ready = backward[stage + 1][back] if stage + 1 < stages else forward[stage][back]
                clock[stage] = max(clock[stage], ready) + times[stage][back][1]
                backward[stage].append(clock[stage])
            if number < count:
                ready = forward[stage - 1][number] if stage else 0.0
                clock[stage] = max(clock[stage], ready) + times[stage][number][0]
                forward[stage].append(clock[stage])
    return forward, backward
