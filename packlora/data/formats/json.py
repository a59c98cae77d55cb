"""Files with one list of JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packlora.data.rows import How
from packlora.data.values import parse_json
from packlora.errors import InputError, kind_of

WHOLE = True
"""The file is read whole, so it cannot be streamed."""


def rows(file: Path, job: str, how: How) -> Iterator[tuple[str, Any]]:
    """Values of the list, each with its number."""

    def bad(text: str, line: int | None) -> InputError:
        return InputError(f"job {job!r}: {file}" + (f", line {line}" if line else "") + f": {text}")

    values = parse_json(file.read_text(encoding="utf-8-sig"), bad)
    if not isinstance(values, list):
        raise InputError(f"job {job!r}: {file} must hold a list of rows; found {kind_of(values)}")
    for number, value in enumerate(values, 1):
        yield f"{file}, row {number}", value
