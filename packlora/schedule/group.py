"""Grouping of jobs that are packed together: few large groups pack best, many small ones keep a job's batches far apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt


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
