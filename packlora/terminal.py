"""What is said on standard output and standard error, where it may come to nothing: a run outlives the terminal it began on.
Activity says what is being done, for whoever waits: on a terminal one line that moves, elsewhere a line now and then.

Imports nothing that takes time, so that a command can say at once what it is about to do, before torch is loaded.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, cast

from packlora.errors import shown

UNHEARD = (OSError, ValueError, AttributeError)
"""What speaking raises where nobody listens: the stream is closed, in one of several ways, or there is none."""
WIPE = "\r\x1b[2K"
"""Takes the line that moves off a terminal."""


def standard_output() -> TextIO:
    """Standard output that never fails: after the first thing that it does not take (the terminal is closed, the reader of
    `| head -1` has gone, the disk behind `>` is full) the rest is dropped, and standard error says so once.
    """
    global _output
    if _output is None or _output.stream is not sys.stdout:
        _output = _Output(sys.stdout)
    return cast(TextIO, _output)


class _Output:
    """What rich needs of a file."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._lost = stream is None  # a process without any terminal

    @property
    def encoding(self) -> str:
        return getattr(self.stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return not self._lost and bool(self.stream.isatty())

    def write(self, text: str) -> int:
        if not self._lost:
            try:
                self.stream.write(text)
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if not self._lost:
            try:
                self.stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._lost = True
        say(f"standard output takes no more ({getattr(error, 'strerror', None) or error}); the run goes on without it")


_output: _Output | None = None


def say(text: str) -> None:
    """A line on standard error, if anybody listens."""
    with contextlib.suppress(*UNHEARD):
        wipe = WIPE if sys.stderr.isatty() else ""
        print(f"{wipe}packlora: {text}\n", end="", file=sys.stderr, flush=True)  # in one write


def settle() -> None:
    """Before the process ends: what a standard stream still holds and cannot write is dropped, else Python complains of it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except UNHEARD:
            with contextlib.suppress(*UNHEARD):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# --- what is being done ------------------------------------------------------------------------------------------------

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
