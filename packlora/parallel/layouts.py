"""Layouts of a run on so many processes, and which one is predicted to be better. Plain values, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from packlora.parallel.layout import Layout, Wave

MOST_IDLE = 0.05
"""Share of the devices' time that may be idle where no more of them share a job."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times of a layout. waves: of the group with the most. time: until the last group is done; busy: of all
    devices together. Both in the unit of the cost."""

    layout: Layout
    waves: int
    time: float
    busy: float

    @property
    def idle(self) -> float:
        """Share of all devices' time in which they have no microbatch; those that hold a layer together count as one."""
        return 1.0 - self.busy / (self.time * self.layout.replicas * self.layout.pipeline) if self.time else 0.0


def layouts(
    work: Mapping[str, float], world: int, tensor: int = 1, pipeline: int = 1, shard: int = 1, expert: int = 1,
    exchange: bool = False, own: tuple[str, int] = ("", 1),
) -> list[Layout]:  # fmt: skip
    """All layouts of a run on `world` processes, those whose jobs share the fewest first.

    Args:
        work: by job, what it is predicted to take on one replica, in any unit.
        tensor, pipeline, shard, expert, exchange, own: see Layout; their product divides world.
    """
    replicas = world // (tensor * pipeline * (1 if exchange else expert) * own[1])
    least = shard * (expert if exchange else 1)
    sizes = [size for size in range(least, replicas + 1, least) if replicas % size == 0]
    return [
        Layout(place(work, replicas // size), size, tensor, pipeline, shard, expert, exchange, own) for size in sizes
    ]


def fewest(every: Sequence[Layout], asked: int | str) -> list[Layout]:
    """Choose, of the layouts that have as many devices per job as is asked for, the first that leaves none without a job."""
    own = [one for one in every if asked in ("auto", one.devices_per_job)]
    return [one for one in own if all(one.groups)][:1]


def predict(
    layout: Layout, planned: Sequence[Sequence[Wave]], parts: Sequence[float],
    times: Callable[[Sequence[Wave]], tuple[float, float]],
) -> Prediction:  # fmt: skip
    """Predict the times of a layout whose groups run these waves.

    Args:
        planned: by group, its waves, or those of its beginning.
        parts: by group, the part of its work that `planned` is.
        times: of the waves of a group, until they are done, and the sum of what all devices do.
    """
    taken = [(*times(own), part) for own, part in zip(planned, parts, strict=True)]
    most = max(round(len(own) / part) for own, part in zip(planned, parts, strict=True))
    return Prediction(
        layout, most, max(time / part for time, _, part in taken), sum(work / part for _, work, part in taken)
    )


def choose(predictions: Sequence[Prediction]) -> Prediction:
    """The first one that leaves at most MOST_IDLE of the time idle; else the one that is done first.

    Args:
        predictions: those whose jobs share the fewest devices first.
    """
    for one in predictions:
        if one.idle <= MOST_IDLE:
            return one
    return min(predictions, key=lambda one: one.time)


def place(work: Mapping[str, float], groups: int) -> tuple[tuple[str, ...], ...]:
    """Jobs on so many groups, the longest first, each to the group that has least to do. Some groups get none where
    there are fewer jobs."""
    order = {name: number for number, name in enumerate(work)}
    placed: list[list[str]] = [[] for _ in range(groups)]
    load = [0.0] * groups
    for name in sorted(work, key=lambda name: (-work[name], order[name])):
        least = load.index(min(load))
        placed[least].append(name)
        load[least] += work[name]
    return tuple(tuple(sorted(own, key=order.__getitem__)) for own in placed)
