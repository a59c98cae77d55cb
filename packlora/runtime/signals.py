"""Signals that ask a run to end before its last step; a subscriber asks for it by what it returns (packlora/events.py)."""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Iterator

from packlora.events import StopAsked
from packlora.portable import HANGUP
from packlora.runtime.events import Emitter


@contextlib.contextmanager
def stop_signals(events: Emitter) -> Iterator[None]:
    """SIGTERM, Ctrl-C and SIGHUP (the terminal is closed) ask to stop after the present microbatch. SIGTERM or Ctrl-C once
    more stops at once. SIGHUP does not: a shell that ends passes on what the kernel has sent already.
    """

    request = events.stop

    def ask(number: int, frame: types.FrameType | None) -> None:
        if request.signal is None:
            request.ask(number)
            events.emit(StopAsked(signal.Signals(number).name, "; once more stops without saving"))
        elif HANGUP not in (number, request.signal):
            raise KeyboardInterrupt
        elif request.signal == HANGUP:
            request.ask(number)

    before = {}
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        for number in filter(None, (signal.SIGTERM, signal.SIGINT, HANGUP)):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                before[number] = signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
