"""Read rows from jsonl, json, parquet or a Hugging Face data set, each with the place it came from.

Owns file formats and the check that a row is one of the three accepted kinds. What the text becomes is encode.py's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packlora.errors import InputError

FORMATS = "rows are {prompt, completion}, {messages} or {text}"


@dataclass(frozen=True, slots=True)
class Row:
    """One sample as text. Exactly one of the three kinds is filled."""

    where: str
    """File and line (or row number), for error messages."""
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    text: str | None = None


def read_rows(path: str, job: str) -> list[Row]:
    """All rows of a data file or data set, checked.

    Raises:
        InputError: the file is missing, empty, unreadable or malformed, or a row lacks the fields it needs; the message
            names the job, the file and the line.
    """
    file = Path(path)
    if file.is_dir():
        raise InputError(f"job {job!r}: data path {path} is a folder; give a .jsonl, .json or .parquet file")
    if is_file_name(path):
        rows = [_check(value, where, job) for where, value in _read_file(file, job)]
    else:
        rows = [_check(value, where, job) for where, value in _read_hub(path, job)]
    if not rows:
        raise InputError(f"job {job!r}: {path} has no rows")
    return rows


def is_file_name(path: str) -> bool:
    """Whether a data path means a file here, which may be missing, and not a data set of the hub."""
    return Path(path).exists() or Path(path).suffix in {".jsonl", ".json", ".parquet", ".txt", ".csv"}


def _read_file(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    if not file.exists():
        raise InputError(f"job {job!r}: the data file {file} does not exist")
    try:
        if file.suffix == ".jsonl":
            yield from _read_jsonl(file, job)
        elif file.suffix == ".json":
            yield from _read_json(file, job)
        elif file.suffix == ".parquet":
            yield from _read_parquet(file, job)
        else:
            raise InputError(f"job {job!r}: {file} ends in {file.suffix!r}; accepted are .jsonl, .json and .parquet")
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
                if line:
                    yield where, json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"job {job!r}: {where}: not valid JSON: {error.msg} (column {error.colno})") from None
            except UnicodeDecodeError as error:
                raise InputError(f"job {job!r}: {where}: not UTF-8 text: {error}") from None
            except ValueError as error:  # e.g. a number of thousands of digits
                raise InputError(f"job {job!r}: {where}: not valid JSON: {error}") from None


def _read_json(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise InputError(
            f"job {job!r}: {file}, line {error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
        ) from None
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise InputError(f"job {job!r}: {file}: not valid JSON: {error}") from None
    if not isinstance(rows, list):
        raise InputError(f"job {job!r}: {file} must hold a list of rows; found {type(rows).__name__}")
    for number, value in enumerate(rows, 1):
        yield f"{file}, row {number}", value


def _read_parquet(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowException as error:
        raise InputError(f"job {job!r}: cannot read {file} as parquet: {error}") from None
    for number, value in enumerate(table.to_pylist(), 1):
        yield f"{file}, row {number}", value


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
        yield f"{name}, row {number}", value


def _check(value: Any, where: str, job: str) -> Row:
    def bad(problem: str) -> InputError:
        return InputError(f"job {job!r}: {where}: {problem}; {FORMATS}")

    if not isinstance(value, dict):
        raise bad(f"a row must be a mapping, found {type(value).__name__}")
    has = {key for key in ("prompt", "completion", "messages", "text") if value.get(key) is not None}
    kinds = [kind for kind in ({"prompt", "completion"}, {"messages"}, {"text"}) if kind <= has]
    if len(kinds) != 1:
        found = ", ".join(map(str, value)) or "no fields"
        raise bad(f"found {found}" if not kinds else f"has fields of several kinds ({found})")
    if kinds[0] == {"messages"}:
        return Row(where, messages=_check_messages(value["messages"], bad))
    for key in kinds[0]:
        _check_text(value[key], repr(key), bad)
    if kinds[0] == {"text"}:
        return Row(where, text=value["text"])
    return Row(where, prompt=value["prompt"], completion=value["completion"])


def _check_messages(messages: Any, bad: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise bad("'messages' must be a list of at least one {role, content}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad(f"message {number} must be a mapping with a role and a content")
        _check_text(message.get("content"), f"the content of message {number} ({message['role']})", bad)
    return messages


def _check_text(value: Any, what: str, bad: Any) -> None:
    if not isinstance(value, str):
        raise bad(f"{what} must be a text, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell such a thing, e.g. "\\ud800"
        raise bad(f"{what} holds half of a surrogate pair at character {error.start + 1}") from None
