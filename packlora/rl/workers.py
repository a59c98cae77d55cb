"""Threads that run a user's functions, each call within a time limit: rewards and environments.

Nothing here waits: results come as futures, and `rung` is set whenever one has come. A call that takes too long leaves its
thread behind, which no program waits for at its end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Future(Generic[T]):
    """Result of an action. result: None where it took too long, and until it is done."""

    def __init__(self, action: Callable[[], T]) -> None:
        self.action = action
        self.began = 0.0
        self.is_done = False
        self.result: T | None = None

    def finish(self, result: T | None) -> None:
        """Set the result."""
        self.result, self.is_done = result, True


class Worker:
    """Runs actions of one job one after the other, in a thread.

    Args:
        seconds: that each may take.
        rung: set when a result has come.
    """

    def __init__(self, seconds: float, rung: threading.Event) -> None:
        self._seconds, self._rung = seconds, rung
        self._changed = threading.Condition()
        self._waiting = deque[Future[Any]]()
        self._current: Future[Any] | None = None
        self._thread: threading.Thread | None = None
        """The one that takes what waits; an earlier one may hang in a call."""

    def ask(self, actions: Sequence[Callable[[], T]]) -> list[Future[T]]:
        """Begin to run actions, which raise nothing."""
        futures = [Future(action) for action in actions]
        with self._changed:
            self._waiting += futures
            self._begin()
            self._changed.notify_all()
        return futures

    def give_up(self) -> None:
        """Leave a call that takes too long behind, and go on with what waits."""
        with self._changed:
            late = self._current
            if late is None or time.monotonic() < late.began + self._seconds:
                return
            self._current = self._thread = None
            late.finish(None)
            self._begin()

    @property
    def deadline(self) -> float | None:
        """Time (of time.monotonic) at which the present call is given up; None where there is none."""
        with self._changed:
            return None if self._current is None else self._current.began + self._seconds

    def close(self) -> None:
        """Take nothing any more."""
        with self._changed:
            self._waiting.clear()
            self._current = self._thread = None
            self._changed.notify_all()

    def _begin(self) -> None:
        """Start a thread where something waits and there is none."""
        if self._waiting and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="packlora-reward", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        own = threading.current_thread()
        while (future := self._next(own)) is not None:
            result = future.action()
            with self._changed:
                if self._thread is not own:  # given up meanwhile
                    return
                future.finish(result)
                self._current = None
            self._rung.set()

    def _next(self, own: threading.Thread) -> Future[Any] | None:
        """The next action; None for a thread that is not wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._thread is not own)
            if self._thread is not own:
                return None
            self._current = self._waiting.popleft()
            self._current.began = time.monotonic()
            return self._current
