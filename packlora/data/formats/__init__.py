"""Formats of data files. Each is a module of this folder, which is found by the ending of the file's name.

A module has a function

    rows(file: Path, job: str, how: How) -> Iterator[tuple[str, Any]]

which gives the rows of a file in order, each with its place for messages ("FILE, line 3") and its value, a mapping of fields.
It yields an InputError in the place of a value that cannot be read by itself, and raises one where the file cannot be. The
caller turns an OSError, EOFError or UnicodeDecodeError into one. `WHOLE = True` says that the file is read whole, so that it
cannot be streamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from packlora.data.rows import How


def endings() -> list[str]:
    """Endings of the files that are read, with the dot."""
    return sorted("." + module.name for module in iter_modules(__path__))


def accepted() -> str:
    """The endings, for messages."""
    *most, last = endings()
    return f"{', '.join(most)} and {last}"


def is_whole(file: Path) -> bool:
    """Whether a file of a known format cannot be read row by row."""
    return getattr(import_module(f"{__name__}.{file.suffix[1:]}"), "WHOLE", False) is True


def rows_of_file(file: Path, job: str, how: How) -> Iterator[tuple[str, Any]]:
    """Rows of a file of a known format, see above."""
    return import_module(f"{__name__}.{file.suffix[1:]}").rows(file, job, how)  # type: ignore[no-any-return]
