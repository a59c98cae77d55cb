"""What is being done, for whoever waits: on a terminal one line of stderr that moves, elsewhere a line now and then.

Imports nothing that takes time, so that the first line can stand there before torch is loaded.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TextIO

from packlora.errors import shown
from packlora.terminal import UNHEARD, WIPE

Told = Callable[..., None]
"""Hears what is being done as (text, how much is done, of how much), as often as one likes."""

REFRESH, REPEAT = 0.1, 10.0
"""Seconds between two lines, on a terminal and elsewhere."""


def silent(text: str, done: int = 0, total: int = 0) -> None:
    """For those that nobody listens to."""


class Activity:
    """Says on stderr what is being done. Use as a context manager: at the end a terminal's line is wiped.

    Where stderr is no terminal, work that is done within REPEAT seconds is not spoken of.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr  # None in a process that was given none
        self._terminal = self.stream is not None and not self.stream.closed and self.stream.isatty()
        self._last, self._text = time.monotonic(), ""

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        now = time.monotonic()
        begins = self._terminal and text != self._text
        if not begins and now - self._last < (REFRESH if self._terminal else REPEAT):
            return
        self._last, self._text = now, text
        counted = f" {done:,} of {total:,}" if total else f" {done:,}" if done else ""
        self._write(f"{WIPE}{shown(text + counted, 72)}" if self._terminal else f"packlora: {shown(text + counted)}\n")

    def __enter__(self) -> Activity:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._terminal:
            self._write(WIPE)

    def _write(self, text: str) -> None:
        with contextlib.suppress(*UNHEARD):
            self.stream.write(text)
            self.stream.flush()
