"""The process that plans: stopped, killed, hanging or orphaned; no number changes."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from schedule_cases import Lengths
from waiting import SECONDS, wait_for

from packlora.schedule.background import COMMAND, BackgroundPlanner, PlanningError, PlanningProcess
from packlora.schedule.planner import Planner

pytestmark = pytest.mark.usefixtures("planning_process")

HANGS = [sys.executable, "-c", "import time; time.sleep(1000)"]


def planner(rounds: int = 8) -> Planner:
    draw = random.Random(0)
    jobs = [Lengths(f"j{n}", [[draw.randint(1, 150) for _ in range(8)] for _ in range(rounds)]) for n in range(4)]
    return Planner(jobs, 300, window_rounds=2, method="greedy")


def test_a_stopped_process_is_killed_when_its_time_is_over_and_replaced() -> None:
    wanted = [window.microbatches for window in planner(16).windows()]
    with BackgroundPlanner(planner(16), seconds=SECONDS) as background:
        plans = background.windows()
        windows = [next(plans)]
        stopped = background.process.process
        assert stopped is not None
        select.select([stopped.stdout], [], [])  # nothing is in work
        os.kill(stopped.pid, signal.SIGSTOP)
        background.process.seconds = 0.5
        windows.append(next(plans))
        with pytest.warns(RuntimeWarning, match=r"no answer in 0.5 s\); the window is planned in the training"):  # noqa: PT031
            windows.append(next(plans))
            background.process.seconds = SECONDS
            windows += plans  # the first of these may have been asked for while half a second was all that it had
        assert background.process.process is not stopped
    assert [window.microbatches for window in windows] == wanted


def test_a_request_larger_than_a_pipe_does_not_wait_for_a_process_that_reads_nothing() -> None:
    process = PlanningProcess(1.0, HANGS)
    process.ask(Planner([Lengths("a", [[1] * 100_000])], 10**6).task(0))
    with pytest.raises(PlanningError, match="no answer in 1 s"):
        process.answer()
    process.close()


def test_a_plan_that_is_left_early_ends_its_process_at_once() -> None:
    with BackgroundPlanner(planner(), command=HANGS) as background:
        background._ask(planner().task(0))
        process = background.process.process
        assert process is not None and process.poll() is None
    assert process.poll() == -signal.SIGKILL


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "half a line", "nobody reads"])
def test_a_process_that_is_ended_or_whose_run_was_killed_says_nothing(how: str) -> None:
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(b"{}\n")
    process.stdin.flush()
    assert b"error" in process.stdout.readline()
    if how.startswith("SIG"):
        process.send_signal(getattr(signal, how))
    elif how == "half a line":
        process.stdin.write(b'{"first')
    else:
        process.stdout.close()
        process.stdin.write(b"{}\n")
    process.stdin.close()
    code = process.wait(SECONDS)
    assert process.stderr.read() == b"" and code == (-getattr(signal, how) if how.startswith("SIG") else 0)


def test_the_process_ends_when_the_one_that_started_it_is_killed() -> None:
    code = """
        import time
        from packlora.schedule.background import PlanningProcess
        process = PlanningProcess(1000)
        process.process = process._started()
        print(process.process.pid, flush=True)
        time.sleep(1000)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_for(lambda: not _runs(child), "the process outlived its parent")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
