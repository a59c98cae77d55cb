"""Users' functions that hang. A call is given up once it hangs, and no other call is, however long a busy machine takes."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from unittest import mock

from packlora.rl.workers import Worker

_hanging = set[threading.Thread]()
_over = threading.Event()


def hang() -> None:
    """What a function calls in order to hang."""
    _hanging.add(threading.current_thread())
    _over.wait()


@contextlib.contextmanager
def given_up_where_it_hangs() -> Iterator[None]:
    """Workers' time limits are over for calls that hang, and far away for others."""
    give_up = Worker.give_up

    def chosen(worker: Worker) -> None:
        with worker._changed:
            if worker._current is not None:
                worker._current.began = -math.inf if worker._thread in _hanging else math.inf
        give_up(worker)

    _over.clear()
    with mock.patch.object(Worker, "give_up", chosen):
        yield
    _over.set()
    _hanging.clear()
