"""Changes of a run while it trains, as run.json records them: which jobs have joined and left, and in which round.

A round is one global batch of every job (schedule/types.py). Changes are made between two windows, so a window holds the same
jobs from its first round to its last. A resumed run makes the windows of an uninterrupted one of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from packlora.changes import new_jobs
from packlora.config import JobConfig, Run
from packlora.errors import InputError
from packlora.runtime.job import Job
from packlora.runtime.resume import SavedRun

START = "start"
"""Folder in that of a job which holds the adapter that it was begun with, where packlora clone was to keep the weights."""


class Change(BaseModel):
    """One job joins, or leaves.

    Args:
        round: of the first global batch of a job that joins; from which on a job that leaves has none.
        by: what asked for it.
        join: the job, with the keys that were given.
        budget: of a job that joins, tokens of its longest sample that was allowed.
        leave: the job's name.
        step: optimizer steps of a job that leaves, its last one included.
        reason: why it leaves before its last step; empty where it was at its end.
        request: of packlora add, stop and clone.
        parameters: of a sweep's candidate.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    round: int = Field(ge=0, le=2**40)
    by: Literal["request", "run file", "sweep"]
    join: JobConfig | None = None
    budget: int = 0
    leave: str | None = None
    step: int = 0
    reason: str = ""
    request: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """For run.json: what there is to say; of a job the keys that were given."""
        found = self.model_dump(mode="json", exclude_unset=True)
        return {key: value for key, value in found.items() if key == "round" or value not in (None, "", 0, {})}


class _Changes(BaseModel):
    """The changes of a run.json."""

    changes: list[Change]


def with_changes(saved: SavedRun, folder: Path) -> SavedRun:
    """The run of a run.json with its changes read, and with the adapters that clones began with in its folder, which may have
    been moved since. Raises pydantic.ValidationError."""
    saved.changes = _Changes.model_validate_json(json.dumps({"changes": saved.changes})).changes
    joined = [change.join for change in saved.changes if change.join is not None and change.request is not None]
    clones = {job.name for job in joined}

    for job in [*joined, *(job for job in saved.config.jobs if job.name in clones)]:
        start, reference = (
            None if path is None else Path(path) for path in (job.adapter.init_from, job.train.reference)
        )
        if start is None or start.parts[-2:] != (job.name, START):
            continue
        job.adapter.init_from = str((folder / job.name / START).absolute())
        if reference is not None and reference.name == START and reference.parent.parent == start.parent.parent:
            job.train.reference = str((folder / reference.parent.name / START).absolute())
    return saved


def whole_run(run: Run, saved: SavedRun) -> Run:
    """A run file that continues a run, with the jobs that have joined since it began, in the order of the run."""
    given = {job.name: job for job in run.jobs}
    joined = {change.join.name: change.join for change in saved.changes if change.join is not None}
    known = [job.name for job in saved.config.jobs]
    if [name for name in given if name in known] != [name for name in known if name in given]:
        return run  # in another order, which is refused by whoever compares the two
    found = {**joined, **given}
    return with_jobs(run, [found[name] for name in [*known, *new_jobs(run, saved)] if name in found])


def with_jobs(run: Run, jobs: Sequence[JobConfig]) -> Run:
    """A run with these jobs in the place of its own.

    Raises:
        InputError: two of them have one name, ignoring case.
    """
    copy = run.model_copy()
    try:
        copy.jobs = list(jobs)
    except ValidationError as error:
        raise InputError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None
    return copy


def joined_rounds(changes: Sequence[Change]) -> dict[str, int]:
    """The rounds of jobs that were not there from the beginning, by name."""
    return {change.join.name: change.round for change in changes if change.join is not None}


def leaves(changes: Sequence[Change]) -> Mapping[str, Change]:
    """How jobs have left, by name."""
    return {change.leave: change for change in changes if change.leave is not None}


def check_folders(new: Sequence[JobConfig], jobs: Iterable[Job], run: Run) -> None:
    """Raises InputError where a new job reads the folder of a job that still trains and will write another adapter there, or
    a checkpoint that it will remove: the run could not be resumed before the new job has a checkpoint of its own."""
    for job in new:
        for folder in filter(None, (job.adapter.init_from, job.reference_adapter)):
            path = Path(os.path.abspath(folder))
            for other in jobs:
                own = Path(os.path.abspath(Path(run.output_dir) / other.name))
                goes = path == own or (path.parent == own and path.name != START and run.save_total_limit is not None)
                if goes and other.status == "running":
                    raise InputError(
                        f"job {job.name!r}: {folder} is of job {other.name!r}, which still trains in this run and will not "
                        "leave it as it is; copy it to another place, or add the job when the other one has ended"
                    )


def place(jobs: Sequence[Job], changes: Sequence[Change]) -> None:
    """Let restored jobs stand in their rounds. One that was asked to leave ends at the step at which it was asked."""
    rounds, left = joined_rounds(changes), leaves(changes)
    for job in jobs:
        job.joined = rounds.get(job.name, 0)
        if job.name in left:
            change = left[job.name]
            job.left = change.round
            if change.reason and job.status == "running" and job.stopped is None:
                job.stop(change.reason, change.step)


def off(jobs: Sequence[Job], given: int) -> list[Job]:
    """Jobs that have ended and left before round `given`."""
    return [job for job in jobs if job.left is not None and job.left <= given and job.status != "running"]
