"""Files of comma-separated values, whose first line names the columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packlora.data.rows import How
from packlora.errors import InputError, quoted

MOST_CHARACTERS = 2**30
"""Characters of the largest cell."""

LABELS = {"true": True, "false": False}
"""Labels of judged completions, as texts. A column that holds another field, or one beside no completion, stays a text."""


def rows(file: Path, job: str, how: How) -> Iterator[tuple[str, Any]]:
    """Rows as mappings, each with its line. An empty cell is none, but for an empty prompt or completion."""
    csv.field_size_limit(MOST_CHARACTERS)  # of the process: it stays, since several files may be read by turns
    label = how.columns.get("label", "label")
    kept = {how.columns.get(key, key) for key in ("prompt", "completion")}
    there = {*kept, *how.columns.values()}
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, strict=True)
            names = next(reader, [])
            if len(set(names)) != len(names) or not all(names):
                raise InputError(
                    f"job {job!r}: {file}, line 1: a .csv file begins with the names of its columns, each once; "
                    + _odd_name(names)
                )
            others = {column for key, column in how.columns.items() if key != "label"}
            judged = label not in others and any(how.columns.get(key, key) in names for key in ("completion", "output"))
            start = reader.line_num + 1
            for cells in reader:
                where, start = f"{file}, line {start}", reader.line_num + 1
                if cells and len(cells) != len(names):
                    text = f"{len(cells)} cells, but there are {len(names)} columns"
                    yield where, InputError(f"job {job!r}: {where}: {text}")
                elif cells:
                    row: dict[str, Any] = dict(zip(names, cells, strict=True))
                    row = {k: text or (text if k in kept else None) for k, text in row.items() if text or k in there}
                    if judged and str(row.get(label)).lower() in LABELS:
                        row[label] = LABELS[row[label].lower()]
                    yield where, row
    except csv.Error as error:
        raise InputError(f"job {job!r}: cannot read {file} as csv, near line {reader.line_num}: {error}") from None


def _odd_name(names: list[str]) -> str:
    """Text of what is wrong with the names of columns."""
    if not all(names):
        return f"column {names.index('') + 1} has none (pandas writes its index so, unless index=False)"
    return f"{quoted(next(name for name in names if names.count(name) > 1))} stands twice"
