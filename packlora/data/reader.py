"""Reads the rows of jobs, those of several jobs with one path once. It imports neither torch nor transformers."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from packlora.config import JobConfig
from packlora.data.readers import Read, read_data
from packlora.terminal import Told, silent


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that were read under a path. stamp: of the file before that, None where it is no single file."""

    path: str
    read: Read
    stamp: tuple[int, ...] | None


class Reader:
    """Keeps what was read, by path."""

    def __init__(self, told: Told = silent) -> None:
        self.told = told
        self._known: dict[tuple[str, str, bool], Rows] = {}

    def rows(self, job: JobConfig) -> list[Rows]:
        """Rows of each of a job's sources; none of those that are read in training."""
        return [] if job.data.streaming else [self._rows(path, job) for path, _ in job.data.sources]

    def forget(self) -> None:
        """Let go of all rows."""
        self._known.clear()

    def held_out(self, job: JobConfig) -> list[Rows]:
        return [self._rows(path, job) for path in job.data.eval_paths]

    def _rows(self, path: str, job: JobConfig) -> Rows:
        fields = job.train.objective is not None
        key = path, job.data.on_bad_row, fields
        if key not in self._known:
            stamp = None
            with contextlib.suppress(OSError):  # read_data says what is wrong
                found = os.stat(path)
                stamp = (found.st_mtime_ns, found.st_size, found.st_ino) if os.path.isfile(path) else None
            self._known[key] = Rows(path, read_data(path, job.name, self.told, job.data.on_bad_row, fields), stamp)
        return self._known[key]
