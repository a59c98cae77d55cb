"""How events reach subscribers. The types of events are in packlora/events.py, where report/ may import them.

Order: every subscriber hears all events, in the order in which they were emitted, and never one inside another. What is
emitted while an event is being told, by a subscriber or by a signal's handler, is told after it.
"""

from __future__ import annotations

import inspect
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from packlora.errors import shown
from packlora.events import Event, Note, RunEnded, Stop, StopAsked, Subscriber

MOST_SAID = 1000
"""Characters of what a subscriber says: an exception's message, the reason of a stop."""


class StopRequest:
    """Whether the run is to end after the present microbatch, and which jobs at their present step."""

    def __init__(self) -> None:
        self.asked = False
        self.signal: int | None = None
        """Signal that asked for it; None where a subscriber did."""
        self.jobs: dict[str, str] = {}
        """Jobs that are to end, with who asks for it and why; whoever sees to one takes it out."""

    def ask(self, number: int | None = None) -> None:
        self.asked, self.signal = True, number

    def withdraw(self) -> None:
        """It came too late to stop the run."""
        self.asked, self.signal = False, None


class Emitter:
    """Tells events to subscribers, and keeps what they ask for in `stop`. look: takes up what other processes tell or ask for,
    for whoever waits without an event of its own."""

    def __init__(self, subscribers: Iterable[Subscriber] = ()) -> None:
        self.subscribers, self.stop = list(subscribers), StopRequest()
        self.look: Callable[[], None] = lambda: None
        self._waiting: deque[Event] = deque()
        self._telling = False

    def subscribe(self, *subscribers: Subscriber) -> None:
        self.subscribers += subscribers

    def emit(self, event: Event) -> None:
        """Tell all subscribers, in their order. One that raises is told nothing more; the others get a Note of it. One for
        which other processes wait (`in_step`) ends the run."""
        self._waiting.append(event)
        if self._telling:  # whoever does so goes on with this one
            return
        self._telling = True
        try:
            while self._waiting:
                event = self._waiting.popleft()
                for subscriber in tuple(self.subscribers):
                    self._tell(subscriber, event)
        finally:
            self._telling = False

    def _tell(self, subscriber: Subscriber, event: Event) -> None:
        try:
            answer: Any = subscriber(event)
            if answer is Stop:
                raise TypeError("it returned the class Stop; return Stop() to end the run, Stop(job) to end a job")
        except Exception as error:
            if getattr(subscriber, "in_step", False) is True:
                raise
            self.subscribers = [
                other for other in self.subscribers if other is not subscriber
            ]  # whatever == says of it
            self._waiting.append(Note(_failure(subscriber, event, error)))
            return
        if isinstance(answer, Stop) and not isinstance(event, RunEnded):  # which is the last event
            self._ask(answer, name_of(subscriber))

    def _ask(self, stop: Stop, by: str) -> None:
        reason = f"{by}: {shown(stop.reason, MOST_SAID)}" if stop.reason else by
        if stop.job is not None:
            self.stop.jobs.setdefault(stop.job, reason)
        elif not self.stop.asked:
            self.stop.ask()
            self._waiting.append(StopAsked(reason))


def name_of(subscriber: Subscriber) -> str:
    """Name of a function, or of the class of an object."""
    named = subscriber if inspect.isroutine(subscriber) or inspect.isclass(subscriber) else type(subscriber)
    return named.__qualname__.rpartition("<locals>.")[2]


def _failure(subscriber: Subscriber, event: Event, error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    try:
        said = f": {shown(error, MOST_SAID)}"
    except Exception:  # raised by its __str__
        said = ""
    return (
        f"subscriber {name_of(subscriber)} failed at {type(event).__name__} ({Path(last.filename).name}, line {last.lineno}: "
        f"{type(error).__name__}{said}); it is told nothing more, training goes on"
    )
