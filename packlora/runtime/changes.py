"""Changes of a run while it trains, as run.json records them: which jobs have joined and left, and in which round.

A round is one global batch of every job (schedule/types.py). Changes are made between two windows, so a window holds the same
jobs from its first round to its last. A resumed run makes the windows of an uninterrupted one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from packlora.config import JobConfig, Run
from packlora.errors import InputError

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


class _Saved(Protocol):
    @property
    def config(self) -> Run: ...

    @property
    def changes(self) -> Sequence[Change]: ...


def whole_run(run: Run, saved: _Saved) -> tuple[Run, list[str]]:
    """A run file that continues a run, with the jobs that have joined since it began.

    Returns:
        It, its jobs in the order of the run; and the names of jobs that are new in the file.
    """
    given = {job.name: job for job in run.jobs}
    joined = {change.join.name: change.join for change in saved.changes if change.join is not None}
    known = [job.name for job in saved.config.jobs]
    if [name for name in given if name in known] != [name for name in known if name in given]:
        return run, []  # in another order, which is refused by whoever compares the two
    new = [name for name in given if name not in known]
    found = {**joined, **given}
    return with_jobs(run, [found[name] for name in [*known, *new] if name in found]), new


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


def trained(run: Run) -> list[JobConfig]:
    """The jobs of a run that are trained: not the one that a sweep's candidates are made from."""
    return [job for job in run.jobs if run.sweep is None or job.name != run.sweep.job]
