"""Exchange samples between microbatches so that each holds few jobs: an adapter that is in a microbatch costs time, however few
its tokens there are.

The number of slots and the first round in each stay, no slot gets fuller than the limit, and no dependency is broken: a sample
moves as compact lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from packlora.schedule.bins import best_subset
from packlora.schedule.compact import REACH, Spans, exchange
from packlora.schedule.stream import Item, slot_tokens

SLOWER = 1.01
"""Time of a window over that of another one, up to which it is taken for having fewer jobs in a microbatch."""
Round = Callable[[Item], int]
FIRST = 4
"""Jobs of two slots that are tried as the first one of the earlier slot; keeps the work linear in the number of jobs."""


def taken_apart(
    slots: Sequence[Sequence[Item]], capacity: int, lag: int, first_rounds: Sequence[int]
) -> list[list[Item]]:
    """The slots with samples of one job together.

    Args:
        capacity: tokens that a slot may have; none has more.
        lag: see verify.py.
        first_rounds: the round in which each job takes its global batch 0.
    """

    def round_of(item: Item) -> int:
        return first_rounds[item.job] + item.batch

    out = [list(slot) for slot in slots]
    spans = Spans(out, lag)
    for here in range(len(out)):
        for there in range(here + 1, min(here + 1 + REACH, len(out))):
            held, other = _jobs(out[here]), _jobs(out[there])
            if len(held) == 1:
                break
            if not held & other:
                continue
            going = [item for item in out[here] if spans.may_stay(item, there)]
            coming = [item for item in out[there] if spans.may_enter(item, here)]
            chosen = _fewest(out[here], out[there], going, coming, capacity, round_of)
            if chosen is not None:
                exchange(out, spans, here, there, chosen, going, coming)
    return out


def _jobs(items: Sequence[Item]) -> set[int]:
    return {item.job for item in items}


def _fewest(
    here: Sequence[Item],
    there: Sequence[Item],
    going: Sequence[Item],
    coming: Sequence[Item],
    capacity: int,
    round_of: Round,
) -> list[Item] | None:
    """Select, of the samples that may be in either slot, those that are to be here, so that both slots together hold the fewest
    jobs; None: no choice holds fewer than now."""
    free = {id(item) for item in (*going, *coming)}
    kept, left = ([item for item in slot if id(item) not in free] for slot in (here, there))
    union = [*going, *coming]
    room, other = capacity - slot_tokens(kept), capacity - slot_tokens(left)
    rounds = min(map(round_of, here)), min(map(round_of, there))
    best, fewest = None, len(_jobs(here)) + len(_jobs(there))
    for chosen in _choices(union, room):
        keep = {id(item) for item in chosen}
        rest = [item for item in union if id(item) not in keep]
        ours, theirs = [*kept, *chosen], [*left, *rest]
        if slot_tokens(rest) > other or not ours or not theirs:
            continue
        count = len(_jobs(ours)) + len(_jobs(theirs))
        if count < fewest and (min(map(round_of, ours)), min(map(round_of, theirs))) == rounds:
            best, fewest = chosen, count
    return best


def _choices(union: Sequence[Item], room: int) -> Iterator[list[Item]]:
    """For each of the FIRST largest jobs: its samples and those of the others behind it, the largest job first, whole jobs as
    long as they have room, then the best subset of what is left."""
    by_job: dict[int, list[Item]] = {}
    for item in union:
        by_job.setdefault(item.job, []).append(item)
    sizes = {job: slot_tokens(items) for job, items in by_job.items()}
    order = sorted(by_job, key=lambda job: (-sizes[job], job))
    for first in order[:FIRST]:
        chosen: list[Item] = []
        left: list[Item] = []
        space = room
        for job in (first, *(job for job in order if job != first)):
            if left or sizes[job] > space:
                left += by_job[job]
            else:
                chosen += by_job[job]
                space -= sizes[job]
        yield chosen + [left[at] for at in best_subset([item.length for item in left], space)]
