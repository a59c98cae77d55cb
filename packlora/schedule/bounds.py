"""Lower bounds of the number of microbatches: no schedule beats them, so a schedule that reaches one is proved optimal."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


def volume_bound(total: int, capacity: int) -> int:
    """Bins of `capacity` tokens that hold `total` of them, if samples could be cut."""
    return -(-total // capacity)


def big_items_bound(lengths: Sequence[int], capacity: int) -> int:
    """The bound L2 of Martello and Toth (1990): samples over half the capacity never share a bin with each other.

    For every k <= capacity / 2: samples over capacity - k are alone among samples of at least k; those over half take one bin
    each; what the samples from k to half do not find room for beside them takes ceil(rest / capacity) bins more. Samples
    longer than the capacity count as one full bin each. Never below the volume bound. O(n log n).
    """
    sizes = sorted(min(length, capacity) for length in lengths)
    sums = [0, *accumulate(sizes)]
    half = bisect_right(sizes, capacity // 2)
    big = len(sizes) - half
    best = max(volume_bound(sums[-1], capacity), big)
    previous = -1
    for at in range(half):
        k = sizes[at]
        if k == previous:
            continue
        previous = k
        alone = bisect_right(sizes, capacity - k)  # from here on nothing of at least k fits beside
        beside = (alone - half) * capacity - (sums[alone] - sums[half])
        rest = sums[half] - sums[at] - beside
        if rest > 0:
            best = max(best, big + volume_bound(rest, capacity))
    return best


def opened_bound(lengths: Sequence[int], capacity: int, room: int, fill: int) -> int:
    """Fewest new bins beside an open one with `room` tokens left, of which at most `fill` can be used."""
    total = sum(min(length, capacity) for length in lengths)
    least = volume_bound(max(total - fill, 0), capacity)
    if room <= 0:
        return max(least, big_items_bound(lengths, capacity))
    # The open bin is a bin with one sample in it already.
    return max(least, big_items_bound([*lengths, capacity - room], capacity) - 1)


def window_bound(batches: Sequence[Sequence[Sequence[int]]], capacity: int, lag: int = 1, solo: bool = False) -> int:
    """Fewest slots of a window, no-ops included: by volume, by big samples, and by the order of each job's batches.

    Args:
        batches: per job, per global batch, the lengths of its samples.
        capacity: tokens of a microbatch.
        lag: batch b + 1 of a job starts `lag` slots or more after the last one of batch b.
        solo: jobs never share a microbatch.
    """
    total = sum(sum(batch) for job in batches for batch in job)
    alone = [[big_items_bound(batch, capacity) for batch in job] for job in batches]
    together = big_items_bound([length for job in batches for batch in job for length in batch], capacity)
    chain = max((sum(job) + (lag - 1) * (len(job) - 1) for job in alone if job), default=0)
    shared = sum(map(sum, alone)) if solo else 0
    return max(volume_bound(total, capacity), together, chain, shared)


def reachable(lengths: Sequence[int], room: int) -> int:
    """The largest sum of some of the lengths that is not above `room`."""
    mask = (1 << (room + 1)) - 1
    bits = 1
    for length in lengths:
        if length <= room:
            bits |= (bits << length) & mask
            if bits >> room:
                return room
    return bits.bit_length() - 1
