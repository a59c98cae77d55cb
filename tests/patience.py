"""Processes that meet: those that come are waited for however long they take, and the time that is set holds for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from waiting import SECONDS

from packlora.parallel import join

LEAST = 0.1
"""Seconds for the others, once those that come are there."""


def wait_for_ranks(ranks: Collection[int], put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let process 0 wait for these. put: as setattr or monkeypatch.setattr."""
    absent, store = join._absent, join._store

    def patient(own: Any, size: int, attempt: int, deadline: float) -> list[int]:
        found = absent(own, size, attempt, deadline)
        until = time.monotonic() + SECONDS
        while set(found) & set(ranks) and time.monotonic() < until:
            found = absent(own, size, attempt, time.monotonic() + LEAST)
        return found

    put(join, "_absent", patient)
    put(join, "_store", lambda limit: store(timedelta(seconds=SECONDS)))
    put(join, "GRACE", SECONDS)
