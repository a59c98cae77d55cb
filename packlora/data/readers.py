"""Read rows from jsonl, json, csv, parquet or a Hugging Face data set, each with the place it came from.

Owns file formats and which files a path means. What a row may be is rows.py's, what its text becomes encode.py's.
"""

from __future__ import annotations

import csv
import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packlora.data.rows import Row, check_row, parse_json
from packlora.errors import InputError
from packlora.terminal import Told, silent

FILE_KINDS = {".jsonl", ".json", ".csv", ".parquet"}
ACCEPTED = ".jsonl, .json, .csv and .parquet"
PARQUET_ROWS = 1024
"""Of a .parquet file that are in memory at once as Python's objects."""
MOST_CHARACTERS = 2**30
"""Of a cell of a .csv file."""
DATASET, SPLITS = "state.json", "dataset_dict.json"
"""Files that mark the folder of a saved Hugging Face data set, and of one with splits."""


@dataclass(slots=True)
class Read:
    """What was found under a data path."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the user should know: forms of other tools that were recognised."""
    skipped: list[str] = field(default_factory=list)
    """Rows that are no samples, each with its place and what is wrong with it."""


def read_rows(path: str, job: str, told: Told = silent) -> list[Row]:
    """As read_data, the rows alone; every row must be a sample."""
    return read_data(path, job, told).rows


