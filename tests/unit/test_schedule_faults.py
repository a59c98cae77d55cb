"""Processes of the scheduler that are stopped, hang or are killed: noticed within seconds, replaced, and no number changes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque

import pytest
from schedule_cases import Lengths

from packlora.schedule import process as module
from packlora.schedule.background import BackgroundPlanner
from packlora.schedule.planner import Planner
from packlora.schedule.process import MilpSolver, Worker, WorkerError

HANGS = "print('{\"ready\": true}', flush=True); import time; time.sleep(100)"
"""A process that says that it is ready and then nothing more."""


def some_jobs() -> list[Lengths]:
    draw = random.Random(0)
    return [Lengths(f"j{n}", [[draw.randint(1, 150) for _ in range(8)] for _ in range(8)]) for n in range(4)]


def planner() -> Planner:
    return Planner(some_jobs(), 300, window_rounds=2, method="greedy")


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.SILENCE_S <= 5
    monkeypatch.setattr(module, "SILENCE_S", 1)


NOTICED = "no sign of life for 1 s, .*the window is planned in the training process"


def test_a_stopped_planning_process_is_noticed_within_seconds_and_replaced(short_silence: None) -> None:
    wanted = [window.microbatches for window in planner().windows()]
    with BackgroundPlanner(planner()) as background:
        worker = background._workers[0]
        worker._start()
        stopped = worker.process
        assert stopped is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        with pytest.warns(RuntimeWarning, match=NOTICED):
            windows = list(background.windows())
        assert worker.process is not None and worker.process is not stopped
    assert [window.microbatches for window in windows] == wanted


def test_a_planning_process_that_hangs_is_noticed_within_seconds(short_silence: None) -> None:
    with BackgroundPlanner(planner(), command=[sys.executable, "-c", HANGS]) as background:
        begun = time.monotonic()
        with pytest.warns(RuntimeWarning, match=NOTICED):
            window = next(background.windows())
        assert time.monotonic() - begun < 5
    assert window.microbatches == next(planner().windows()).microbatches


def test_a_request_larger_than_a_pipe_does_not_wait_for_a_stopped_process(short_silence: None) -> None:
    worker = Worker("window")
    worker._start()
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="no sign of life") as error:
        worker.ask({"kind": "window", "task": "x" * 1_000_000}, None)
    assert error.value.kind == "silent"
    assert worker.process is None


def test_a_process_at_work_for_longer_than_the_silence_gives_signs_of_life(short_silence: None) -> None:
    code = """
        import time
        from packlora.schedule import work, worker
        def answer(request):
            time.sleep(request["seconds"])
            return "done"
        work.window = answer
        worker.main()
    """
    worker = Worker("window", [sys.executable, "-c", textwrap.dedent(code)])
    assert worker.ask({"seconds": 3}, None) == "done"
    worker.close()


def problem_and_answer() -> tuple[Lengths, int]:
    """Samples that the integer program packs better than the heuristics; found by search."""
    for seed in range(1000):
        draw = random.Random(seed)
        lengths: list[int] = []
        while len(lengths) < 12:
            one, two = sorted(draw.sample(range(150, 851), 2))
            if min(one, two - one, 1000 - two) >= 120:
                lengths += [one, two - one, 1000 - two]
        draw.shuffle(lengths)
        job = Lengths("a", [lengths])
        if Planner([job], 1000, method="greedy").window(0).report.microbatches > 4:
            return job, 4
    raise AssertionError("heuristics pack everything")


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)])
def test_a_solver_that_is_killed_or_stopped_once_is_replaced_and_the_packing_is_the_same(
    how: signal.Signals, short_silence: None
) -> None:
    job, fewest = problem_and_answer()
    solver = MilpSolver()
    solver.worker._start()
    first = solver.worker.process
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)  # so that it does not answer before it is killed
    timer = threading.Timer(0.3, first.kill)
    if how == signal.SIGKILL:
        timer.start()
    window = Planner([job], 1000, method="auto", solver=solver).window(0)
    timer.cancel()
    assert solver.worker.process is not first
    solver.close()
    assert window.report.microbatches == fewest
    assert window.report.notes == ()


def test_the_time_in_which_this_process_was_stopped_itself_is_nobody_s_silence() -> None:
    """Ctrl-Z and fg, a laptop that sleeps: the answer is there when this process goes on, though its deadline has passed."""
    code = """
        import sys
        from packlora.schedule import process
        process.SILENCE_S = 1
        answers = "import json, time; say = lambda **tree: print(json.dumps(tree), flush=True); " \\
            "say(ready=True); input(); time.sleep(1); say(answer=5); time.sleep(9)"
        worker = process.Worker("window", [sys.executable, "-c", answers])
        worker._start()
        print("asks", flush=True)
        print(worker.ask({}, 2.5), flush=True)
        worker.close()
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "asks\n"
    time.sleep(0.2)
    parent.send_signal(signal.SIGSTOP)
    time.sleep(3)
    parent.send_signal(signal.SIGCONT)
    out, _ = parent.communicate(timeout=60)
    assert out == "5\n"


def test_closing_does_not_wait_for_a_process_that_is_just_starting() -> None:
    background = BackgroundPlanner(planner(), command=[sys.executable, "-c", "import time; time.sleep(100)"])
    background._plan_ahead(deque(), 0)
    time.sleep(0.3)
    begun = time.monotonic()
    background.close()
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "half a line", "nobody reads"])
def test_a_planning_process_that_is_ended_or_whose_run_was_killed_says_nothing(how: str) -> None:
    command = [sys.executable, "-P", "-m", "packlora.schedule.worker", "window"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    while b"ready" not in process.stdout.readline():
        pass
    if how.startswith("SIG"):
        process.send_signal(getattr(signal, how))
    elif how == "half a line":
        process.stdin.write(b'{"task": {"first')
    else:
        process.stdout.close()
        process.stdin.write(b'{"task": {}}\n')
    process.stdin.close()
    code = process.wait(60)
    assert process.stderr.read() == b"" and code == (-getattr(signal, how) if how.startswith("SIG") else 0)
