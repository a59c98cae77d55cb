"""Errors that are shown as a sentence: bad input, before any training, and files that cannot be written."""

from __future__ import annotations

import errno
import os
import re
import reprlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EPIPE}
FULL = {errno.ENOSPC, errno.EDQUOT}

SHOWN = 120
"""Characters of a user's input that a message quotes."""


class EndlessError(Exception):
    """A chat template has gone over a limit of data/bounded.py."""


class InputError(Exception):
    """Bad input from the user: run file, data, adapter folder or output folder.

    The message is one or more whole sentences that name the job, file, line, key or module, what was found and what is
    accepted. The command line prints it without a traceback and exits with code 2. What a terminal would obey in it, as an
    escape sequence in a key of a data file, is spelt out.
    """

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))


def printable(text: str) -> str:
    """The text with everything spelt out that is no visible character: control characters, marks of direction, surrogates."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"  # controls, directions, halves of characters
)


def spelt_out(text: str) -> str:
    """The text with what a terminal would obey spelt out: escape sequences, carriage returns, marks of direction. Lines, tabs
    and everything that people write stay."""
    return OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def shown(text: object, longest: int = SHOWN) -> str:
    """A piece of input as a message quotes it: on one line, printable, not longer than `longest` characters."""
    whole = str(text)
    return printable(whole[:longest]) + (" ..." if len(whole) > longest else "")


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 1000


def quoted(value: object, longest: int = SHOWN) -> str:
    """User input in the form in which a message quotes it: as Python writes it, and as `shown`. Neither deep nor large ones
    cost time."""
    return shown(_REPR.repr(value), longest)


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Format a count with its noun: 3 samples."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def counted(number: int, noun: str, said: str) -> str:
    """Say what is so of a count: 3 rows were cut, 1 row was cut. said: begins with such a verb."""
    verb, rest = said.split(" ", 1)
    one = {"are": "is", "do": "does", "have": "has", "were": "was"}[verb]
    return f"{plural(number, noun)} {one if number == 1 else verb} {rest}"


def kind_of(value: object) -> str:
    """A value's type in words."""
    if value is None:
        return "nothing"
    names = {dict: "a mapping", list: "a list", str: "a text", bool: "a yes/no", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def foreign(error: Exception) -> str:
    """Message of another library's error on one line: its first line, and the next where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) or not str(error).strip() else text


def reason_of(error: BaseException) -> str:
    """Reason of a failure on one line: the system's message, or an error's kind and its first line."""
    if isinstance(error, OSError):
        return unwritten(error) or str(error)
    if isinstance(error, MemoryError):
        return str(error) or "this machine's memory is used up"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return shown(f"{type(error).__name__}: {said}", 500)


def refusing(what: str, compute: Callable[[], T]) -> T:
    """Return the result of `compute`; raise any failure as an InputError, so that it ends only the request that failed.

    Args:
        what: object that is refused, for the message.

    Raises:
        ProcessError: another process does not answer, so nothing can be agreed on.
    """
    try:
        return compute()
    except (InputError, ProcessError):
        raise
    except Exception as error:
        raise InputError(f"{what}: {reason_of(error)}") from error


def needed(package: str, extra: str, what: str) -> InputError:
    """The error of what needs a package that is not installed, and is installed as an extra of packlora."""
    return InputError(f"{what} needs {package}, which is not installed; pip install 'packlora[{extra}]'")


class WriteError(Exception):
    """A checkpoint, an adapter or a merged model cannot be written, as on a full disk.

    The message says what and why, and after training what was kept and how to go on. The command line prints it without a
    traceback and exits with code 1.
    """


class Unpackable(RuntimeError):
    """Failure of packing in a module; the text is complete, and callers add nothing to it."""


class ProcessError(Exception):
    """Another process of the run has failed, or does not answer. The message says which, and why."""

    is_news = True
    """Whether no other process of the run has said before that it failed."""


def system_number(error: BaseException) -> int | None:
    """The system's number of an error, also of safetensors' own, which is no OSError; None for another error."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return None if found is None else int(found[1])


def unwritten(error: BaseException) -> str | None:
    """Describe a failed write (a full disk, a quota, a broken disk or pipe) with its file; None for another error."""
    number, name = system_number(error), getattr(error, "filename", None)
    if number not in UNWRITABLE:
        return None
    what = f"{os.strerror(number)}: {name}" if name else os.strerror(number)
    return f"{what}; free some space there" if number in FULL else what