def read_data(path: str, job: str, told: Told = silent, on_bad_row: str = "error") -> Read:
    """All rows that a data path means, checked.

    Args:
        path: of a file or a saved data set, a pattern of files, or the id of a Hugging Face data set.
        job: name for messages.
        told: hears how far it is.
        on_bad_row: skip: rows that are no samples are left out.

    Raises:
        InputError: a file is missing, empty, unreadable or malformed, or a row lacks the fields it needs; the message
            names the job, the file and the line.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise InputError(
            f"job {job!r}: data path {path} is an address; download the file and give the path of the copy, or give the id "
            "of a Hugging Face data set"
        )
    out = Read()
    for name in files_of(path, job):
        before = len(out.rows)
        for row in _rows(name, job):
            if isinstance(row, Row):
                out.rows.append(row)
            elif on_bad_row == "error":
                raise row
            else:
                out.skipped.append(str(row).removeprefix(f"job {job!r}: "))
            told(f"job {job}: reading {Path(name).name}, rows", len(out.rows))
        if len(out.rows) == before:  # also of files that hold nothing else than bad rows
            skipped = f" but {len(out.skipped)} that are no samples, the first: {out.skipped[0]}" if out.skipped else ""
            raise InputError(f"job {job!r}: {name} has no rows{skipped}")
        forms = {row.form for row in out.rows[before:]} - {None}
        out.notes += [f"job {job!r}: {name}: {form}" for form in sorted(str(form) for form in forms)]
    return out


def rows_of(path: str, job: str) -> Iterator[Row | InputError]:
    """Rows that a data path means, in order, one at a time, and in the place of a row that is no sample why.

    Raises:
        InputError: as read_data.
    """
    for name in files_of(path, job):
        if Path(name).suffix == ".json" and not os.path.isdir(name):
            raise InputError(f"job {job!r}: {name} is read whole, not row by row; write it as .jsonl to stream it")
        yield from _rows(name, job)


def _rows(name: str, job: str) -> Iterator[Row | InputError]:
    folder = (name if os.path.isdir(name) else os.path.dirname(name) or ".") if is_file_name(name) else None
    for where, value in _values(name, job):
        try:
            if isinstance(value, InputError):
                raise value
            row: Row | InputError = check_row(value, where, job, folder)
        except InputError as error:
            row = error
        yield row


def is_file_name(path: str) -> bool:
    """Whether a data path means files here, which may be missing, and not a data set of the hub."""
    return os.path.lexists(path) or _is_pattern(path) or Path(path).suffix in FILE_KINDS | {".txt"}


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


def _values(name: str, job: str) -> Iterator[tuple[str, Any]]:
    """What stands in a file or a data set, each row with its place; an InputError where a row cannot be read by itself."""
    if os.path.isdir(name):
        return _read_saved(Path(name), job)
    return _read_file(Path(name), job) if is_file_name(name) else _read_hub(name, job)


def _read_file(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    if not os.path.exists(file):
        raise InputError(f"job {job!r}: the data file {file} does not exist")
    if file.suffix not in FILE_KINDS:
        raise InputError(f"job {job!r}: {file} ends in {file.suffix!r}; accepted are {ACCEPTED}")
    if not os.path.isfile(file):
        raise InputError(f"job {job!r}: {file} is a pipe, a socket or a device; a data file is read more than once")
    try:
        if file.suffix == ".jsonl":
            yield from _read_jsonl(file, job)
        elif file.suffix == ".json":
            yield from _read_json(file, job)
        elif file.suffix == ".csv":
            yield from _read_csv(file, job)
        else:
            yield from _read_parquet(file, job)
    except OSError as error:
        raise InputError(f"job {job!r}: cannot read {file}: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"job {job!r}: {file} is not UTF-8 text: {error}") from None


def _read_jsonl(file: Path, job: str) -> Iterator[tuple[str, Any]]:
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


def _read_json(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    def bad(text: str, line: int | None) -> InputError:
        return InputError(f"job {job!r}: {file}" + (f", line {line}" if line else "") + f": {text}")

    rows = parse_json(file.read_text(encoding="utf-8-sig"), bad)
    if not isinstance(rows, list):
        raise InputError(f"job {job!r}: {file} must hold a list of rows; found {type(rows).__name__}")
    for number, value in enumerate(rows, 1):
        yield f"{file}, row {number}", value


def _read_csv(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    """The first line names the columns. An empty cell is none, but for an empty prompt or completion."""
    before = csv.field_size_limit(MOST_CHARACTERS)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, strict=True)
            names = next(reader, [])
            if len(set(names)) != len(names) or not all(names):
                raise InputError(
                    f"job {job!r}: {file}, line 1: a .csv file begins with the names of its columns, each once"
                )
            start = reader.line_num + 1
            for cells in reader:
                where, start = f"{file}, line {start}", reader.line_num + 1
                if len(cells) == len(names):
                    row = dict(zip(names, cells, strict=True))
                    yield where, {key: text for key, text in row.items() if text or key in ("prompt", "completion")}
                elif cells:
                    yield (
                        where,
                        InputError(f"job {job!r}: {where}: {len(cells)} cells, but there are {len(names)} columns"),
                    )
    except csv.Error as error:
        raise InputError(f"job {job!r}: cannot read {file} as csv, near line {reader.line_num}: {error}") from None
    finally:
        csv.field_size_limit(before)


def _read_parquet(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(PARQUET_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", _without_nulls(value)
    except pyarrow.ArrowException as error:
        raise InputError(f"job {job!r}: cannot read {file} as parquet: {error}") from None


def _read_saved(folder: Path, job: str) -> Iterator[tuple[str, Any]]:
    """A data set of Hugging Face's save_to_disk, of one with splits the split train."""
    if (folder / SPLITS).is_file():
        if not (folder / "train" / DATASET).is_file():
            found = ", ".join(sorted(file.parent.name for file in folder.glob(f"*/{DATASET}"))) or "none"
            raise InputError(
                f"job {job!r}: the data set {folder} has no split train (splits: {found}); give the folder of one"
            )
        folder = folder / "train"
    if not (folder / DATASET).is_file():
        raise InputError(
            f"job {job!r}: data path {folder} is a folder, and not one that Hugging Face's save_to_disk wrote; give a file "
            f"({ACCEPTED}), or a pattern such as {folder}/*.jsonl"
        )

    def bad(text: str, line: int | None = None) -> InputError:
        return InputError(f"job {job!r}: {folder / DATASET}: {text}")

    import pyarrow

    try:
        state = parse_json((folder / DATASET).read_text(encoding="utf-8"), bad)
        names = [part["filename"] for part in state["_data_files"]]
        columns, indices = state.get("_format_columns"), state.get("_indices_data_files")
        if indices or not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
            raise bad(
                "it does not name plain files beside it; save_to_disk the data set again, with flatten_indices() before"
            )
        number = 0
        for name in names:
            with pyarrow.OSFile(str(folder / name)) as file, pyarrow.ipc.open_stream(file) as stream:
                for batch in stream:
                    for value in (batch.select(columns) if columns else batch).to_pylist():
                        number += 1
                        yield f"{folder}, row {number}", _without_nulls(value)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise bad(f"it is not what save_to_disk writes ({type(error).__name__}: {error})") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"job {job!r}: cannot read the data set {folder}: {error}") from None


def _read_hub(name: str, job: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise InputError(
            f"job {job!r}: {name} is not a file here; to read it as a Hugging Face data set, "
            "install the extra: pip install 'packlora[datasets]'"
        ) from None
    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:  # the library raises many unrelated types for "not there"
        raise InputError(f"job {job!r}: {name} is neither a file nor a data set that loads: {error}") from None
    for number, value in enumerate(rows, 1):
        yield f"{name}, row {number}", _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    """A row of a table, in which every mapping has the keys of all others, with those gone that its file did not have."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
