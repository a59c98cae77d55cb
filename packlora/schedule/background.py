"""Windows made ahead of time by a process beside this one, so that a training step never waits for the scheduler.

    with BackgroundPlanner(planner) as background:
        for window in background.windows(): ...

The windows are those of the planner itself, bit for bit: a window depends on nothing but its task, and the no-ops that the one
before it asks for are put in here. Where the process fails, its window is made in this one, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from packlora.schedule.planner import Planner
from packlora.schedule.process import PlanningError, PlanningProcess
from packlora.schedule.solve import Task, finish, solve_window
from packlora.schedule.types import Carry, Window

SECONDS = 600.0
"""Most time that one window takes before its process is given up."""


class BackgroundPlanner:
    """Plans one window ahead.

    Args:
        planner: whose windows are wanted. Jobs may be added to it and removed from it on the way.
        seconds: after which the process is given up.
        command: of the process; for tests.
    """

    def __init__(self, planner: Planner, seconds: float = SECONDS, command: list[str] | None = None) -> None:
        self.planner, self.process = planner, PlanningProcess(seconds, command)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="packlora-schedule")
        self._ahead: tuple[Task, Future[Window]] | None = None

    def windows(self, start_round: int = 0) -> Iterator[Window]:
        """Yield what Planner.windows does; while one is used, the next one is made."""
        first, carry = self.planner.window_start(start_round), Carry()
        while first < self.planner.num_rounds:
            task = self.planner.task(first)
            window = finish(self._made(task), task, carry)
            first, carry = first + window.num_rounds, window.carry
            self.planner.gave(first)
            if first < self.planner.num_rounds:
                self._begin(self.planner.task(first))
            yield window

    def close(self) -> None:
        """End the process, whatever it is at."""
        self.process.close()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> BackgroundPlanner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, task: Task) -> Future[Window]:
        future = self._thread.submit(self.process.ask, task)
        self._ahead = task, future
        return future

    def _made(self, task: Task) -> Window:
        """The window of a task. One that was begun before a job came or went is made again."""
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead is not None and ahead[0] == task else self._begin(task)
        try:
            return future.result()
        except PlanningError as error:
            warnings.warn(
                f"a process that plans microbatches failed ({error}); the window is planned in the training process",
                RuntimeWarning,
                stacklevel=3,
            )
            return solve_window(task)
