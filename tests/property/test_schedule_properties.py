"""The scheduler for any jobs and any settings: nothing lost, nothing too large, no weights read that are not there yet.

Each case is drawn from one number, which a failure names.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_cases import (
    Lengths,
    broken_rule,
    fewest_bins,
    some_cost,
    some_jobs,
    some_lengths,
    wrong_contents,
)
from seeds import SOAK

from benchmarks.planning import check_causality
from packlora.pipeline.timeline import makespan, simulate
from packlora.runtime.windows import WINDOW
from packlora.schedule import bounds, milp
from packlora.schedule.bins import Packing, best_subset, pack
from packlora.schedule.planner import Planner
from packlora.schedule.types import NOOP, Carry, Microbatch, Placed, ScheduleError, Window
from packlora.schedule.verify import carry_after, check, with_noops


def cases(count: int) -> Any:
    """So many random cases, each from a seed; a quarter of them, always the same, but under `make soak`."""

    def decorate(test: Any) -> Any:
        profile = settings(
            max_examples=count if SOAK else count // 4, derandomize=not SOAK, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), print_blob=False,
        )  # fmt: skip
        return profile(given(st.integers(0, 2**63 - 1))(test))

    return decorate


def some_planner(draw: random.Random, method: str | None = None) -> Planner:
    """A planner of random jobs and settings; without integer programs unless the method asks for them."""
    capacity = draw.choice([6, 12, 20, 40, 100])
    stages = draw.choice([1, 1, 2, 3, 4, 6])
    jobs = some_jobs(draw, capacity, 4, 4, 6)
    cost = some_cost(draw, stages) if draw.random() < 0.5 else None
    method = method or draw.choice(["greedy", "greedy", "solo"])
    return Planner(
        jobs,
        capacity,
        lag=stages,
        method=method,
        cost=cost,
        window_rounds=draw.randint(1, 5),
    )


def jobs_of(planner: Planner) -> list[Lengths]:
    return [member.job for member in planner._members.values()]  # type: ignore[misc]


def slots(windows: list[Window]) -> list[Microbatch]:
    return [microbatch for window in windows for microbatch in window.microbatches]


# --- whole plans -----------------------------------------------------------------------------------------------------------


@cases(3000)
def test_every_sample_once_nothing_over_capacity_and_no_stale_weights(seed: int) -> None:
    planner = some_planner(random.Random(seed))
    plan = slots(list(planner.windows()))
    assert wrong_contents(plan, jobs_of(planner), planner.capacity) is None
    assert broken_rule(plan, planner.lag) is None


@cases(700)
def test_on_no_stage_a_forward_begins_before_the_step_that_it_needs(seed: int) -> None:
    draw = random.Random(seed)
    planner = some_planner(draw)
    plan = slots(list(planner.windows()))
    cost = some_cost(draw, planner.lag)
    timeline = simulate(plan, cost)
    start = {(span.stage, span.microbatch): span.start for span in timeline.spans if span.kind == "forward"}
    end = {(span.stage, span.microbatch): span.end for span in timeline.spans if span.kind == "backward"}
    holds = [{(placed.job, placed.batch) for placed in microbatch.samples} for microbatch in plan]
    pairs = [
        (earlier, later, stage)
        for later, earlier in itertools.product(range(len(plan)), repeat=2)
        if any((job, batch - 1) in holds[earlier] for job, batch in holds[later])
        for stage in range(planner.lag)
    ]
    assert all(start[stage, later] >= end[stage, earlier] - 1e-6 for earlier, later, stage in pairs)
    check_causality(timeline, plan, planner.lag)
    if pairs:  # the check refuses one that begins before
        earlier, later, stage = draw.choice(pairs)
        spans = [
            replace(span, start=end[stage, earlier] - 0.01)
            if (span.stage, span.kind, span.microbatch) == (stage, "forward", later)
            else span
            for span in timeline.spans
        ]
        with pytest.raises(ScheduleError, match=f"on stage {stage} the forward of batch"):
            check_causality(replace(timeline, spans=tuple(spans)), plan, planner.lag)


@cases(500)
def test_jobs_that_join_and_leave_take_exactly_their_rounds(seed: int) -> None:
    draw = random.Random(seed)
    planner = some_planner(draw)
    wanted = {job.name: job.batches for job in jobs_of(planner)}
    changed, given = False, 0
    plan = []
    for window in planner.windows():
        plan.append(window)
        given = window.first_round + window.num_rounds
        if not changed and draw.random() < 0.5:
            changed = True
            late = some_jobs(draw, planner.capacity, 2, prefix="late")
            for job in late:
                planner.add(job, given + draw.randint(0, 3))
                wanted[job.name] = job.batches
            name = draw.choice(list(wanted))
            at = given + draw.randint(0, 3)
            joined = planner._members[name].joined
            planner.remove(name, at)
            wanted[name] = wanted[name][: max(at - joined, 0)]
    assert broken_rule(slots(plan), planner.lag) is None
    left = [Lengths(name, batches) for name, batches in wanted.items()]
    assert wrong_contents(slots(plan), left, planner.capacity) is None
    with pytest.raises(ScheduleError, match="handed out already"):
        planner.add(Lengths("too-late", [[1]]), given - 1)


@cases(500)
def test_a_plan_begun_at_any_round_has_the_same_microbatches_from_its_window_on(seed: int) -> None:
    draw = random.Random(seed)
    planner = some_planner(draw)
    whole = list(planner.windows())
    if not whole:
        return
    start = draw.randrange(planner.num_rounds)
    resumed = list(planner.windows(start))
    skipped = start // planner.window_rounds
    assert [window.first_round for window in resumed] == [window.first_round for window in whole[skipped:]]
    for one, other in zip(whole[skipped:], resumed, strict=True):
        assert [mb for mb in one.microbatches if not mb.is_noop] == [mb for mb in other.microbatches if not mb.is_noop]
    assert broken_rule(slots(resumed), planner.lag) is None


@cases(300)
def test_a_window_survives_the_trip_to_another_process(seed: int) -> None:
    window = some_planner(random.Random(seed)).window(0)
    assert WINDOW.validate_python(json.loads(json.dumps(WINDOW.dump_python(window, mode="json")))) == window


@cases(700)
def test_no_window_is_below_its_lower_bound_and_the_report_counts_right(seed: int) -> None:
    planner = some_planner(random.Random(seed))
    for window in planner.windows():
        report = window.report
        real = [mb for mb in window.microbatches if not mb.is_noop]
        assert (report.microbatches, report.noops) == (len(real), len(window.microbatches) - len(real))
        if window.first_round == 0:  # without no-ops for the window before
            assert len(window.microbatches) >= report.bound
        assert len(real) >= bounds.volume_bound(sum(mb.num_tokens for mb in real), planner.capacity)
        assert all(pack.microbatches >= pack.bound for pack in report.packs)
        if planner.method == "solo":
            assert all(len({item.job for item in mb.samples}) == 1 for mb in real)


@cases(500)
def test_within_a_microbatch_jobs_are_contiguous_and_samples_keep_the_order_of_the_global_batch(seed: int) -> None:
    planner = some_planner(random.Random(seed))
    rank = {job.name: number for number, job in enumerate(jobs_of(planner))}
    for microbatch in slots(list(planner.windows())):
        places = [(rank[item.job], item.sample) for item in microbatch.samples]
        assert places == sorted(places)


# --- packing -----------------------------------------------------------------------------------------------------------------


@cases(1500)
def test_packings_hold_every_sample_once_respect_room_and_who_may_use_it(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(4, 60)
    lengths = some_lengths(draw, draw.randint(1, 14), capacity + draw.choice([0, 3]))
    room = draw.randint(0, capacity)
    allowed = [draw.random() < 0.7 for _ in lengths] if draw.random() < 0.5 else None
    for packing in (pack(lengths, capacity, room, allowed),):
        assert sorted([*packing.opened, *itertools.chain.from_iterable(packing.bins)]) == list(range(len(lengths)))
        assert sum(lengths[i] for i in packing.opened) <= room
        assert allowed is None or all(allowed[i] for i in packing.opened)
        for content in packing.bins:
            assert sum(lengths[i] for i in content) <= capacity or len(content) == 1
        may = [n for i, n in enumerate(lengths) if allowed is None or allowed[i]]
        fill = bounds.reachable(may, room)
        assert len(packing.bins) >= bounds.opened_bound(lengths, capacity, room, fill)


@cases(600)
def test_bounds_are_below_the_optimum_and_the_heuristics_above_it(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(3, 40)
    lengths = some_lengths(draw, draw.randint(1, 8), capacity)
    optimum = fewest_bins(lengths, capacity)
    assert bounds.big_items_bound(lengths, capacity) <= optimum <= len(pack(lengths, capacity).bins)


@cases(300)
def test_integer_programs_find_the_optimum_of_one_global_batch(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(5, 60)
    lengths = [draw.randint(max(capacity // 5, 1), max(capacity * 3 // 5, 1)) for _ in range(draw.randint(2, 10))]
    optimum = fewest_bins(lengths, capacity)
    window = Planner([Lengths("a", [lengths])], capacity, method="milp").window(0)
    assert window.report.microbatches == optimum
    assert window.report.bound <= optimum


@cases(150)
def test_integer_programs_pack_as_validly_as_heuristics_do(seed: int) -> None:
    draw = random.Random(seed)
    planner = some_planner(draw, "milp")
    plan = slots(list(planner.windows()))
    assert wrong_contents(plan, jobs_of(planner), planner.capacity) is None
    assert broken_rule(plan, planner.lag) is None


@cases(600)
def test_the_best_subset_is_the_best_one(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 30) for _ in range(draw.randint(0, 8))]
    capacity = draw.randint(0, 80)
    chosen = best_subset(lengths, capacity)
    assert chosen == sorted(set(chosen))
    sums = [sum(some) for size in range(len(lengths) + 1) for some in itertools.combinations(lengths, size)]
    assert sum(lengths[i] for i in chosen) == max(total for total in sums if total <= capacity)
    assert bounds.reachable(lengths, capacity) == max(total for total in sums if total <= capacity)


# --- proof and no-ops --------------------------------------------------------------------------------------------------------


def any_order(draw: random.Random) -> list[Microbatch]:
    """Microbatches whose jobs' batches are in order but not apart."""
    left = {f"j{n}": [0] * draw.randint(1, 3) + [1] * draw.randint(1, 3) + [2] for n in range(draw.randint(1, 3))}
    out = []
    sample = 0
    while any(left.values()):
        items, ends = [], []
        for name in draw.sample(sorted(left), draw.randint(1, len(left))):
            if left[name]:
                batch = left[name].pop(0)
                items.append(Placed(name, batch, sample, 1))
                sample += 1
                if not left[name] or left[name][0] != batch:
                    ends.append((name, batch))
        if items:
            out.append(Microbatch(tuple(items), tuple(ends)))
    return out


