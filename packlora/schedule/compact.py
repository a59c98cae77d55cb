"""Move samples to earlier slots where that fills them up, until what is left over is at the window's end.

Underfilled microbatches of consecutive global batches melt together this way, never breaking a dependency: a sample moves
earlier only behind the slots that its job's batch before it needs, and later only as far as the batch after it allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from packlora.schedule.bins import best_subset
from packlora.schedule.stream import Item

REACH = 12
"""Slots to look ahead."""


class _Spans:
    """Slots that hold samples of each job's global batches."""

    def __init__(self, slots: Sequence[Sequence[Item]], lag: int) -> None:
        self.lag = lag
        self.slots: dict[tuple[int, int], Counter[int]] = {}
        for slot, items in enumerate(slots):
            for item in items:
                self.slots.setdefault((item.job, item.batch), Counter())[slot] += 1

    def may_enter(self, item: Item, slot: int) -> bool:
        """Whether the slot is late enough for the sample, given where the job's batch before it ends."""
        before = self.slots.get((item.job, item.batch - 1))
        return before is None or max(before) + self.lag <= slot

    def may_stay(self, item: Item, slot: int) -> bool:
        """Whether the slot is early enough for the sample, given where the job's batch after it begins."""
        after = self.slots.get((item.job, item.batch + 1))
        return after is None or slot + self.lag <= min(after)

    def move(self, item: Item, old: int, new: int) -> None:
        slots = self.slots[item.job, item.batch]
        slots[new] += 1
        slots[old] -= 1
        if not slots[old]:
            del slots[old]


def compact(slots: list[list[Item]], capacity: int, lag: int) -> None:
    """Fill up each slot in turn from the ones behind it, in place; slots may become empty.

    Args:
        slots: with their samples.
        capacity: tokens a slot is filled to.
        lag: see verify.py.
    """
    spans = _Spans(slots, lag)
    loads = [sum(item.length for item in items) for items in slots]
    for here in range(len(slots)):
        for there in range(here + 1, min(here + 1 + REACH, len(slots))):
            if loads[here] >= capacity:
                break
            coming = [item for item in slots[there] if spans.may_enter(item, here)]
            if not coming:
                continue
            going = [item for item in slots[here] if spans.may_stay(item, there)]
            staying = loads[here] - sum(item.length for item in going)
            union = going + coming
            chosen = set(best_subset([item.length for item in union], capacity - staying))
            total = staying + sum(union[k].length for k in chosen)
            if total <= loads[here]:
                continue
            _exchange(slots, spans, here, there, [item for k, item in enumerate(union) if k in chosen], going, coming)
            loads[there] -= total - loads[here]
            loads[here] = total


def _exchange(
    slots: list[list[Item]], spans: _Spans, here: int, there: int, chosen: list[Item], going: list[Item], coming: list[Item]
) -> None:  # fmt: skip
    """Exchange samples between two slots: of those that may be in either slot, the chosen ones go to `here` and the others to
    `there`."""
    keep = set(map(id, chosen))
    leaving = [item for item in going if id(item) not in keep]
    arriving = [item for item in coming if id(item) in keep]
    for item in leaving:
        spans.move(item, here, there)
    for item in arriving:
        spans.move(item, there, here)
    gone, come = set(map(id, leaving)), set(map(id, arriving))
    slots[here] = [item for item in slots[here] if id(item) not in gone] + arriving
    slots[there] = [item for item in slots[there] if id(item) not in come] + leaving
