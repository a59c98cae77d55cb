"""Threads that run users' functions: time limits, and calls that answer after theirs."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from waiting import SECONDS, wait_for

from packlora.rl import workers
from packlora.rl.workers import Worker


def test_a_late_call_is_given_up_and_what_it_answers_then_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now, began, goes = [0.0], threading.Event(), threading.Event()
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def late() -> str:
        began.set()
        goes.wait(SECONDS)
        return "late"

    worker = Worker(5.0, threading.Event())
    assert worker.deadline is None
    first, second = worker.ask([late, lambda: "next"])
    assert began.wait(SECONDS)
    thread, now[0] = worker._thread, 4.9
    worker.give_up()
    assert worker.deadline == 5.0 and not first.is_done and not second.is_done
    now[0] = 5.0
    worker.give_up()
    assert first.is_done and first.result is None
    wait_for(lambda: second.is_done)
    held = threading.Event()
    (third,) = worker.ask([lambda: held.wait(SECONDS)])
    wait_for(lambda: worker.deadline is not None)
    goes.set()
    assert thread is not None
    thread.join(SECONDS)
    assert (first.result, second.result) == (None, "next")
    assert worker.deadline == 10.0 and not third.is_done, "the late one is not taken for the present call"
    held.set()
    wait_for(lambda: third.is_done)
    worker.close()