@cases(1000)
def test_no_ops_repair_any_order_and_none_of_them_can_be_spared(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 5)
    order = any_order(draw)
    repaired = with_noops(order, stages)
    assert [mb for mb in repaired if not mb.is_noop] == order
    assert broken_rule(repaired, stages) is None
    for slot, microbatch in enumerate(repaired):
        if microbatch.is_noop:
            assert broken_rule(repaired[:slot] + repaired[slot + 1 :], stages) is not None


@cases(1000)
def test_the_proof_refuses_exactly_what_breaks_a_rule(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 4)
    plan = with_noops(any_order(draw), stages)
    jobs = sorted({item.job for mb in plan for item in mb.samples})
    batches: dict[str, dict[int, list[tuple[int, int]]]] = {name: {} for name in jobs}
    for mb in plan:
        for item in mb.samples:
            batches[item.job].setdefault(item.batch, []).append((item.sample, item.length))
    capacity = max(mb.num_tokens for mb in plan)
    check(plan, stages, batches, capacity)
    with pytest.raises(ScheduleError, match=f"{capacity} tokens in a microbatch of at most {capacity - 1}"):
        check(plan, stages, batches, capacity - 1)
    kind = draw.randrange(5)
    at = draw.randrange(len(plan))
    if kind == 0:  # swap
        other = draw.randrange(len(plan))
        plan[at], plan[other] = plan[other], plan[at]
    elif kind == 1:
        del plan[at]
    elif kind == 2:
        plan.insert(at, NOOP)
    elif kind == 3 and plan[at].samples:
        plan[at] = replace(plan[at], samples=plan[at].samples[1:])
    elif kind == 4:
        plan[at] = replace(plan[at], samples=(*plan[at].samples, Placed(jobs[0], 0, 999, 1)))
    numbered = [Lengths(name, []) for name in jobs]
    for job in numbered:
        job.batch = lambda n, name=job.name: batches[name][n]  # type: ignore[method-assign, misc]
        job.batches = [[1] * len(batches[job.name][n]) for n in sorted(batches[job.name])]
    valid = broken_rule(plan, stages) is None and wrong_contents(plan, numbered, capacity) is None
    if valid:
        check(plan, stages, batches, capacity)
    else:
        with pytest.raises(ScheduleError):
            check(plan, stages, batches, capacity)


