"""How events reach subscribers: all of them in one order, whatever one of them does."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

import pytest

from packlora.events import Event, Note, Stop, TrainingBegan
from packlora.runtime.events import Emitter
from packlora.runtime.signals import stop_signals


def test_every_subscriber_hears_every_event_in_the_order_of_emission_also_of_what_one_of_them_emits() -> None:
    heard: dict[str, list[Event]] = {"first": [], "second": []}

    def first(event: Event) -> None:
        heard["first"].append(event)
        if event == TrainingBegan():
            events.emit(Note("one"))
            events.emit(Note("two"))
            assert heard["first"] == heard["second"] + [event]  # nothing is told inside something else

    events = Emitter([first, heard["second"].append])
    events.emit(TrainingBegan())
    events.emit(Note("three"))
    assert heard["first"] == heard["second"] == [TrainingBegan(), Note("one"), Note("two"), Note("three")]


class NoWords(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Compares:
    """Like arrays, it has no plain answer to ==."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, event: Event) -> None: ...


class AnyAttribute:
    def __getattr__(self, name: str) -> int:
        return 5

    def __call__(self, event: Event) -> Any:
        return Stop(["a", "b"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda event: Stop(["a"]), "TypeError: Stop takes the name of one job, or None for the run, and a reason"),
        (lambda event: Stop(event), "both texts; got Note"),
        (lambda event: Stop("a", 5), "both texts; got int"),
        (lambda event: Stop, "it returned the class Stop; return Stop() to end the run"),
        (AnyAttribute(), "subscriber AnyAttribute failed at Note ("),
    ],
)
def test_a_stop_of_nothing_that_can_be_stopped_is_a_failure_of_the_subscriber(answer: Any, said: str) -> None:
    heard: list[Event] = []
    events = Emitter([answer, heard.append])
    events.emit(Note("one"))
    assert (events.stop.asked, events.stop.jobs, len(heard)) == (False, {}, 2)
    assert isinstance(heard[1], Note) and said in heard[1].text
    events.emit(Note("two"))
    assert heard[2:] == [Note("two")]


@pytest.mark.parametrize("error", [NoWords(), RuntimeError("\ud800"), RuntimeError("\x1b[31m\n" + "x" * 10**5)])
def test_whatever_a_subscriber_raises_its_note_is_one_short_line_that_can_be_written(error: Exception) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise error

    Emitter([Compares(), broken, heard.append]).emit(TrainingBegan())
    note = heard[1]
    assert isinstance(note, Note) and note.text.isprintable() and len(note.text) < 1500
    assert f"{type(error).__name__}" in note.text


def test_the_reason_of_a_stop_is_kept_as_one_short_line_that_can_be_written() -> None:
    events = Emitter([lambda event: Stop("a", "\ud800\n\x1b[31m" + "x" * 10**5)])
    events.emit(TrainingBegan())
    assert events.stop.jobs["a"].isprintable() and len(events.stop.jobs["a"]) < 1500


def test_of_two_equal_subscribers_the_one_that_raised_is_told_nothing_more() -> None:
    @dataclass
    class Fails:
        calls: list[str] = field(compare=False)
        error: list[Exception] = field(compare=False)

        def __call__(self, event: Event) -> None:
            self.calls.append(type(event).__name__)
            if self.error:
                raise self.error[0]

    good, bad = Fails([], []), Fails([], [ValueError()])
    events = Emitter([good, bad])
    events.emit(TrainingBegan())
    events.emit(TrainingBegan())
    assert (good.calls, bad.calls) == (["TrainingBegan", "Note", "TrainingBegan"], ["TrainingBegan"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_passes_through_a_subscriber_and_later_events_are_still_told(error: Any) -> None:
    heard: list[Event] = []

    def interrupted(event: Event) -> None:
        if event == TrainingBegan():
            raise error

    events = Emitter([interrupted, heard.append])
    with pytest.raises(error):
        events.emit(TrainingBegan())
    events.emit(Note("saved"))
    assert heard == [Note("saved")]


def test_a_signal_that_comes_while_an_event_is_told_is_told_after_it() -> None:
    heard: list[str] = []

    def busy(event: Event) -> None:
        heard.append(f"{type(event).__name__} begins")
        if event == TrainingBegan():
            signal.raise_signal(signal.SIGTERM)
        heard.append(f"{type(event).__name__} ends")

    events = Emitter([busy])
    with stop_signals(events):
        events.emit(TrainingBegan())
    assert events.stop.signal == signal.SIGTERM
    assert heard == ["TrainingBegan begins", "TrainingBegan ends", "StopAsked begins", "StopAsked ends"]
