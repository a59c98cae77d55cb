"""Pack the global batches of several jobs into few, full microbatches.

In round r every job that is not finished contributes its r-th global batch; the samples of the round are packed
together. A round's microbatches depend on that round's lengths alone, so a run can be continued at any round without
replaying the plan. With one pipeline stage the order of rounds already keeps every job from reading stale weights: all of
a job's batch r is done before anything of its batch r + 1 starts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placed:
    """One sample in a microbatch: the job, its number in the job's data, its length in tokens."""

    job: str
    sample: int
    length: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What is run at once. Samples are ordered by job, then as in the job's global batch."""

    samples: tuple[Placed, ...]
    completes: tuple[str, ...]
    """Jobs whose global batch is complete after this microbatch, so that their optimizer may step."""

    @property
    def num_tokens(self) -> int:
        return sum(placed.length for placed in self.samples)


def lower_bound(lengths: Sequence[int], capacity: int) -> int:
    """Fewest microbatches that can hold the lengths: by volume, and by samples over half that cannot share one."""
    return max(-(-sum(lengths) // capacity), sum(2 * length > capacity for length in lengths))


def pack_round(
    batches: Mapping[str, Sequence[tuple[int, int]]], capacity: int, method: str = "greedy"
) -> list[Microbatch]:
    """Microbatches of one round.

    Args:
        batches: per job its global batch as (sample number, length); jobs are packed in the mapping's order.
        capacity: most tokens of a microbatch.
        method: greedy (best fit of samples by falling length, jobs mixed) or solo (jobs never share a microbatch).

    Raises:
        ValueError: a sample is longer than the capacity; a sample is never split.
    """
    if method == "solo":
        return [mb for job, batch in batches.items() for mb in pack_round({job: batch}, capacity)]
    placed = [Placed(job, sample, length) for job, batch in batches.items() for sample, length in batch]
    bins = _best_fit_decreasing([item.length for item in placed], capacity)
    last = {placed[index].job: number for number, content in enumerate(bins) for index in content}
    return [
        Microbatch(
            tuple(placed[index] for index in sorted(content)),
            tuple(job for job in batches if last.get(job) == number),
        )
        for number, content in enumerate(bins)
    ]


def _best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices by bin: each sample, longest first, into the fullest bin that still takes it. O(n log n) searches."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens does not fit a microbatch of {capacity}")
        at = bisect_left(free, (length, -1))
        if at == len(free):
            bins.append([index])
            room, number = capacity - length, len(bins) - 1
        else:
            room, number = free.pop(at)
            bins[number].append(index)
            room -= length
        insort(free, (room, number))
    return bins
