"""Rules of the search for a window: which jobs are packed together, which layouts are tried, and which of them is better.

Few large groups of jobs pack best, many small ones keep a job's batches far apart. Rules of one device are here: the fewest
slots. A pipeline has its own (packlora/pipeline/rules.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from typing import Protocol, TypeVar

from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch


@dataclass(frozen=True, slots=True)
class JobShape:
    """Lengths of a job in a window: mean_length of its samples, batch_tokens and their standard deviation, in tokens."""

    mean_length: float
    batch_tokens: float
    batch_deviation: float

    @classmethod
    def of(cls, batches: Sequence[Sequence[int]]) -> JobShape:
        totals = [sum(batch) for batch in batches]
        count = sum(map(len, batches))
        mean = sum(totals) / len(totals)
        deviation = sqrt(sum((total - mean) ** 2 for total in totals) / len(totals))
        return cls(sum(totals) / count, mean, deviation)


def pair_up(shapes: Sequence[JobShape], groups: int) -> list[list[int]]:
    """Jobs in so many groups, head with tail: by falling mean length dealt out to the groups forth and back.

    With twice as many jobs as groups this is the pairing of the longest with the shortest of LoRAFusion.
    """
    order = sorted(range(len(shapes)), key=lambda j: (-shapes[j].mean_length, j))
    out: list[list[int]] = [[] for _ in range(groups)]
    for place, job in enumerate(order):
        turn, at = divmod(place, groups)
        out[at if turn % 2 == 0 else groups - 1 - at].append(job)
    return [sorted(group) for group in out if group]


class Candidate(Protocol):
    """A layout of a window. score: smaller is better. fullest: tokens of its fullest slot."""

    @property
    def score(self) -> tuple[float, int]: ...

    @property
    def fullest(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class Rules:
    """Search for the fewest slots."""

    def groups(self, shapes: Sequence[JobShape], capacity: int) -> list[list[int]]:
        """Groups of jobs; each job is in one. There are two where there are two jobs: samples of one can then fill up the last
        microbatch of the other."""
        return pair_up(shapes, min(2, len(shapes)))

    def candidates(self, capacity: int, groups: int, lay_out: Callable[[int, bool], C]) -> Iterator[C]:
        """Layouts to be compared.

        Args:
            groups: how many groups of jobs there are that may share a microbatch.
            lay_out: makes one, by the tokens that a microbatch is filled to, and whether groups share one.
        """
        yield lay_out(capacity, True)

    def length(self, microbatches: Sequence[Microbatch], slots: int) -> float:
        """First part of a score. slots: of the microbatches where a window like theirs came before."""
        return float(slots)


def rules_of(lag: int, cost: CostModel | None) -> Rules:
    """Rules where a job's global batches are `lag` slots apart. cost: of a microbatch on each device."""
    if lag == 1:
        return Rules()
    rules: Rules = import_module("packlora.pipeline.rules").StageRules(lag, cost)
    return rules
