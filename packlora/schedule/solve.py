"""Solution of one window from start to end: group, lay out, compare, and prove. A pure function of its task.

What the rules (rules.py) name is laid out by heuristics; the best one by the rules is taken. Only that one is laid out again
with integer programs, where the method asks for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from packlora.schedule import bounds
from packlora.schedule.bins import Packing, pack, repack
from packlora.schedule.compact import compact
from packlora.schedule.cost import CostModel
from packlora.schedule.rules import JobShape, rules_of
from packlora.schedule.stream import Item, Packer, Room, SlotLayout, Unit, lay_out, slot_tokens
from packlora.schedule.types import Carry, Microbatch, Placed, ScheduleError, Window, WindowReport
from packlora.schedule.verify import carry_after, check, with_noops

CLOSE = 100
"""Slots for one of which above the bound no other layout is tried."""


@dataclass(frozen=True, slots=True)
class JobRounds:
    """A job in a window: batches[i] is its global batch first_batch + i, taken in round first_round + i of the window."""

    name: str
    first_batch: int
    first_round: int
    batches: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Task:
    """Everything a window depends on."""

    first_round: int
    num_rounds: int
    jobs: tuple[JobRounds, ...]
    capacity: int
    lag: int = 1
    method: str = "auto"
    time_limit_s: float = 10.0
    node_limit: int = 2000
    cost: CostModel | None = None


def solve_window(task: Task) -> Window:
    """The window without any carry; `finish` puts the no-ops in that the slots before it make necessary."""
    begun = time.perf_counter()
    _check_task(task)
    lengths = [[[length for _, length in batch] for batch in job.batches] for job in task.jobs]
    bound = bounds.window_bound(lengths, task.capacity, task.lag, task.method == "solo")
    best: _Candidate | None = None
    stopped = "all candidates tried"
    for candidate in _candidates(task, lengths):
        if best is None or candidate.score < best.score:
            best = candidate
        over = len(best.microbatches) - bound
        if not best.waits and over * CLOSE <= bound:
            stopped = "at the bound" if over == 0 else f"{over} above the bound, which is close enough"
            break
    if best is None:
        report = WindowReport(task.method, 0, 0, 0, "no samples", time.perf_counter() - begun, capacity=task.capacity)
        return Window(task.first_round, task.num_rounds, (), report)
    notes: list[str] = []
    if task.method == "milp":
        best, stopped = _solve_again(task, best, notes, stopped)
    report = WindowReport(
        method=task.method, bound=bound, microbatches=len(best.microbatches) - best.noops, noops=best.noops, stopped=stopped,
        seconds=time.perf_counter() - begun, tokens=sum(mb.num_tokens for mb in best.microbatches),
        capacity=task.capacity, tokens_per_microbatch=best.fill,
        groups=tuple(tuple(task.jobs[job].name for job in group) for group in best.groups),
        packs=tuple(best.layout.packs), notes=tuple(dict.fromkeys(notes)),
    )  # fmt: skip
    return finish(Window(task.first_round, task.num_rounds, tuple(best.microbatches), report), task, None)


def finish(window: Window, task: Task, carry: Carry | None) -> Window:
    """Complete a window that follows the slots of `carry`: insert no-ops, and prove that the whole is valid.

    Raises:
        ScheduleError: it is not, which is a defect of this program; nothing may be trained with it.
    """
    microbatches = with_noops(window.microbatches, task.lag, carry)
    wanted = {job.name: {job.first_batch + n: batch for n, batch in enumerate(job.batches)} for job in task.jobs}
    check(microbatches, task.lag, wanted, task.capacity, carry)
    report = replace(window.report, noops=sum(mb.is_noop for mb in microbatches))
    return replace(
        window, microbatches=tuple(microbatches), report=report, carry=carry_after(microbatches, task.lag, carry)
    )


# --- candidates ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Candidate:
    groups: list[list[int]]
    fill: int
    layout: SlotLayout
    microbatches: list[Microbatch]
    noops: int
    waits: int
    """Number of no-ops, and number of those that a window like this one would begin with after it."""
    score: tuple[float, int]
    merge: bool

    @property
    def fullest(self) -> int:
        return max(slot_tokens(slot) for slot in self.layout.slots)


def _candidates(task: Task, lengths: list[list[list[int]]]) -> Iterator[_Candidate]:
    present = [number for number, job in enumerate(task.jobs) if job.batches]
    if not present:
        return
    rules, alone = rules_of(task.lag, task.cost), task.method == "solo"
    groups = [[job] for job in present]
    if not alone:
        shapes = [JobShape.of(lengths[job]) for job in present]
        groups = [[present[job] for job in group] for group in rules.groups(shapes, task.capacity)]
    lay_out = partial(_lay_out_greedily, task, groups, _queues(task, groups))
    yield from rules.candidates(task.capacity, 0 if alone else len(groups), lay_out)


def _queues(task: Task, groups: Sequence[Sequence[int]]) -> list[list[Unit]]:
    """Units of each group in the order of rounds."""
    queues = []
    for number, group in enumerate(groups):
        queue = []
        for round_ in range(task.first_round, task.first_round + task.num_rounds):
            items = []
            jobs = []
            for job in group:
                rounds = task.jobs[job]
                at = round_ - rounds.first_round
                if 0 <= at < len(rounds.batches):
                    jobs.append(job)
                    items += [
                        Item(job, rounds.first_batch + at, place, sample, length)
                        for place, (sample, length) in enumerate(rounds.batches[at])
                    ]
            if items:
                queue.append(Unit(round_, number, tuple(items), tuple(jobs)))
        queues.append(queue)
    return queues


def _lay_out(
    task: Task, groups: list[list[int]], queues: list[list[Unit]], fill: int, packer: Packer, merge: bool = True
) -> _Candidate:
    """The better of the layout and the layout compacted. merge: whether groups may share a microbatch."""
    shared = merge and task.method != "solo"
    layout = lay_out(queues, fill, task.lag, shared, packer)
    best = _scored(task, groups, fill, layout, merge)
    if shared and len(layout.slots) > 1:
        slots = [list(slot) for slot in layout.slots]
        compact(slots, fill, task.lag)
        best = min(
            best, _scored(task, groups, fill, SlotLayout(slots, layout.packs), merge), key=lambda each: each.score
        )
    return best


def _lay_out_greedily(
    task: Task, groups: list[list[int]], queues: list[list[Unit]], fill: int, merge: bool
) -> _Candidate:
    return _lay_out(task, groups, queues, fill, partial(_greedy, fill), merge)


def _scored(task: Task, groups: list[list[int]], fill: int, layout: SlotLayout, merge: bool) -> _Candidate:
    """Score: length by the rules, then microbatches. The no-ops that a window like this would need behind this one count as
    well."""
    microbatches = with_noops(to_microbatches(task, layout), task.lag)
    noops = sum(microbatch.is_noop for microbatch in microbatches)
    count = len(microbatches)
    again = len(with_noops(microbatches, task.lag, carry_after(microbatches, task.lag)))
    score = rules_of(task.lag, task.cost).length(microbatches, again), count - noops
    return _Candidate(groups, fill, layout, microbatches, noops, again - count + noops, score, merge)


def to_microbatches(task: Task, layout: SlotLayout) -> list[Microbatch]:
    """Samples by job, then as in the global batch; each batch completes in its last slot."""
    last = {(item.job, item.batch): slot for slot, items in enumerate(layout.slots) for item in items}
    names = [job.name for job in task.jobs]
    out = []
    for slot, items in enumerate(layout.slots):
        items = sorted(items, key=lambda item: (item.job, item.place))
        out.append(
            Microbatch(
                tuple(Placed(names[item.job], item.batch, item.sample, item.length) for item in items),
                tuple(
                    (names[job], batch)
                    for job, batch in dict.fromkeys((item.job, item.batch) for item in items)
                    if last[job, batch] == slot
                ),
            )
        )
    return out


# --- packing a unit --------------------------------------------------------------------------------------------------------


def _greedy(fill: int, unit: Unit, room: Room) -> tuple[Packing, int, str]:
    """Bins by heuristics, the lower bound, and `at the bound` or `greedy`."""
    lengths = [item.length for item in unit.items]
    packing = pack(lengths, fill, room.tokens, room.allowed)
    bound = _bound(fill, unit, room, len(packing.bins))
    if len(packing.bins) > bound:
        packing = repack(packing, bound, lengths, fill, room.tokens, room.allowed)
    return packing, bound, "at the bound" if len(packing.bins) <= bound else "greedy"


def _bound(fill: int, unit: Unit, room: Room, found: int) -> int:
    """Fewest new bins; the cheap bound where it is reached already."""
    lengths = [item.length for item in unit.items]
    may = lengths if room.allowed is None else [n for n, ok in zip(lengths, room.allowed, strict=True) if ok]
    most = min(room.tokens, sum(may))
    total = sum(min(n, fill) for n in lengths)
    least = bounds.volume_bound(max(total - most, 0), fill)
    if found <= least:
        return least
    return max(least, bounds.opened_bound(lengths, fill, room.tokens, bounds.reachable(may, most)))


def _solve_again(task: Task, best: _Candidate, notes: list[str], stopped: str) -> tuple[_Candidate, str]:
    """The chosen candidate once more with integer programs; kept where it is no worse."""
    from packlora.schedule import milp

    def packer(unit: Unit, room: Room) -> tuple[Packing, int, str]:
        packing, bound, why = _greedy(best.fill, unit, room)
        if not packing.bins:
            return packing, bound, why
        lengths = [item.length for item in unit.items]
        problem = milp.Problem(lengths, best.fill, room.tokens, room.allowed, bound)
        found = milp.solve(problem, packing, task.node_limit, task.time_limit_s)
        if found[2] == "time limit":
            notes.append(
                f"round {unit.round}: integer program: stopped by the time limit of {task.time_limit_s:g} s; the greedy "
                "packing stays"
            )
        return found

    again = _lay_out(task, best.groups, _queues(task, best.groups), best.fill, packer, best.merge)
    if again.score <= best.score:
        return again, "solver" if again.score < best.score else stopped
    return best, stopped


def _check_task(task: Task) -> None:
    for job in task.jobs:
        for number, batch in enumerate(job.batches, job.first_batch):
            if not batch:
                raise ScheduleError(f"job {job.name!r}: global batch {number} has no samples; each takes one or more")
            for sample, length in batch:
                if length > task.capacity:
                    raise ScheduleError(
                        f"job {job.name!r}: sample {sample} has {length} tokens, but a microbatch takes at most "
                        f"{task.capacity}; raise max_tokens_per_microbatch, or shorten the sample"
                    )
                if length < 1:
                    raise ScheduleError(f"job {job.name!r}: sample {sample} has {length} tokens; it takes one or more")