@cases(500)
def test_the_carry_tells_the_next_part_all_it_needs(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 5)
    order = any_order(draw)
    cut = draw.randint(0, len(order))
    first = with_noops(order[:cut], stages)
    carry = carry_after(first, stages)
    # the jobs' batches go on where they were cut: only whole batches are cut here
    open_batches = {key for mb in order[:cut] for key in {(i.job, i.batch) for i in mb.samples}} & {
        key for mb in order[cut:] for key in {(i.job, i.batch) for i in mb.samples}
    }
    if open_batches:
        return
    second = with_noops(order[cut:], stages, carry)
    assert broken_rule(first + second, stages) is None
    assert len(first) + len(second) == len(with_noops(order, stages))
    assert with_noops(order[cut:], stages, Carry()) == with_noops(order[cut:], stages)


# --- timeline ----------------------------------------------------------------------------------------------------------------


@cases(500)
def test_the_timeline_is_that_of_an_event_by_event_simulation(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 5)
    plan = with_noops(any_order(draw), stages)
    cost = some_cost(draw, stages)
    timeline = simulate(plan, cost)
    order = {}
    for stage in range(stages):  # the order of 1F1B, written down as a list of work
        ahead = min(stages - stage, len(plan))
        work = [("forward", n) for n in range(ahead)]
        for n in range(len(plan)):
            work.append(("backward", n))
            if ahead + n < len(plan):
                work.append(("forward", ahead + n))
        order[stage] = work
    ends: dict[tuple[int, str, int], float] = {}
    free = [0.0] * stages
    while any(order.values()):
        moved = False
        for stage in range(stages):
            while order[stage]:
                kind, n = order[stage][0]
                if kind == "forward":
                    need = (stage - 1, "forward", n) if stage else None
                else:
                    need = (stage + 1, "backward", n) if stage + 1 < stages else (stage, "forward", n)
                if need is not None and need not in ends:
                    break
                begin = max(free[stage], ends[need] if need is not None else 0.0)
                free[stage] = begin + cost.both(plan[n], stage)[kind == "backward"]
                ends[stage, kind, n] = free[stage]
                order[stage].pop(0)
                moved = True
        assert moved
    for span in timeline.spans:
        assert span.end == pytest.approx(ends[span.stage, span.kind, span.microbatch])
    assert timeline.makespan == pytest.approx(max(free)) == makespan(plan, cost)
    busy = sum(sum(cost.both(mb, s)) for mb in plan for s in range(stages))
    assert sum(timeline.busy) == pytest.approx(busy)
    assert timeline.bubble == pytest.approx(1 - busy / (stages * max(free)), abs=1e-9)


@cases(300)
def test_programs_prove_and_reach_the_optimum_beside_an_open_microbatch(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(8, 40)
    lengths = [draw.randint(max(capacity // 5, 1), capacity * 3 // 5) for _ in range(draw.randint(1, 7))]
    room = draw.randint(0, capacity)
    allowed = [draw.random() < 0.6 for _ in lengths]
    may = [index for index, ok in enumerate(allowed) if ok]
    optimum = min(
        fewest_bins([n for i, n in enumerate(lengths) if i not in some], capacity)
        for size in range(len(may) + 1)
        for some in itertools.combinations(may, size)
        if sum(lengths[i] for i in some) <= room
    )
    alone = Packing([], [[index] for index in range(len(lengths))])
    found, bound, stopped = milp.solve(milp.Problem(lengths, capacity, room, allowed, 0), alone, 1000, 60.0)
    assert (stopped, bound, len(found.bins)) == ("optimal", optimum, optimum)
    assert sorted([*found.opened, *itertools.chain.from_iterable(found.bins)]) == list(range(len(lengths)))
    assert sum(lengths[i] for i in found.opened) <= room and all(allowed[i] for i in found.opened)
    assert max((sum(lengths[i] for i in content) for content in found.bins), default=0) <= capacity
