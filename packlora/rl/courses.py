"""Courses of completions from their prompts to their rewards, side by side: each waits for what it needs, and for nothing else.

A course is a generator. It yields a `Turn`, which is drawn in one batch with the turns of other courses, or futures of a user's
functions, and goes on once they are there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from packlora.engine.sampling import SampledToken, SampleRequest
from packlora.rl.conversation import Conversation
from packlora.rl.workers import Future, Worker

LOOK = 0.1
"""Seconds between two looks whether a stop was asked for."""
Key = tuple[str, int, bool]
"""Job, step, and whether the prompts are held out."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Requests whose tokens a course waits for, each with its samples."""

    requests: Sequence[tuple[SampleRequest, list[Conversation]]]


Steps = Iterator[Turn | Sequence[Future[Any]]]


@dataclass(slots=True)
class _Course:
    """A course under way. open: samples of its turn that have not ended. took: adds seconds of drawing."""

    steps: Steps
    took: Callable[[float], None]
    futures: Sequence[Future[Any]] = ()
    open: int = 0
    tickets: list[int] = field(default_factory=list)

    @property
    def may_go_on(self) -> bool:
        return not self.open and all(future.is_done for future in self.futures)


class Courses:
    """All courses of a run.

    Args:
        sampler: makes the sampler, when the first turn is drawn.
        workers: that run users' functions now.
        rung: set when a result of a worker has come.
        is_stopped: whether a stop is asked for.
    """

    def __init__(
        self, sampler: Callable[[], Any], workers: Callable[[], Iterable[Worker]], rung: threading.Event,
        is_stopped: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._make, self._workers, self._rung, self._is_stopped = sampler, workers, rung, is_stopped
        self._sampler: Any = None
        self._courses: dict[Key, _Course] = {}
        self._places: dict[int, tuple[_Course, list[Conversation]]] = {}

    def begin(self, key: Key, steps: Steps, took: Callable[[float], None]) -> None:
        """Begin a course."""
        self._courses[key] = _Course(steps, took)

    def __contains__(self, key: Key) -> bool:
        return key in self._courses

    def of(self, job: str) -> list[Key]:
        """Courses of a job that are under way."""
        return [key for key in self._courses if key[0] == job]

    def keep(self, is_wanted: Callable[[Key], bool]) -> None:
        """Drop the courses that nobody wants any more."""
        for key in [own for own in self._courses if not is_wanted(own)]:
            course = self._courses.pop(key)
            for ticket in course.tickets:
                self._sampler.cancel(ticket)
                self._places.pop(ticket, None)
            course.steps.close()  # type: ignore[attr-defined]

    def run(self, is_enough: Callable[[float, float], bool]) -> None:
        """Go on with all courses until none is under way or a stop is asked for; or, whenever no course has a turn to be drawn,
        until it is enough.

        Args:
            is_enough: called with the seconds of this call in which turns were drawn, and those in which it waited.
        """
        drew, waited = 0.0, 0.0
        while self._courses and not self._is_stopped():
            began = time.perf_counter()
            self._rung.clear()
            self._go_on()
            if self._places:
                self._draw()
                drew += time.perf_counter() - began
            elif self._courses and not is_enough(drew, waited):
                self._rung.wait(self._patience())
                waited += time.perf_counter() - began
            else:
                break
        if self._sampler is not None and not self._places:
            self._sampler.free()

    def _patience(self) -> float:
        """Seconds until a call is to be given up, or a stop looked for."""
        ends = [deadline for worker in self._workers() if (deadline := worker.deadline) is not None]
        return max(0.0, min([LOOK, *(end - time.monotonic() for end in ends)]))

    def _go_on(self) -> None:
        """Let courses go on whose tokens and results are there."""
        for worker in self._workers():
            worker.give_up()
        for key, course in list(self._courses.items()):
            while key in self._courses and course.may_go_on:
                self._advance(key, course)

    def _advance(self, key: Key, course: _Course) -> None:
        course.futures, course.tickets = (), []
        found = next(course.steps, None)
        if found is None:
            del self._courses[key]
        elif isinstance(found, Turn):
            self._submit(course, found)
        else:
            course.futures = found

    def _submit(self, course: _Course, turn: Turn) -> None:
        if self._sampler is None:
            self._sampler = self._make()
        for request, talks in turn.requests:
            ticket = self._sampler.submit(request)
            self._places[ticket] = course, talks
            course.tickets.append(ticket)
            course.open += len(talks)

    @torch.no_grad()
    def _draw(self) -> None:
        """Draw the next token of all turns."""
        began = time.perf_counter()
        courses = {id(course): course for course, _ in self._places.values()}
        for token in self._sampler.step():
            self._take(token)
        took = time.perf_counter() - began
        for course in courses.values():
            course.took(took)

    def _take(self, token: SampledToken) -> None:
        course, talks = self._places[token.ticket]
        talk = talks[token.sample]
        assert token.entropy is not None
        talk.take(token.id, token.logprob, token.entropy)
        if token.reason is None:
            return
        talk.turns += 1
        talk.is_cut = token.reason == "length"
        course.open -= 1
        if not course.open:
            for ticket in course.tickets:
                self._places.pop(ticket, None)
