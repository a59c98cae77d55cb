"""Read rows from data files or a Hugging Face data set, each with the place it came from.

Owns which files a path means. Formats of files are in formats/, data sets in tables.py; what a row may be is rows.py's, what
its text becomes encode.py's.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packlora.config import DataSource
from packlora.data.formats import accepted, endings, is_whole, rows_of_file
from packlora.data.rows import How, Row, check_row, with_fields
from packlora.errors import InputError, counted, quoted
from packlora.given import MEMORY, given
from packlora.terminal import Told, silent


@dataclass(slots=True)
class Read:
    """Rows found under a data path, with notes."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes for the user: forms of other tools that were recognised."""
    skipped: list[str] = field(default_factory=list)
    """Rows that are no samples, each with its place and what is wrong with it."""


def read_rows(path: str, job: str, told: Told = silent) -> list[Row]:
    """Rows of read_data without its notes; raises InputError if any row is not a sample."""
    return read_data(path, job, told).rows


def read_data(
    path: str | DataSource,
    job: str,
    told: Told = silent,
    on_bad_row: str = "error",
    fields: bool = False,
    pairs: bool = False,
) -> Read:
    """Read and check all rows of a data path.

    Args:
        path: of a file or a saved data set, a pattern of files, or the id of a Hugging Face data set; or a source, which says
            how it is read as well.
        job: name for messages.
        told: hears how far it is.
        on_bad_row: skip: rows that are no samples are left out.
        fields: rows keep their other fields; of tables those that hold numbers.
        pairs: of a row that is a pair, and a conversation which repeats the chosen one, the pair is read.

    Raises:
        InputError: a file is missing, empty, unreadable or malformed, or a row lacks the fields it needs; the message
            names the job, the file and the line.
    """
    source = as_source(path)
    how = How(source.columns, fields, pairs, source.subset, source.split)
    path, most = source.path, source.max_samples
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise InputError(
            f"job {job!r}: data path {path} is an address; download the file and give the path of the copy, or give the id "
            "of a Hugging Face data set"
        )
    out = Read()
    for name in files_of(path, job):
        before = len(out.rows)
        if before == most:
            break
        for row in _rows(name, job, how):
            if isinstance(row, Row):
                out.rows.append(row)
            elif on_bad_row == "error":
                raise row
            else:
                out.skipped.append(str(row).removeprefix(f"job {job!r}: "))
            told(f"job {job}: reading {Path(name).name}, rows", len(out.rows))
            if len(out.rows) == most:
                break
        if len(out.rows) == before:  # also of files that hold nothing else than bad rows
            left = counted(len(out.skipped), "row", "were left out by on_bad_row")
            skipped = f": {left}, the first: {out.skipped[0]}" if out.skipped else ""
            raise InputError(f"job {job!r}: {name} has no rows{skipped}")
        forms = {row.form for row in out.rows[before:]} - {None}
        out.notes += [f"job {job!r}: {name}: {form}" for form in sorted(str(form) for form in forms)]
    return out


def as_source(path: str | DataSource) -> DataSource:
    """A path as a source that is read whole, without renaming."""
    return path if isinstance(path, DataSource) else DataSource.model_construct(path=path)


def rows_of(path: str | DataSource, job: str) -> Iterator[Row | InputError]:
    """Rows of a data path or a source, in order, one at a time; an InputError stands for a row that is no sample.

    Raises:
        InputError: as read_data.
    """
    source = as_source(path)
    left = source.max_samples
    for name in files_of(source.path, job):
        if Path(name).suffix in endings() and is_whole(Path(name)) and not os.path.isdir(name):
            raise InputError(f"job {job!r}: {name} is read whole, not row by row; write it as .jsonl to stream it")
        for row in _rows(name, job, How(source.columns, subset=source.subset, split=source.split)):
            if left == 0:
                return
            yield row
            left = left - 1 if left is not None and isinstance(row, Row) else left


def _rows(name: str, job: str, how: How) -> Iterator[Row | InputError]:
    folder = (name if os.path.isdir(name) else os.path.dirname(name) or ".") if is_file_name(name) else None
    folder = "." if name.startswith(MEMORY) else folder
    for where, value in values_of(name, job, how):
        try:
            if isinstance(value, InputError):
                raise value
            if how.columns:
                from packlora.data.foreign import renamed

                value = renamed(value, how.columns, f"job {job!r}: {where}")
            row: Row | InputError = check_row(value, where, job, folder, how.pairs)
            if how.fields and isinstance(row, Row):
                row = with_fields(row, value)
        except InputError as error:
            row = error
        yield row


def is_file_name(path: str) -> bool:
    """Whether a data path means files here, which may be missing, and not a data set of the hub."""
    return os.path.lexists(path) or _is_pattern(path) or Path(path).suffix in {*endings(), ".txt"}


def is_there(path: str) -> bool:
    """Whether the files that a data path means are there; what may be a data set of the hub is not looked for."""
    return (
        os.path.exists(path) or not is_file_name(path) or (_is_pattern(path) and bool(glob.glob(path, recursive=True)))
    )


def _is_pattern(path: str) -> bool:
    return glob.has_magic(path) and not os.path.lexists(path)


def files_of(path: str, job: str) -> list[str]:
    """The files, in the order of their names, or the one data set that a data path means; what is there may be no data."""
    if not _is_pattern(path):
        return [path]
    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise InputError(f"job {job!r}: no file matches the data path {path}")
    return found


def values_of(name: str, job: str, how: How) -> Iterator[tuple[str, Any]]:
    """Values of the rows of a file or a data set, each with its place; an InputError stands for a row that cannot be read."""
    is_here = is_file_name(name) or name.startswith(MEMORY)
    for key, asked in (("subset", how.subset), ("split", how.split if not os.path.isdir(name) else None)):
        if is_here and asked is not None:
            raise InputError(
                f"job {job!r}: data.{key} {quoted(asked)} is of a data set, and {name} has none; leave it out"
            )
    if name.startswith(MEMORY):
        return _given_values(name, job)
    if is_here and not os.path.isdir(name):
        return _read_file(Path(name), job, how)
    from packlora.data.tables import read_hub, read_saved

    return read_saved(Path(name), job, accepted(), how) if is_here else read_hub(name, job, how)


def _given_values(name: str, job: str) -> Iterator[tuple[str, Any]]:
    """Rows that a Python program has handed over."""
    found = given().rows.get(name)
    if found is None:
        raise InputError(
            f"job {job!r}: its rows were given in Python and are in no file ({name}); give them again, by packlora.Trainer"
        )
    yield from found.values


def _read_file(file: Path, job: str, how: How) -> Iterator[tuple[str, Any]]:
    if not os.path.exists(file):
        raise InputError(f"job {job!r}: the data file {file} does not exist")
    if file.suffix not in endings():
        raise InputError(f"job {job!r}: {file} ends in {file.suffix!r}; accepted are {accepted()}")
    if not os.path.isfile(file):
        raise InputError(f"job {job!r}: {file} is a pipe, a socket or a device; a data file is read more than once")
    try:
        yield from rows_of_file(file, job, how)
    except (OSError, EOFError) as error:
        raise InputError(f"job {job!r}: cannot read {file}: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"job {job!r}: {file} is not UTF-8 text: {error}") from None
