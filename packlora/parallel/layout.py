"""Who trains what: jobs on groups of processes, and the microbatches of a group on its processes. Plain values, no torch.

The processes of a run form groups of the same size. A job is whole on one group. A group's microbatches are planned as for one
device, and run in waves: at most one microbatch for each process at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packlora.schedule.types import Microbatch

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
