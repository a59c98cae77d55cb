"""Bin packing by heuristics: best fit by falling length, then sums of subsets to fill all bins but the last one.

The bins of one global batch of a group of jobs. The first bin may be open already: the last microbatch of the batch before
it, with some room left.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Packing:
    """Indices of samples per bin. opened: those put into the open bin. bins: new ones, the emptiest last."""

    opened: list[int]
    bins: list[list[int]]


def best_subset(lengths: Sequence[int], capacity: int) -> list[int]:
    """Indices whose lengths have the largest sum that is not above the capacity.

    Sums are bits of one integer; of equal sums the one that takes earlier indices is returned. O(n * capacity / 64).
    """
    mask = (1 << (capacity + 1)) - 1
    full = 1 << capacity
    bits = 1
    reached = [1]
    for length in lengths:
        bits |= (bits << length) & mask
        reached.append(bits)
        if bits & full:
            break
    left = bits.bit_length() - 1
    chosen = []
    for index in range(len(reached) - 2, -1, -1):
        if left == 0:
            break
        if not reached[index] >> left & 1:
            chosen.append(index)
            left -= lengths[index]
    chosen.reverse()
    return chosen


def pack(lengths: Sequence[int], capacity: int, room: int = 0, allowed: Sequence[bool] | None = None) -> Packing:
    """Few bins, all but the last as full as can be.

    Args:
        lengths: tokens of the samples. One longer than the capacity gets a bin of its own.
        capacity: tokens of a bin.
        room: tokens that the open bin still takes.
        allowed: samples that may go into the open bin; None: all.
    """
    return fill_up(best_fit(lengths, capacity, room, allowed), lengths, capacity, room, allowed)


def best_fit(lengths: Sequence[int], capacity: int, room: int, allowed: Sequence[bool] | None) -> Packing:
    """Put each sample, longest first, into the fullest bin that still takes it. O(n log n) searches."""
    bins: list[list[int]] = [[]]  # the open one first
    free: list[tuple[int, int]] = [(room, 0)]  # (room left, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        at = bisect_left(free, (length, -1))
        if at < len(free) and free[at][1] == 0 and allowed is not None and not allowed[index]:
            at += 1
        if at == len(free):
            left, number = max(capacity - length, 0), len(bins)
            bins.append([index])
        else:
            left, number = free.pop(at)
            bins[number].append(index)
            left -= length
        insort(free, (left, number))
    return Packing(bins[0], bins[1:])


def fill_up(
    packing: Packing, lengths: Sequence[int], capacity: int, room: int, allowed: Sequence[bool] | None
) -> Packing:
    """Empty the emptiest bin into the others: each other bin takes the best subset of its own samples and the last one's."""
    bins = [(sum(lengths[i] for i in content), content) for content in packing.bins]
    opened = packing.opened
    opened_load = sum(lengths[i] for i in opened)
    while bins:
        bins.sort(key=lambda item: -item[0])
        load, tail = bins.pop()
        before = load
        if opened_load < room:
            free = [i for i in tail if allowed is None or allowed[i]]
            kept = [i for i in tail if not (allowed is None or allowed[i])]
            total, filled, rest = _filled(opened + free, lengths, room)
            if total > opened_load:
                load -= total - opened_load
                opened, tail, opened_load = filled, kept + rest, total
        for number in range(len(bins) - 1, -1, -1):
            if not tail:
                break
            other, content = bins[number]
            if other >= capacity:
                continue
            if other + load <= capacity:
                bins[number] = (other + load, content + tail)
                load, tail = 0, []
                break
            total, filled, rest = _filled(content + tail, lengths, capacity)
            if total > other:
                bins[number], tail = (total, filled), rest
                load -= total - other
        if tail:
            bins.append((load, tail))
            if load == before:
                break
    bins.sort(key=lambda item: -item[0])
    return Packing(opened, [content for _, content in bins])


def _filled(union: list[int], lengths: Sequence[int], capacity: int) -> tuple[int, list[int], list[int]]:
    """The best subset of some samples for a bin: its tokens, its samples, and the samples that are left."""
    taken = set(best_subset([lengths[i] for i in union], capacity))
    filled = [i for k, i in enumerate(union) if k in taken]
    return sum(lengths[i] for i in filled), filled, [i for k, i in enumerate(union) if k not in taken]
