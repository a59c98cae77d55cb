"""Who trains what: jobs on groups of processes, and the microbatches of a group on its processes. Plain values, no torch.

The processes of a run form groups of the same size. A job is whole on one group. A group's microbatches are planned as for one
device that is as much larger as there are processes, and run in waves: a part of each on every process, at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from packlora.schedule.types import Microbatch, Placed

MOST_IDLE = 0.05
"""Share of the devices' time for which a job is whole on one device all the same."""


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


def choose(seconds: Mapping[str, float], world: int, split: int | None = None) -> Layout:
    """The layout of a run on `world` processes: as few processes share a job as leave at most MOST_IDLE of the time idle; else
    those that are predicted to be done first.

    Args:
        seconds: by job, what it is predicted to take on one device.
        split: processes that share a job, where that is given; it divides `world`.
    """
    sizes = [size for size in range(1, world + 1) if world % size == 0] if split is None else [split]
    layouts = [Layout(place(seconds, world // size), size) for size in sizes]
    for layout in layouts:
        if idle(seconds, layout) <= MOST_IDLE:
            return layout
    return min(layouts, key=lambda layout: makespan(seconds, layout))


def place(seconds: Mapping[str, float], groups: int) -> tuple[tuple[str, ...], ...]:
    """Jobs on so many groups, the longest first, each to the group that has least to do. Some groups get none where
    there are fewer jobs."""
    order = {name: number for number, name in enumerate(seconds)}
    placed: list[list[str]] = [[] for _ in range(groups)]
    load = [0.0] * groups
    for name in sorted(seconds, key=lambda name: (-seconds[name], order[name])):
        least = load.index(min(load))
        placed[least].append(name)
        load[least] += seconds[name]
    return tuple(tuple(sorted(own, key=order.__getitem__)) for own in placed)


def makespan(seconds: Mapping[str, float], layout: Layout) -> float:
    """Seconds until the last group is done, where the processes of a group share its work evenly."""
    return max(sum(seconds[name] for name in own) for own in layout.groups) / layout.split


def idle(seconds: Mapping[str, float], layout: Layout) -> float:
    """Share of all processes' time in which they have nothing to do."""
    total = makespan(seconds, layout) * layout.split * len(layout.groups)
    return 1.0 - sum(seconds.values()) / total if total else 0.0


def waves(microbatches: Sequence[Microbatch], size: int, capacity: int) -> list[list[Microbatch]]:
    """What processes that share their jobs run at the same time: planned microbatches of up to `size` times the capacity of one
    process, each in `size` parts of about the same number of tokens. Some parts are empty where there are few samples; one
    whose samples do not fit so makes two waves or more.

    Args:
        capacity: most tokens of a process's microbatch; no sample is longer.
    """
    if size == 1:
        return [[microbatch] for microbatch in microbatches]
    out = []
    for microbatch in microbatches:
        parts = _balanced(microbatch, size, capacity) or _filled(microbatch, capacity)
        groups = [parts[first : first + size] for first in range(0, len(parts), size)]
        waves_of_it = [[Microbatch(tuple(part)) for part in group] for group in groups]
        waves_of_it[-1][0] = replace(waves_of_it[-1][0], completes=microbatch.completes)
        out += waves_of_it
    return out


def _balanced(microbatch: Microbatch, size: int, capacity: int) -> list[list[Placed]] | None:
    """Its samples in `size` parts, the longest sample first to the part that has least; None where a part is too large."""
    parts: list[list[Placed]] = [[] for _ in range(size)]
    load = [0] * size
    for placed in sorted(microbatch.samples, key=lambda placed: -placed.length):
        least = load.index(min(load))
        parts[least].append(placed)
        load[least] += placed.length
    return [_in_order(microbatch, part) for part in parts] if max(load) <= capacity else None


def _filled(microbatch: Microbatch, capacity: int) -> list[list[Placed]]:
    """Its samples in as many parts as it takes, the longest sample first to the first part that has room."""
    parts: list[list[Placed]] = []
    for placed in sorted(microbatch.samples, key=lambda placed: -placed.length):
        fits = (part for part in parts if sum(other.length for other in part) + placed.length <= capacity)
        part = next(fits, None)
        if part is None:
            parts.append(part := [])
        part.append(placed)
    return [_in_order(microbatch, part) for part in parts]


def _in_order(microbatch: Microbatch, part: Sequence[Placed]) -> list[Placed]:
    chosen = set(map(id, part))
    return [placed for placed in microbatch.samples if id(placed) in chosen]
