"""Who trains what: jobs on groups of processes, and the microbatches of a group on its processes. Plain values, no torch.

The processes of a run form groups of the same size. A job is whole on one group. A group's microbatches are planned as for one
device, and run in waves: at most one microbatch for each process at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from packlora.schedule.types import Microbatch

Wave = Sequence[Microbatch]
"""Microbatches that run at the same time, one for each process of a group."""
MOST_IDLE = 0.05
"""Share of the devices' time that may be idle where no more of them share a job."""


@dataclass(frozen=True, slots=True)
class Layout:
    """groups: names of the jobs of each group, in the order of the run. split: processes of a group, which share each job."""

    groups: tuple[tuple[str, ...], ...]
    split: int = 1

    @property
    def processes(self) -> int:
        return len(self.groups) * self.split

    def group_of(self, rank: int) -> int:
        return rank // self.split

    def ranks(self, group: int) -> range:
        """Of a group; the first one leads it."""
        return range(group * self.split, (group + 1) * self.split)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a layout is predicted to take. waves: of the group with the most. time: until the last group is done; busy: of all
    devices together. Both in the unit of the cost."""

    layout: Layout
    waves: int
    time: float
    busy: float

    @property
    def idle(self) -> float:
        """Share of all devices' time in which they have no microbatch."""
        return 1.0 - self.busy / (self.time * self.layout.processes) if self.time else 0.0


def layouts(work: Mapping[str, float], world: int) -> list[Layout]:
    """All layouts of a run on `world` processes, those whose jobs share the fewest first.

    Args:
        work: by job, what it is predicted to take on one device, in any unit.
    """
    return [Layout(place(work, world // size), size) for size in range(1, world + 1) if world % size == 0]


def predict(
    layout: Layout, planned: Sequence[Sequence[Wave]], parts: Sequence[float], cost: Callable[[Microbatch], float]
) -> Prediction:
    """What a layout takes whose groups run these waves. A wave takes what its costliest microbatch does.

    Args:
        planned: by group, its waves, or those of its beginning.
        parts: by group, the part of its work that `planned` is.
    """
    times = [sum(max(map(cost, wave)) for wave in own) / part for own, part in zip(planned, parts, strict=True)]
    busy = [sum(cost(one) for wave in own for one in wave) / part for own, part in zip(planned, parts, strict=True)]
    most = max(round(len(own) / part) for own, part in zip(planned, parts, strict=True))
    return Prediction(layout, most, max(times), sum(busy))


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


def waves(microbatches: Sequence[Microbatch], size: int) -> list[list[Microbatch]]:
    """Microbatches that may run at the same time, in their order: at most `size`, and none with samples of a job whose earlier
    global batch is completed in the same wave. A wave of one is what one device does."""
    out: list[list[Microbatch]] = []
    stepped: set[str] = set()
    for microbatch in microbatches:
        if not out or len(out[-1]) == size or stepped & {placed.job for placed in microbatch.samples}:
            out.append([])
            stepped = set()
        out[-1].append(microbatch)
        stepped |= {name for name, _ in microbatch.completes}
    return out
