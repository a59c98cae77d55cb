"""The one error type for bad input. Everything that raises it does so before any training."""

from __future__ import annotations

SHOWN = 120
"""Characters of a piece of somebody's input that a message quotes."""


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


def shown(text: object, longest: int = SHOWN) -> str:
    """A piece of input as a message quotes it: on one line, printable, not longer than `longest` characters."""
    whole = str(text)
    return printable(whole[:longest]) + (" ..." if len(whole) > longest else "")
