"""Threads that run a user's functions, each call within a time limit: rewards and environments.

A call that takes too long leaves its thread behind, which no program waits for at its end.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Future(Generic[T]):
    """A result that a worker is to give."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._done = threading.Event()
        self._result: T | None = None

    def run(self, action: Callable[[], T]) -> None:
        self._began = time.monotonic()
        self._result = action()
        self._done.set()

    def wait(self, seconds: float) -> T | None:
        """The result; None where it takes longer than so many seconds from when it began."""
        while not self._done.wait(0.05 if self._began is None else max(0.0, self._began + seconds - time.monotonic())):
            if self._began is not None and time.monotonic() > self._began + seconds:
                return None
        return self._result


class Worker:
    """A thread of one job that runs actions one after the other. seconds: that each may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread: _Thread | None = None

    def ask(self, actions: Sequence[Callable[[], T]]) -> list[Future[T]]:
        """Begin to run actions, which raise nothing; the results come in their order."""
        if self._thread is None or self._thread.is_stuck:
            self._thread = _Thread()
        return [self._thread.submit(action) for action in actions]

    def take(self, actions: Sequence[Callable[[], T]], futures: Sequence[Future[T]]) -> list[T | None]:
        """Wait for the results of `ask`. One that takes too long gives None; its thread is left behind, and later actions are
        begun anew."""
        out: list[T | None] = []
        while len(out) < len(actions):
            found = futures[len(out)].wait(self._seconds)
            out.append(found)
            if found is None:
                assert self._thread is not None
                self._thread.is_stuck = True
                futures = [*futures[: len(out)], *self.ask(actions[len(out) :])]
        return out


class _Thread:
    """A thread that does one thing after the other, and holds no program up that ends.

    is_stuck: set where what it does takes too long; nothing that waits is done then.
    """

    def __init__(self) -> None:
        self.is_stuck = False
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="packlora-reward", daemon=True).start()

    def submit(self, action: Callable[[], T]) -> Future[T]:
        future = Future[T]()
        self._waiting.put((future, action))
        return future

    def _run(self) -> None:
        while not self.is_stuck:
            future, action = self._waiting.get()
            if not self.is_stuck:
                future.run(action)
