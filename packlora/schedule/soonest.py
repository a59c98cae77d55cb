"""The order of a window's slots in which global batches are complete soonest. On one device every order takes as long."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from packlora.schedule.stream import Item

Batch = tuple[int, int]
"""A job and its global batch."""


def soonest(slots: Sequence[list[Item]], round_of: Callable[[Batch], int]) -> list[list[Item]]:
    """The slots in another order, round after round; in a round the global batch that needs the fewest tokens more comes next.

    A job's samples stay behind those of its batches before. Batches of as many tokens stay as they were.

    Args:
        slots: in an order that keeps this rule.
        round_of: in which a global batch is taken.
    """
    waiting = {number: slot for number, slot in enumerate(slots) if slot}
    missing: dict[Batch, dict[int, None]] = {}  # slots that a batch still waits for
    for number, slot in waiting.items():
        for item in slot:
            missing.setdefault((item.job, item.batch), {})[number] = None
    before = {number: {(item.job, item.batch - 1) for item in slot} for number, slot in waiting.items()}
    tokens = {number: sum(item.length for item in slot) for number, slot in waiting.items()}
    out: list[list[Item]] = []

    def take(number: int) -> None:
        slot = waiting.pop(number)
        for batch in {(item.job, item.batch) for item in slot}:
            del missing[batch][number]
            if not missing[batch]:
                del missing[batch]
        out.append(slot)

    for _, batches in itertools.groupby(sorted(missing, key=round_of), round_of):
        due = list(batches)
        while due := [batch for batch in due if batch in missing]:
            able = [batch for batch in due if all(before[number].isdisjoint(missing) for number in missing[batch])]
            if not able:  # a slot holds samples of a later round
                take(next(iter(waiting)))
                continue
            for number in list(missing[min(able, key=lambda batch: sum(tokens[number] for number in missing[batch]))]):
                take(number)
    return out
