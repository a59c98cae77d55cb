"""Lay out global batches one after another, each filling up the microbatch that the one before it left open.

The batches of a group of jobs are packed together. Groups take turns, so that a job's next batch comes when others have
passed; where every group would come too early, a no-op passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from packlora.schedule.bins import Packing
from packlora.schedule.types import PackReport


@dataclass(frozen=True, slots=True)
class Item:
    """A sample of a window: job and place number it among the window's jobs and in its global batch."""

    job: int
    batch: int
    place: int
    sample: int
    length: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit of packing: one global batch of each job of a group."""

    round: int
    group: int
    items: tuple[Item, ...]
    jobs: tuple[int, ...]


@dataclass(slots=True)
class SlotLayout:
    """Slots with their samples; an empty one is a no-op."""

    slots: list[list[Item]] = field(default_factory=list)
    packs: list[PackReport] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Room:
    """The open microbatch a unit may begin in: tokens left, and for each sample whether it may go there."""

    tokens: int = 0
    allowed: tuple[bool, ...] | None = None


Packer = Callable[[Unit, Room], tuple[Packing, int, str]]
"""Bins of a unit, a lower bound of the new ones, and why nothing better was sought."""


def lay_out(queues: Sequence[Sequence[Unit]], capacity: int, lag: int, merge: bool, packer: Packer) -> SlotLayout:
    """Slots for all units.

    Args:
        queues: per group its units in the order of rounds.
        capacity: tokens a microbatch is filled to.
        merge: whether a unit may use the room in the last slot of another.
        packer: packs one unit.
    """
    layout = SlotLayout()
    slots = layout.slots
    heads = [0] * len(queues)
    last: dict[int, int] = {}  # the last slot of each job
    while True:
        waiting = [(queue[head].round, group) for group, (queue, head) in enumerate(zip(queues, heads, strict=True))
                   if head < len(queue)]  # fmt: skip
        if not waiting:
            return layout
        ready = {
            group: max((last[job] + lag for job in queues[group][heads[group]].jobs if job in last), default=0)
            for _, group in waiting
        }
        now = [group for _, group in sorted(waiting) if ready[group] <= len(slots)]
        group = now[0] if now else min(ready, key=lambda g: (ready[g], g))
        unit = queues[group][heads[group]]
        heads[group] += 1
        slots.extend([] for _ in range(ready[group] - len(slots)))
        room = _room(slots, unit, capacity, lag, last) if merge else Room()
        packing, bound, stopped = packer(unit, room)
        if packing.opened:
            slots[-1].extend(unit.items[index] for index in packing.opened)
            for index in packing.opened:
                last[unit.items[index].job] = len(slots) - 1
        for content in packing.bins:
            slots.append([unit.items[index] for index in content])
            for index in content:
                last[unit.items[index].job] = len(slots) - 1
        layout.packs.append(PackReport(unit.round, group, bound, len(packing.bins), stopped))


def _room(slots: list[list[Item]], unit: Unit, capacity: int, lag: int, last: dict[int, int]) -> Room:
    if not slots or not slots[-1]:
        return Room()
    left = capacity - slot_tokens(slots[-1])
    if left <= 0:
        return Room()
    at = len(slots) - 1
    early = {job for job in unit.jobs if job in last and last[job] + lag > at}
    if len(early) == len(unit.jobs):
        return Room()
    return Room(left, tuple(item.job not in early for item in unit.items) if early else None)


def slot_tokens(slot: Sequence[Item]) -> int:
    return sum(item.length for item in slot)
