"""Files with a JSON value a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packlora.data.rows import How
from packlora.data.values import parse_json
from packlora.errors import InputError


def rows(file: Path, job: str, how: How) -> Iterator[tuple[str, Any]]:
    """JSON values, each with its line. Empty lines are passed over."""
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{file}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                value = parse_json(line, _at(job, where)) if line else None
            except UnicodeDecodeError as error:
                line, value = "?", InputError(f"job {job!r}: {where}: not UTF-8 text: {error}")
            except InputError as error:
                value = error
            if line:
                yield where, value


def _at(job: str, where: str) -> Callable[[str, int | None], InputError]:
    """Makes the errors of one line of a file."""
    return lambda text, _: InputError(f"job {job!r}: {where}: {text}")
