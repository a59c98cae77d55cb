"""Grouping of jobs that are packed together: few large groups pack best, many small ones keep a job's batches far apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

SPREADS = 0.25
"""Standard deviations by which a batch is taken to be smaller than its mean (LoRAFusion: k sigma)."""


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


def keeps_apart(groups: Sequence[Sequence[int]], shapes: Sequence[JobShape], capacity: int, stages: int) -> bool:
    """The bubble condition: without any one group, the others fill the stages - 1 slots between two of its batches."""
    low = [
        max(sum(shapes[j].batch_tokens - SPREADS * shapes[j].batch_deviation for j in group), 0) / capacity
        for group in groups
    ]
    total = sum(low)
    return all(total - one >= stages - 1 for one in low)


def groupings(shapes: Sequence[JobShape], capacity: int, stages: int) -> list[list[list[int]]]:
    """Ways to group the jobs that are worth trying, the most promising first; each job is in one group.

    At least two groups where there are two jobs: the last microbatch of one can then be filled up with samples of the other.
    """
    num_jobs = len(shapes)
    apart = None
    for count in range(min(2, num_jobs), num_jobs + 1):
        if keeps_apart(pair_up(shapes, count), shapes, capacity, stages):
            apart = count
            break
    counts = [apart or num_jobs, num_jobs, (num_jobs + 1) // 2] if stages > 1 else [apart or 1, 1, num_jobs]
    return [pair_up(shapes, count) for count in dict.fromkeys(counts)]
