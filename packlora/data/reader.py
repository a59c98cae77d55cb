"""Reads the rows of jobs, those of several jobs with one path once. It imports neither torch nor transformers."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from packlora.config import DataSource, JobConfig
from packlora.data.readers import Read, read_data
from packlora.given import given
from packlora.terminal import Told, silent


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that were read from a source. source: what it is, as JSON. stamp: of the file before that, None where it is no
    single file."""

    source: str
    read: Read
    stamp: tuple[int, ...] | None


class Reader:
    """Keeps what was read, by source."""

    def __init__(self, told: Told = silent) -> None:
        self.told = told
        self._known: dict[tuple[str, str, bool, bool], Rows] = {}

    def rows(self, job: JobConfig) -> list[Rows]:
        """Rows of each of a job's sources; none of those that are read in training, and none of prompts without answers."""
        return (
            []
            if job.data.streaming or job.rollout is not None
            else [self._rows(source, job) for source in job.data.train_sources]
        )

    def forget(self) -> None:
        """Let go of all rows."""
        self._known.clear()

    def held_out(self, job: JobConfig) -> list[Rows]:
        return [] if job.rollout is not None else [self._rows(source, job) for source in job.data.eval_sources]

    def _rows(self, source: DataSource, job: JobConfig) -> Rows:
        fields, pairs = job.train.reads_fields, job.train.declared.rows == "pairs"
        path, named = source.path, source.model_dump_json(exclude={"weight"})
        key = named, job.data.on_bad_row, fields, pairs
        if key not in self._known:
            stamp: tuple[int, ...] | None = (0,) if path in given().rows else None
            with contextlib.suppress(OSError):  # read_data says what is wrong
                found = os.stat(path)
                stamp = (found.st_mtime_ns, found.st_size, found.st_ino) if os.path.isfile(path) else None
            read = read_data(source, job.name, self.told, job.data.on_bad_row, fields, pairs)
            self._known[key] = Rows(named, read, stamp)
        return self._known[key]
