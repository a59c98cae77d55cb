"""Terms of the scheduler: samples placed in microbatches, windows of rounds, and reports about them.

A round is one global batch of every job that is not finished: in round r a job that joined at round q contributes its global
batch r - q. A window is a few consecutive rounds, planned at once; nothing is shared across a window's border, so a window
depends on its own rounds alone. A slot is a place in the order of microbatches, no-ops included, which is also the order in
which microbatches enter the first pipeline stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from packlora.errors import InputError

METHODS = ("auto", "greedy", "milp", "solo")
"""solo: jobs never share a microbatch. greedy, auto: heuristics. milp: an integer program for every global batch of a group,
beside them."""


class ScheduleError(InputError):
    """Samples that cannot be scheduled, or a schedule that cannot be proved to be valid."""


class JobBatches(Protocol):
    """Interface of a job to the scheduler."""

    @property
    def name(self) -> str: ...

    @property
    def num_batches(self) -> int: ...

    def batch(self, n: int) -> Sequence[tuple[int, int]]:
        """(sample number, length in tokens) of global batch n, from 0. The same answer every time."""
        ...


@dataclass(frozen=True, slots=True)
class Placed:
    """One sample in a microbatch: its job, its global batch (optimizer step, from 0), its number in the job's data, tokens."""

    job: str
    batch: int
    sample: int
    length: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples that are run together. Samples are ordered by job, then as in the job's global batch; a no-op has none."""

    samples: tuple[Placed, ...] = ()
    completes: tuple[tuple[str, int], ...] = ()
    """(job, batch) whose last samples are here, so that the job's optimizer may take that step."""

    @property
    def num_tokens(self) -> int:
        return sum(placed.length for placed in self.samples)

    @property
    def is_noop(self) -> bool:
        return not self.samples

    @property
    def tokens_by_job(self) -> dict[str, int]:
        """Tokens of each of its jobs, in the order of their first samples."""
        tokens: dict[str, int] = {}
        for placed in self.samples:
            tokens[placed.job] = tokens.get(placed.job, 0) + placed.length
        return tokens


NOOP = Microbatch()


@dataclass(frozen=True, slots=True)
class Carry:
    """State of the slots before a window: for each job, the number of slots after the last one that held its samples.
    0 where that was the very last slot. A job that is absent may enter at once.
    """

    slots_since: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PackReport:
    """Packing of one global batch of a group.

    bound: fewest microbatches it could open, given the room it was left in the one before. microbatches: how many it
    opened. stopped: at the bound | greedy | optimal | node limit | time limit | failed (why nothing better was sought).
    """

    round: int
    group: int
    bound: int
    microbatches: int
    stopped: str

    @property
    def at_bound(self) -> bool:
        return self.microbatches <= self.bound


@dataclass(frozen=True, slots=True)
class WindowReport:
    """Quality of a window, and the work done for it.

    bound: fewest slots that any schedule of these rounds has (bounds.window_bound). microbatches: without no-ops.
    stopped: why no better window was sought. tokens_per_microbatch: what microbatches were filled to; below the capacity
    where smaller ones keep the pipeline busier. groups: the jobs that were packed together. packs: one per round and group.
    """

    method: str
    bound: int
    microbatches: int
    noops: int
    stopped: str
    seconds: float
    tokens: int = 0
    capacity: int = 0
    tokens_per_microbatch: int = 0
    groups: tuple[tuple[str, ...], ...] = ()
    packs: tuple[PackReport, ...] = ()
    notes: tuple[str, ...] = ()
    """Failures that were worked around: an integer program that the time limit has stopped."""

    @property
    def gap(self) -> float:
        """Slots above the bound, as a part of the bound; 0 is proved to be the best."""
        return (self.microbatches + self.noops - self.bound) / self.bound if self.bound else 0.0


@dataclass(frozen=True, slots=True)
class Window:
    """The microbatches of rounds first_round .. first_round + num_rounds - 1, in order, no-ops included."""

    first_round: int
    num_rounds: int
    microbatches: tuple[Microbatch, ...]
    report: WindowReport
    carry: Carry = field(default_factory=Carry)
    """State for the window after this one."""
