"""Who trains what: jobs on groups of processes, and the microbatches of a group on its processes. Plain values, no torch.

The processes of a run form groups of the same size. A job is whole on one group. In a group there are one or several replicas
of the model, each of them one process, or some that hold it together. A group's microbatches are planned as for one device that
is as much larger as there are replicas, and run in waves: a part of each on every replica, at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from packlora.config.parallel import PLACEMENTS
from packlora.schedule.types import Microbatch, Placed

Wave = Sequence[Microbatch]
"""Microbatches that run at the same time, at most one for each replica of a group."""
FULL = 0.9
"""Share of the room of all processes that microbatches are planned to take: fuller ones cannot be cut evenly, and what is left
over takes a wave of its own. From 0.9 to 0.97 makes a difference of 0.4 % on average (benchmarks/LOG.md)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """groups: names of the jobs of each group, in the order of the run. split: replicas of a group, which share each job.
    tensor: processes that hold a layer together, side by side; pipeline: stages of such processes, or of those of expert, one
    behind the other; both together are a replica. shard: replicas, one behind the other, each of which holds a part of the
    rows of every weight (sharded.py); it divides split. 1: each holds all rows. expert: processes that hold the experts
    together, and all else each; they are a replica too; with tensor so many sets of such processes share out the experts, of
    which each process has other ones. exchange: each, or each set, has microbatches of its own, so it counts as a replica;
    their groups are multiples of expert times shard, and pipeline is 1. own: placement with a folder (runtime/placements/), and
    the number of processes that make up a replica by it; all else is 1 then.

    In a group the replicas lie one behind the other, in a replica its stages, in a stage its processes."""

    groups: tuple[tuple[str, ...], ...]
    split: int = 1
    tensor: int = 1
    pipeline: int = 1
    shard: int = 1
    expert: int = 1
    exchange: bool = False
    own: tuple[str, int] = ("", 1)

    @staticmethod
    def of_one_device(jobs: Iterable[str]) -> Layout:
        """All jobs on one device, which holds the whole base model."""
        return Layout((tuple(jobs),))

    @property
    def replicas(self) -> int:
        return len(self.groups) * self.split

    @property
    def devices_per_replica(self) -> int:
        return self.tensor * self.pipeline * self.experts_on * self.own[1]

    @property
    def package(self) -> str | None:
        """Package whose module `placement` has the placement of a replica, PLACEMENT; None: several.OverProcesses is it."""
        if self.own[0]:
            return f"{PLACEMENTS}.{self.own[0]}"
        return "packlora.pipeline" if self.pipeline > 1 else None

    @property
    def experts_on(self) -> int:
        """Number of devices that compute the experts of a microbatch together."""
        return 1 if self.exchange else self.expert

    @property
    def sharded(self) -> bool:
        """Whether replicas share weights by rows."""
        return self.shard > 1

    @property
    def devices_per_base(self) -> int:
        """Processes that hold the base model together, once."""
        return self.slices * self.shard

    @property
    def slices(self) -> int:
        """Number of slices of the base model, each of which is held by a process, or shared by rows."""
        return self.tensor * self.pipeline * self.expert

    @property
    def is_in_parts(self) -> bool:
        """Whether no process holds the whole base model."""
        return self.devices_per_base > 1

    @property
    def processes(self) -> int:
        return self.replicas * self.devices_per_replica

    @property
    def devices_per_job(self) -> int:
        """Processes of a group."""
        return self.split * self.devices_per_replica

    @property
    def words(self) -> list[str]:
        """How devices hold the model together."""
        words = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        words += [f"shard {self.shard}"] if self.sharded else []
        words += [f"pipeline of {self.pipeline}"] if self.pipeline > 1 else []
        words += ["{} {}".format(*self.own)] if self.own[0] else []
        way = ", all_to_all" if self.exchange else ""
        return words + ([f"experts on {self.expert}{way}"] if self.expert > 1 else [])

    def group_of(self, rank: int) -> int:
        return rank // self.devices_per_job

    def ranks(self, group: int) -> range:
        """Ranks of a group; the first one leads it."""
        return range(group * self.devices_per_job, (group + 1) * self.devices_per_job)


def planned(capacity: int, size: int) -> int:
    """Tokens of the microbatches that are planned for `size` processes which share them, each of which holds `capacity`."""
    return capacity if size == 1 else max(capacity, int(FULL * capacity * size))


def waves(microbatches: Sequence[Microbatch], size: int, capacity: int) -> list[list[Microbatch]]:
    """Cut microbatches of up to `planned` tokens into what the processes that share their jobs run at the same time: `size`
    parts of about the same number of tokens. Some parts are empty where there are few samples; one whose samples do not fit so
    makes two waves or more.

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
