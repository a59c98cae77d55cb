"""Rows of a benchmark that is under way, in a file beside its results: a run that is ended loses one case at most."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from packlora.errors import InputError
from packlora.files import write_json
from packlora.runtime.record import source_commit

Row = dict[str, Any]


class Labelled(Protocol):
    @property
    def label(self) -> str: ...


Case = TypeVar("Case", bound=Labelled)


class Progress:
    """Of one run.

    Args:
        out: the results file.
        asked: what must be the same for rows to belong together: name, device, options.
        resume: go on with the rows that an earlier run left, but for those of cases where a contender failed; otherwise they
            are written over.
        seconds: once so many have passed no further case begins; the first always does.

    Raises:
        InputError: the file of the earlier run cannot be read, or it was asked for something else.
    """

    def __init__(self, out: Path, asked: Row, resume: bool, seconds: float | None = None) -> None:
        self.path, self.asked = out.with_name(f"{out.stem}.part.json"), asked
        self.ends = None if seconds is None else time.monotonic() + seconds
        self.left: list[str] = []  # cases that did not begin
        self.began = False
        self.rows: dict[str, Row] = self._earlier() if resume and self.path.exists() else {}

    def _earlier(self) -> dict[str, Row]:
        try:
            file = json.loads(self.path.read_text())
            asked, origin = file["asked"], {"commit": file["commit"], "date": file["date"]}
            rows = {row["case"]: {"measured": origin, **row} for row in file["rows"] if not row["failed"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"resume: cannot go on with {self.path}: {error!r}; remove it to begin anew") from None
        if asked != self.asked:
            raise InputError(f"resume: {self.path} is of {asked}, this is {self.asked}; remove it to begin anew")
        return rows

    def each(self, cases: Sequence[Case], rows: list[Row]) -> Iterator[Case]:
        """The cases that are still to be measured. Whoever takes one adds its row to `rows` before taking the next; rows of the
        others are added here."""
        for case in cases:
            if case.label in self.rows:
                print(f"{case.label}: measured already", flush=True)
                rows.append(self.rows[case.label])
                continue
            if self.began and self.ends is not None and time.monotonic() >= self.ends:
                self.left.append(case.label)
                continue
            self.began = True
            yield case
            self.rows[case.label] = rows[-1]
            content = {"asked": self.asked, "commit": source_commit(), "date": datetime.now(UTC).date().isoformat()}
            write_json(self.path, {**content, "rows": list(self.rows.values())})

    def done(self) -> None:
        """The results are written: nothing of this run is left to go on with, unless its time was up."""
        if self.rows and not self.left:
            self.path.unlink(missing_ok=True)
