"""Output on standard output and standard error, which may be closed: a run outlives the terminal it began on.

Activity shows the present activity: on a terminal one line that moves, elsewhere a line now and then. Everything that is
printed passes `say`, `show` or Activity, or report/screen.py. They escape control characters in texts from elsewhere (a file
name, a generated answer) on a terminal, and leave output to a file as it is.

The module imports nothing slow, so that a command can print its first line before torch is loaded.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO, cast

from packlora.errors import shown, spelt_out

TAKEN = re.compile(r"\r|\x1b\[(\d{0,4}(;\d{1,4}){0,8}m|\d{0,4}[ABCDGK]|\?25[hl])")
"""Control sequences for colours and bars that libraries may send to a terminal."""
UNHEARD = (OSError, ValueError, AttributeError)
"""Exceptions of a write without a reader: the stream is closed, in one of several ways, or there is none."""
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
    """File interface for rich."""

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
                _write(self.stream, text)
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


def obeys(stream: Any) -> bool:
    """Whether a stream is a terminal that takes escape sequences."""
    return _is_terminal(stream) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except UNHEARD:
        return False


def in_notebook() -> bool:
    """Whether this is a cell of a notebook, whose outputs IPython shows."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    kind = type(shell)
    return shell is not None and (
        getattr(shell, "kernel", None) is not None
        or kind.__name__ == "ZMQInteractiveShell"
        or kind.__module__.startswith("google.colab")
    )


def on(stream: Any, text: str) -> str:
    """A text as a stream is given it: on a terminal with what that would obey spelt out."""
    return spelt_out(text) if _is_terminal(stream) else text


def _write(stream: Any, text: str) -> None:
    """Write a text; characters that the stream's encoding lacks are escaped."""
    try:
        stream.write(text)
    except UnicodeEncodeError as error:
        stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))


def say(text: str) -> None:
    """Print a line on standard error, if it is open."""
    with contextlib.suppress(*UNHEARD):
        wipe = WIPE if obeys(sys.stderr) else ""
        _write(sys.stderr, f"{wipe}packlora: {on(sys.stderr, text)}\n")  # in one write
        sys.stderr.flush()


def show(text: str) -> None:
    """Print the result of a command on standard output, in one or several lines. Raises OSError where it cannot be written."""
    _write(sys.stdout, f"{on(sys.stdout, text)}\n")
    sys.stdout.flush()


class _Tamed:
    """A terminal's stream for whatever libraries write, warnings, logs, tracebacks: colours and bars go through, the rest of
    what a terminal would obey is spelt out."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        at, out = 0, ""
        for taken in TAKEN.finditer(text):
            out, at = out + spelt_out(text[at : taken.start()]) + taken[0], taken.end()
        _write(self._stream, out + spelt_out(text[at:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tame_streams() -> None:
    """Filter the output of a whole process: characters that a stream's encoding lacks are escaped, and a terminal is sent no
    control sequences but those for colours and bars."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        if _is_terminal(stream) and not isinstance(stream, _Tamed):
            setattr(sys, name, _Tamed(stream))


def settle() -> None:
    """Flush the standard streams before the process ends, and drop what cannot be written, since Python would complain of
    it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except UNHEARD:
            with contextlib.suppress(*UNHEARD):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# --- what is being done ------------------------------------------------------------------------------------------------

Told = Callable[..., None]
"""Progress callback: it is called with (text, amount done, total amount), as often as the caller likes."""

REFRESH, REPEAT = 0.1, 10.0
"""Seconds between two lines, on a terminal and elsewhere."""


def silent(text: str, done: int = 0, total: int = 0) -> None:
    """Progress callback that prints nothing."""


class Activity:
    """Show the present activity on stderr. Use as a context manager: at the end a terminal's line is wiped.

    Where stderr is no terminal, work that takes less than REPEAT seconds is not shown.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr  # None in a process that was given none
        self._terminal = obeys(self.stream)
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
