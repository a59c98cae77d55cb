"""run.json, and what has changed since it was written: journal.jsonl, a line a change.

run.json grows with the number of jobs, so it is not written anew for each of their checkpoints (runtime/record.py). A line of
the journal names the edition of run.json that it goes with. Lines of another edition are in run.json already: a crash came
between the two files. A run that has ended by itself has no journal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packlora.files import whole_characters
from packlora.portable import flags, sync
from packlora.report.follow import Line

RECORD, JOURNAL = "run.json", "journal.jsonl"
EDITION = "edition"
LISTS, TABLES = ("warnings", "changes"), ("saved", "jobs", "fit")
"""Keys of run.json to which a line adds. "joined" adds to the jobs of its configuration; "budget" is that of its schedule."""


class DamagedLine(ValueError):
    """A line of the journal is not what was written. The message says which."""


# --- what a line says --------------------------------------------------------------------------------------------------


def fold(record: dict[str, Any], line: Mapping[str, Any]) -> None:
    """Apply a line of the journal to the content of run.json."""
    for key in LISTS:
        record[key] += line.get(key, ())
    for key in TABLES:
        record[key] = record.get(key, {}) | line.get(key, {})
    record["config"]["jobs"] += line.get("joined", ())
    if "budget" in line:
        record["schedule"]["budget"] = line["budget"]


def merged(line: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two lines of the journal, which follow one another, into one."""
    out = {**line, **more}
    for key in line.keys() & more.keys():
        if isinstance(line[key], list):
            out[key] = [*line[key], *more[key]]
        elif isinstance(line[key], dict):
            out[key] = {**line[key], **more[key]}
    return out


def copied(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record that can be folded without a change of the first."""
    config, schedule = record["config"], record["schedule"]
    own = {key: [*record[key]] for key in LISTS} | {key: {**record.get(key, {})} for key in TABLES}
    return {**record, **own, "config": {**config, "jobs": [*config["jobs"]]}, "schedule": {**schedule}}


# --- files -------------------------------------------------------------------------------------------------------------


class Journal:
    """Appends to a journal. Each line is on the disk before `append` returns, or nothing of it counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: Mapping[str, Any]) -> None:
        """Raises OSError; ValueError for a number that JSON does not have."""
        data = (whole_characters(json.dumps(line, ensure_ascii=False, allow_nan=False)) + "\n").encode()
        how = flags("O_WRONLY", "O_APPEND", "O_CREAT", "O_NOFOLLOW", "O_NONBLOCK")
        handle = os.open(self.path, how, 0o666)
        try:
            length = os.fstat(handle).st_size
            try:
                while data:
                    data = data[os.write(handle, data) :]
                os.fsync(handle)
                if not length:
                    sync(self.path.parent)
            except OSError:
                os.ftruncate(handle, length)
                raise
        finally:
            os.close(handle)


def lines_since(folder: Path, edition: int) -> list[Line]:
    """Journal lines since an edition of run.json was written. A last line without its end was never promised.

    Raises:
        DamagedLine: a line is not what was written.
        OSError: it cannot be read.
    """
    file = folder / JOURNAL
    if not file.is_file():
        return []
    out = []
    for number, text in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
            if line[EDITION] == edition:
                out.append(line)
        except (ValueError, RecursionError, TypeError, LookupError):
            raise DamagedLine(f"line {number} is damaged") from None
    return out


def read_record(folder: Path) -> dict[str, Any]:
    """Record of a run: run.json with the journal lines after it. Raises whatever reading JSON and taking values out of it may
    raise."""
    record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    for line in lines_since(folder, record.get(EDITION, 0)):
        fold(record, line)
    return record
