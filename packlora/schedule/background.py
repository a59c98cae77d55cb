"""Windows made ahead of time by a process beside this one (worker.py), so that a training step never waits for the scheduler.

    with BackgroundPlanner(planner) as background:
        for window in background.windows(): ...

The windows are those of the planner itself, bit for bit: a window depends on nothing but its task, and the no-ops that the one
before it asks for are put in here. Where the process fails, its window is made in this one, and a warning says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from packlora.schedule.planner import Planner
from packlora.schedule.solve import Task, finish, solve_window
from packlora.schedule.types import Carry, ScheduleError, Window
from packlora.schedule.worker import ANSWER, TASK

COMMAND = (sys.executable, "-P", "-m", "packlora.schedule.worker")
SECONDS = 600.0
"""Most time that the process is waited for before it is given up."""


class PlanningError(Exception):
    """The process gave no window."""


class PlanningProcess:
    """A process of worker.py, started when it is first asked and again when it has ended. It is asked for one window at a time.

    Args:
        seconds: after which a process that does not answer is killed.
        command: what to start; for tests.
    """

    def __init__(self, seconds: float, command: list[str] | None = None) -> None:
        self.seconds, self.command = seconds, command or list(COMMAND)
        self.process: subprocess.Popen[str] | None = None
        self._is_late = False

    def ask(self, task: Task) -> None:
        """Hand a task to the process. Raises PlanningError where it cannot be started; how it fails else, `answer` says."""
        if self.process is None or self.process.poll() is not None:
            self.process = self._started()
        assert self.process.stdin is not None
        with self._deadline(self.process), suppress(OSError):  # it has ended
            self.process.stdin.write(TASK.dump_json(task).decode() + "\n")
            self.process.stdin.flush()

    def answer(self) -> Window:
        """Wait for the window of the task.

        Raises:
            PlanningError: no answer.
            ScheduleError: a sample of the task fits no microbatch.
        """
        process = self.process
        assert process is not None and process.stdout is not None
        with self._deadline(process):
            line = process.stdout.readline()
        if not line.endswith("\n"):
            end = _end_of(process)
            raise PlanningError(f"no answer in {self.seconds:g} s" if self._is_late else end)
        reply = ANSWER.validate_json(line)
        if reply.input_error:
            raise ScheduleError(reply.input_error)
        if reply.window is None:
            raise PlanningError(reply.error)
        return reply.window

    def close(self) -> None:
        """End the process, whatever it is at."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @contextmanager
    def _deadline(self, process: subprocess.Popen[str]) -> Iterator[None]:
        """Kill the process where the block takes too long; what waits for its pipes goes on then."""

        def give_up() -> None:
            self._is_late = True
            process.kill()

        timer = threading.Timer(self.seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _started(self) -> subprocess.Popen[str]:
        self._is_late = False
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
        try:
            return subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, encoding="utf-8",
                start_new_session=True, creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )  # fmt: skip
        except OSError as error:
            raise PlanningError(f"cannot start {self.command[0]}: {error}") from None


def _end_of(process: subprocess.Popen[str]) -> str:
    """Say how a process ended that closed its output."""
    process.kill()  # one that closed its output and hangs
    code = process.wait()
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class BackgroundPlanner:
    """Plans one window ahead.

    Args:
        planner: whose windows are wanted. Jobs may be added to it and removed from it on the way.
        seconds: after which the process is given up.
        command: of the process; for tests.
    """

    def __init__(self, planner: Planner, seconds: float = SECONDS, command: list[str] | None = None) -> None:
        self.planner, self.process = planner, PlanningProcess(seconds, command)
        self._asked: Task | None = None
        """Task that the process has."""

    def windows(self, start_round: int = 0) -> Iterator[Window]:
        """Yield what Planner.windows does; while one is used, the next one is made."""
        first, carry = self.planner.window_start(start_round), Carry()
        while first < self.planner.num_rounds:
            task = self.planner.task(first)
            window = finish(self._made(task), task, carry)
            first, carry = first + window.num_rounds, window.carry
            self.planner.gave(first)
            if first < self.planner.num_rounds:
                with suppress(PlanningError):  # it is asked once more when the window is wanted
                    self._ask(self.planner.task(first))
            yield window

    def close(self) -> None:
        """End the process, whatever it is at."""
        self.process.close()

    def __enter__(self) -> BackgroundPlanner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, task: Task) -> None:
        self.process.ask(task)
        self._asked = task

    def _made(self, task: Task) -> Window:
        """The window of a task. One that was begun before a job came or went is made again."""
        asked, self._asked = self._asked, None
        try:
            if asked is not None and asked != task:
                with suppress(ScheduleError):
                    self.process.answer()
            if asked != task:
                self.process.ask(task)
            return self.process.answer()
        except PlanningError as error:
            warnings.warn(
                f"a process that plans microbatches failed ({error}); the window is planned in the training process",
                RuntimeWarning,
                stacklevel=3,
            )
            return solve_window(task)
