"""Actions that the processes of a run must take alike: fail together, and go on from the same beginnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from packlora.errors import InputError, shown
from packlora.parallel.alone import OneProcess

T = TypeVar("T")


def together(mesh: OneProcess, compute: Callable[[], T]) -> T:
    """Result of `compute`, once it has returned on every process.

    Raises:
        InputError: it found bad input on a process; on all of them, with the same words.
    """
    error, out = None, None
    try:
        out = compute()
    except InputError as found:
        error = found
    told = mesh.gather(None if error is None else str(error))
    said = {text: rank for rank, text in reversed(list(enumerate(told))) if text is not None}
    if not said:
        return out  # type: ignore[return-value]
    text, rank = min(said.items(), key=lambda item: item[1])
    everywhere = len(said) == 1 and None not in told
    raise InputError(text if everywhere else f"process {rank} of {mesh.size}: {text}") from None


def same(mesh: OneProcess, found: Mapping[str, str]) -> None:
    """Make sure that every process found the same.

    Args:
        found: by what it is, its value in a word.

    Raises:
        InputError: a process differs from process 0; on all of them.
    """
    all_found = mesh.gather(dict(found))
    for what, first in all_found[0].items():
        for rank, own in enumerate(all_found):
            if own.get(what) != first:
                raise InputError(
                    f"the processes of a run must have the same {what}: process 0 has {shown(first)}, process {rank} has "
                    f"{shown(own.get(what))}"
                )
