"""Bin packing by heuristics: best fit by falling length, then sums of subsets to fill all bins but the last one.

The bins of one global batch of a group of jobs. The first bin may be open already: the last microbatch of the batch before
it, with some room left.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SUBSET = 64
"""Samples that are looked at to fill one bin; keeps the work linear in the number of samples."""
MAX_SQUEEZED = 40
SWEEPS = 3
"""Sweeps over all pairs of MAX_SQUEEZED bins."""
RETRIES = 12
"""Other orders that are tried where a packing is above its bound."""


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


def repack(
    packing: Packing, least: int, lengths: Sequence[int], capacity: int, room: int, allowed: Sequence[bool] | None
) -> Packing:
    """The best of the packing and of others that fill bin by bin, in several orders, until one has `least` new bins."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for attempt in range(1 + RETRIES):
        other = _bin_by_bin(order, lengths, capacity, room, allowed)
        if attempt:
            other = fill_up(_squeeze(other, lengths, capacity), lengths, capacity, room, allowed)
        packing = min(packing, other, key=lambda each: _rank(each, lengths))
        if len(packing.bins) <= least:
            break
        order = _shaken(order, lengths, attempt)
    return packing


def _shaken(order: list[int], lengths: Sequence[int], attempt: int) -> list[int]:
    """Another order, the same every time: by falling length, each stretched by up to a fifth."""
    state = 2654435761 * (attempt + 1) % 2**32
    keys = {}
    for index in sorted(order):
        state = (1664525 * state + 1013904223) % 2**32
        keys[index] = -lengths[index] * (1 + 0.2 * state / 2**32)
    return sorted(order, key=lambda i: (keys[i], i))


def _rank(packing: Packing, lengths: Sequence[int]) -> tuple[int, int]:
    return len(packing.bins), sum(lengths[i] for i in packing.bins[-1]) if packing.bins else 0


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


def _bin_by_bin(
    order: list[int], lengths: Sequence[int], capacity: int, room: int, allowed: Sequence[bool] | None
) -> Packing:
    """Fill one bin after another: the first sample left, and the best subset of the others beside it."""
    left = order
    opened: list[int] = []
    if room > 0:
        free = _some([i for i in left if lengths[i] <= room and (allowed is None or allowed[i])])
        opened = [free[k] for k in best_subset([lengths[i] for i in free], room)]
        taken = set(opened)
        left = [i for i in left if i not in taken]
    bins = []
    while left:
        space = capacity - lengths[left[0]]
        content = [left[0]]
        if space > 0:
            free = _some([i for i in left[1:] if lengths[i] <= space])
            content += [free[k] for k in best_subset([lengths[i] for i in free], space)]
        taken = set(content)
        left = [i for i in left if i not in taken]
        bins.append(content)
    bins.sort(key=lambda content: -sum(lengths[i] for i in content))
    return Packing(opened, bins)


def _squeeze(packing: Packing, lengths: Sequence[int], capacity: int) -> Packing:
    """Fill the fuller of any two bins with the best subset of both, until the room that is left is in few of them."""
    bins = [(sum(lengths[i] for i in content), content) for content in packing.bins]
    if len(bins) > MAX_SQUEEZED:
        return packing
    for _ in range(SWEEPS):
        moved = False
        for one in range(len(bins)):
            for two in range(len(bins)):
                (load, content), (rest, other) = bins[one], bins[two]
                if one == two or load < rest or load >= capacity or not other:
                    continue
                total, filled, left = _filled(content + other, lengths, capacity)
                if total > load:
                    bins[one], bins[two] = (total, filled), (load + rest - total, left)
                    moved = True
        if not moved:
            break
    bins = sorted((item for item in bins if item[1]), key=lambda item: -item[0])
    return Packing(packing.opened, [content for _, content in bins])


def _some(indices: list[int]) -> list[int]:
    """Select up to MAX_SUBSET of the indices, evenly spread."""
    if len(indices) <= MAX_SUBSET:
        return indices
    return [indices[k * len(indices) // MAX_SUBSET] for k in range(MAX_SUBSET)]
