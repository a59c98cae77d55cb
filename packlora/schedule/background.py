"""Windows made ahead of time by processes of their own, so that a training step never waits for the scheduler.

    with BackgroundPlanner(planner) as background:
        for window in background.windows(): ...

The windows are those of the planner itself, bit for bit: a window depends on nothing but its task, and the no-ops that the one
before it asks for are put in here. Where a process fails, its window is made in this process, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

from packlora.schedule.planner import Planner
from packlora.schedule.process import Worker, WorkerError
from packlora.schedule.solve import Task, finish, solve_window
from packlora.schedule.types import Carry, ScheduleError, Window
from packlora.schedule.wire import task_to_json, window_from_json


@dataclass(slots=True)
class _Pending:
    task: Task
    window: Future[Window]


class BackgroundPlanner:
    """Plans windows ahead in `workers` processes.

    Args:
        planner: whose windows are wanted. Jobs may be added to it and removed from it on the way.
        workers: processes, 1 or more, each of which has one window in work.
        seconds: after which a process is given up; None: never.
        command: of the processes; for tests.

    Raises:
        ScheduleError: fewer than one process.
    """

    def __init__(
        self, planner: Planner, workers: int = 1, seconds: float | None = 600.0, command: list[str] | None = None
    ) -> None:
        if workers < 1:
            raise ScheduleError(f"schedule: workers is {workers}, but must be 1 or more")
        self.planner, self.seconds = planner, seconds
        self._workers = [Worker("window", command) for _ in range(workers)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="packlora-schedule")
        self._broken = False
        self._closing = False

    def windows(self, start_round: int = 0) -> Iterator[Window]:
        """As Planner.windows; while one is used, the next ones are made."""
        first, carry = self.planner.window_start(start_round), Carry()
        pending: deque[_Pending] = deque()
        while first < self.planner.num_rounds:
            self._plan_ahead(pending, first)
            task, window = self._take(pending)
            window = finish(window, task, carry)
            first, carry = first + window.num_rounds, window.carry
            self.planner.gave(first)
            self._plan_ahead(pending, first)
            yield window

    def close(self) -> None:
        """End the processes, whatever they are at."""
        self._closing = True
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> BackgroundPlanner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plan_ahead(self, pending: deque[_Pending], first: int) -> None:
        """Have as many windows in work as there are processes; those that a new or gone job changes are begun again."""
        for number in range(len(self._workers)):
            start = first + number * self.planner.window_rounds
            if number < len(pending) and (
                start >= self.planner.num_rounds or pending[number].task != self.planner.task(start)
            ):
                while len(pending) > number:
                    pending.pop().window.cancel()
            if number >= len(pending) and start < self.planner.num_rounds:
                task = self.planner.task(start)
                pending.append(_Pending(task, self._threads.submit(self._make, task)))

    def _take(self, pending: deque[_Pending]) -> tuple[Task, Window]:
        item = pending.popleft()
        try:
            return item.task, item.window.result()
        except WorkerError as error:
            if not self._broken:
                warnings.warn(
                    f"a process that plans microbatches failed ({error}); the window is planned in the training process",
                    RuntimeWarning,
                    stacklevel=3,
                )
            self._broken = error.kind == "missing"
            return item.task, solve_window(item.task, self.planner.solver_or_none())

    def _make(self, task: Task) -> Window:
        worker = self._idle.get()
        try:
            if self._closing:
                raise WorkerError("closed", "the planner was closed")
            return window_from_json(worker.ask({"task": task_to_json(task)}, self.seconds))
        finally:
            self._idle.put(worker)
