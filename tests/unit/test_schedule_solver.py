"""Integer programs: their process killed, late, missing or mistaken; the greedy packing stays and the report says why."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from schedule_cases import Lengths

from packlora.schedule import milp
from packlora.schedule.planner import Planner
from packlora.schedule.process import MilpSolver, Worker, WorkerError
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
        if plan(lengths, None, "greedy").report.microbatches > 4:
            return lengths
    raise AssertionError("heuristics pack everything")


def plan(
    lengths: list[int], solver: Any, method: str = "auto", time_limit_s: float = 30.0, capacity: int = CAPACITY
) -> Window:
    planner = Planner([Lengths("a", [lengths])], capacity, method=method, solver=solver, time_limit_s=time_limit_s)
    return planner.window(0)


def fake_solver(code: str) -> list[str]:
    """A command whose process says that it is ready, then runs the code for every request `line`."""
    body = textwrap.indent(textwrap.dedent(code), "    ")
    head = "import json, os, sys, time\nprint('{\"ready\": true}', flush=True)\nfor line in sys.stdin:\n"
    return [sys.executable, "-c", head + body]


def test_auto_solves_what_heuristics_leave_above_the_bound(above: list[int]) -> None:
    greedy = plan(above, None, "greedy")
    assert (greedy.report.bound, greedy.report.microbatches) == (4, 5)
    assert [pack.stopped for pack in greedy.report.packs] == ["greedy"]
    solver = MilpSolver()
    window = plan(above, solver)
    solver.close()
    assert (window.report.microbatches, window.report.gap, window.report.stopped) == (4, 0.0, "solver")
    assert window.report.notes == ()


def test_what_is_at_its_bound_is_never_sent_to_the_solver() -> None:
    class Never:
        def solve(self, problem: dict[str, Any], time_limit_s: float) -> dict[str, Any]:
            raise AssertionError("asked")

    assert plan(HARD, Never(), capacity=100).report.microbatches == 3


def test_the_second_program_empties_the_last_microbatch() -> None:
    lengths = [60, 60, 50, 45, 35, 30]  # 280 in three bins of 100: the last one could hold 80
    solver = MilpSolver()
    window = plan(lengths, solver, "milp", capacity=100)
    solver.close()
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


def test_a_solver_killed_twice_while_it_works_leaves_the_greedy_packing(above: list[int]) -> None:
    solver = MilpSolver(fake_solver("os.kill(os.getpid(), 9)"))
    window = plan(above, solver)
    assert window.report.microbatches == 5
    assert [pack.stopped for pack in window.report.packs] == ["killed"]
    assert "killed by SIGKILL; the greedy packing stays" in window.report.notes[0]


def test_a_late_solver_is_killed_at_the_deadline(above: list[int]) -> None:
    solver = MilpSolver(fake_solver("time.sleep(60)"), grace_s=0.1)
    begun = time.monotonic()
    window = plan(above, solver, time_limit_s=0.2)
    assert time.monotonic() - begun < 20  # most of it starts the process
    assert window.report.microbatches == 5
    assert [pack.stopped for pack in window.report.packs] == ["late"]
    assert "no answer in 0.3 s; the process was killed" in window.report.notes[0]
    assert solver.worker.process is None


def test_a_solver_that_fails_three_times_is_not_asked_again(above: list[int]) -> None:
    solver = MilpSolver(fake_solver("sys.exit(7)"))
    notes = [plan(above, solver).report.notes for _ in range(5)]
    assert "ended with exit code 7" in notes[0][0]
    assert [bool(note) for note in notes] == [True] * 3 + [False] * 2
    assert solver.gave_up == "killed"


def test_without_scipy_the_greedy_packing_stays_and_the_report_says_so(above: list[int], tmp_path: Path) -> None:
    (tmp_path / "scipy").mkdir()
    (tmp_path / "scipy" / "__init__.py").write_text("raise ImportError('no scipy here')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['worker', 'milp']; " \
        "import packlora.schedule.worker as worker; worker.main()"  # fmt: skip
    solver = MilpSolver([sys.executable, "-c", code])
    window = plan(above, solver)
    assert [pack.stopped for pack in window.report.packs] == ["missing"]
    assert "scipy cannot be used (no scipy here)" in window.report.notes[0]
    assert window.report.microbatches == 5


def test_where_no_better_packing_exists_the_greedy_one_stays_and_is_known_to_be_optimal() -> None:
    lengths = [40] * 5  # two fit, so three bins; the volume asks for two
    solver = MilpSolver()
    window = plan(lengths, solver, capacity=100)
    solver.close()
    assert window.report.microbatches == 3
    assert all(pack.stopped in ("optimal", "at the bound") for pack in window.report.packs)


@pytest.mark.parametrize("bins", [[[0, 1, 2]], [[n] for n in range(11)], [list(range(12))], [[n] for n in range(13)]])
def test_an_answer_that_is_no_packing_is_not_used(above: list[int], bins: list[list[int]]) -> None:
    wrong = json.dumps({"answer": {"opened": [], "bins": bins, "stopped": "optimal"}})
    solver = MilpSolver(fake_solver(f"print({wrong!r}, flush=True)"))
    window = plan(above, solver)
    solver.close()
    assert window.report.microbatches == 5
    assert [pack.stopped for pack in window.report.packs] == ["wrong answer"]
    assert "the answer is no packing; the greedy packing stays" in window.report.notes[0]


def test_an_error_in_the_process_is_reported_and_the_process_goes_on() -> None:
    worker = Worker("milp")
    with pytest.raises(WorkerError, match="KeyError"):
        worker.ask({"kind": "milp"}, 60)
    assert worker.process is not None and worker.process.poll() is None
    worker.close()


def test_the_process_ends_when_the_one_that_started_it_is_killed(tmp_path: Path) -> None:
    code = """
        import sys, time
        from packlora.schedule.process import Worker
        worker = Worker("window")
        worker._start()
        print(worker.process.pid, flush=True)
        time.sleep(100)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < end, "the process outlived its parent"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_programs_stop_at_the_node_limit_and_at_the_time_limit() -> None:
    draw = random.Random(1)
    lengths = [draw.randint(250, 420) for _ in range(40)]
    tree = {
        "lengths": lengths, "owners": [number % 2 for number in range(40)], "capacity": 1000, "multiple": 8, "room": 0,
        "allowed": None, "bound": -(-sum(lengths) // 1000), "opened": [], "bins": [[i] for i in range(40)], "node_limit": 1,
        "emptiest": False,
    }  # fmt: skip
    assert milp.solve({**tree, "node_limit": 0}, 60.0)["stopped"] == "node limit"
    for multiple in (1, 8):
        answer = milp.solve({**tree, "multiple": multiple, "node_limit": 10**6}, 0.0)
        assert (answer["bins"], answer["stopped"]) == (None, "time limit")


def test_the_same_program_gives_the_same_packing(above: list[int]) -> None:
    solver = MilpSolver()
    first, second = plan(above, solver), plan(above, solver)
    solver.close()
    assert first.microbatches == second.microbatches
