"""Integer programs: what they gain; where they are late or mistaken the greedy packing stays, and the report says why."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from typing import Any, NoReturn
from unittest import mock

import pytest
import scipy.optimize
from schedule_cases import Lengths

from packlora.schedule import milp
from packlora.schedule.bins import Packing
from packlora.schedule.planner import Planner
from packlora.schedule.types import Window

HARD = [27, 27, 26, 23, 21, 19, 18, 16, 14, 14, 13, 12, 11, 9]
"""Exactly two and a half times 100: three bins, whatever is done."""


CAPACITY = 1000


@pytest.fixture(scope="module")
def above() -> list[int]:
    """Twelve samples that fill four microbatches to the last token, which the heuristics do not see; found by search."""
    for seed in range(20000):
        draw = random.Random(seed)
        lengths: list[int] = []
        while len(lengths) < 12:
            cuts = [0, *sorted(draw.sample(range(150, 851), 2)), CAPACITY]
            parts = [end - begin for begin, end in itertools.pairwise(cuts)]
            if min(parts) >= 120:
                lengths += parts
        draw.shuffle(lengths)
        if plan(lengths, "greedy").report.microbatches > 4:
            return lengths
    raise AssertionError("heuristics pack everything")


def plan(lengths: list[int], method: str = "milp", capacity: int = CAPACITY, **settings: Any) -> Window:
    return Planner([Lengths("a", [lengths])], capacity, method=method, **settings).window(0)


def test_programs_solve_what_heuristics_leave_above_the_bound(above: list[int]) -> None:
    greedy = plan(above, "greedy")
    assert (greedy.report.bound, greedy.report.microbatches) == (4, 5)
    assert [pack.stopped for pack in greedy.report.packs] == ["greedy"]
    window = plan(above)
    assert (window.report.microbatches, window.report.gap, window.report.stopped) == (4, 0.0, "solver")
    assert window.report.notes == ()


def test_nothing_is_sent_to_the_solver_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> NoReturn:
        raise AssertionError("asked")

    monkeypatch.setattr(milp, "solve", never)
    assert plan(HARD, "auto", capacity=100).report.microbatches == 3
    large = plan([40] * 25, "auto", capacity=100)  # 13 microbatches; by volume 10 would do
    assert [(pack.stopped, pack.at_bound) for pack in large.report.packs] == [("greedy", False)]
    with pytest.raises(AssertionError, match="asked"):
        plan([40] * 25, capacity=100)


def test_the_second_program_empties_the_last_microbatch() -> None:
    lengths = [60, 60, 50, 45, 35, 30]  # 280 in three bins of 100: the last one could hold 80
    window = plan(lengths, "milp", capacity=100)
    loads = sorted(mb.num_tokens for mb in window.microbatches)
    assert len(loads) == 3 and loads[0] == min_last(lengths, 100, 3)


def min_last(lengths: list[int], capacity: int, bins: int) -> int:
    """The smallest load of the emptiest bin, by trying every assignment."""
    best = capacity
    for where in itertools.product(range(bins), repeat=len(lengths)):
        loads = [sum(n for n, b in zip(lengths, where, strict=True) if b == bin_) for bin_ in range(bins)]
        if max(loads) <= capacity and min(loads) > 0:
            best = min(best, min(loads))
    return best


def test_where_no_better_packing_exists_the_greedy_one_stays_and_is_known_to_be_optimal() -> None:
    lengths = [40] * 5  # two fit, so three bins; the volume asks for two
    window = plan(lengths, capacity=100)
    assert window.report.microbatches == 3
    assert all(pack.stopped in ("optimal", "at the bound") for pack in window.report.packs)


def test_programs_stop_at_the_node_limit_and_at_the_time_limit() -> None:
    draw = random.Random(2)
    lengths = [draw.randint(150, 420) for _ in range(24)]
    problem, packing = (
        milp.Problem(lengths, 1000, 0, None, -(-sum(lengths) // 1000)),
        Packing([], [[i] for i in range(24)]),
    )
    assert milp.solve(problem, packing, 1, 60.0)[2] == "node limit"
    assert milp.solve(problem, packing, 10**6, 0.0) == (packing, problem.bound, "time limit")


def test_a_program_that_the_time_limit_stops_leaves_the_greedy_packing_and_a_note(above: list[int]) -> None:
    window = plan(above, time_limit_s=1e-9)
    assert window.report.microbatches == 5
    assert [pack.stopped for pack in window.report.packs] == ["time limit"]
    assert "stopped by the time limit of 1e-09 s; the greedy packing stays" in window.report.notes[0]


def test_what_highs_prints_is_not_in_the_output_of_a_run_and_what_others_print_is(
    above: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints some lines whatever its options say, through C's buffer."""
    solved = scipy.optimize.milp

    def prints(*given: Any, **options: Any) -> Any:
        ctypes.CDLL(None).puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        os.write(1, b"of a reward\n")
        return solved(*given, **options)

    monkeypatch.setattr(scipy.optimize, "milp", prints)
    assert plan(above).report.microbatches == 4
    ctypes.CDLL(None).fflush(None)
    assert set(capfd.readouterr().out.splitlines()) == {"of a reward"}


def test_programs_are_solved_where_standard_output_is_closed(above: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "dup", mock.Mock(side_effect=OSError))
    assert plan(above).report.microbatches == 4


def test_the_same_program_gives_the_same_packing(above: list[int]) -> None:
    first, second = plan(above), plan(above)
    assert first.microbatches == second.microbatches
