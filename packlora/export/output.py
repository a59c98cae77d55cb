"""Output of `packlora merge` and `packlora export`: where it goes, and in which dtype."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from packlora.errors import InputError, WriteError, unwritten

DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_output(out: Path, dtype: str, is_file: bool = False) -> None:
    """Raises InputError where something is at the place of what is to be written, or the dtype is none that is written.

    Args:
        is_file: a file is written, and no folder, which may be there and empty.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if is_file and os.path.lexists(out):
        raise InputError(f"{out} exists; choose another name for the file")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty; choose another folder")


@contextmanager
def written(out: Path) -> Iterator[Path]:
    """The path to write to: a link stays, and what it leads to is written. Raises InputError or WriteError where writing
    fails."""
    try:
        target = Path(os.path.realpath(out))
        target.parent.mkdir(parents=True, exist_ok=True)
        yield target
    except (OSError, SafetensorError) as error:
        if reason := unwritten(error):
            raise WriteError(f"cannot write {out}: {reason}") from None
        raise InputError(f"cannot write {out}: {error}") from None
