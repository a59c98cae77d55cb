"""Changes of a run's jobs while it trains: what the rooms know of them, and the plug-in for all else.

Jobs join and leave between two windows of microbatches: as packlora add, stop and clone ask for it, as a sweep decides, or
because the file of a run that is continued has more of them. The plug-in (sweep/) is imported by its name where this is so.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLUGIN = "packlora.sweep"
FOLDER, REQUEST = "control", "request-"
"""Folder of an output folder to which requests are written, and how the names of their files begin."""
SHOWN = "sweep.json"
"""File of an output folder of which the plug-in makes a section of the page and a table."""


def plugin(module: str) -> Any:
    """A module of the plug-in, imported now."""
    return importlib.import_module(f"{PLUGIN}.{module}")


def is_asked(output_dir: Path) -> bool:
    """Whether a request to a run may be there."""
    folder = output_dir / FOLDER
    with contextlib.suppress(OSError):
        return not folder.is_symlink() and any(name.startswith(REQUEST) for name in os.listdir(folder))
    return False


def shown_of(output_dir: Path) -> Any:
    """Sections that the plug-in makes of an output folder (sweep/page.py); None where it has nothing to show."""
    return plugin("page") if (output_dir / SHOWN).exists() else None


# --- before a session, and as it begins ------------------------------------------------------------------------------------


def check(run: Any, processes: int, max_steps: int | None) -> None:
    """Raises InputError where jobs that are compared cannot join and leave: on so many processes, or with at most so many
    steps."""
    if run.compares:
        plugin("checks").check(run, processes, max_steps)


def check_prepared(prepared: Any, resumed: bool) -> None:
    """Raises InputError where jobs cannot be compared or, of a run that begins, later ones cannot all be trained. prepared: the
    run, which gets notes."""
    if prepared.run.compares:
        plugin("checks").check_prepared(prepared, resumed)


class JobSet:
    """Jobs of a run as a session begins: here those of its file, from its first round to their last steps.

    run: with all of its jobs, also those that have left. left: names of these. budgets: of jobs that have joined a run whose
    token budget is its own choice, the most tokens of a sample.
    """

    left: Collection[str] = ()
    budgets: Mapping[str, int] = {}

    def __init__(self, run: Any) -> None:
        self.run = run

    def check_layout(self, layout: Any, processes: int) -> None:
        """Raises InputError where jobs would have to join or leave on processes that do not share all of them."""

    def gone(self, starts: Mapping[str, int]) -> dict[str, str]:
        """Jobs that are not needed any more, and why. starts: steps that jobs are sent back to."""
        return {}

    def place(self, jobs: Sequence[Any], budget: int) -> list[dict[str, Any]]:
        """Let restored jobs stand in their rounds. Returns the changes for run.json.

        Args:
            jobs: of this process.
            budget: most tokens of a sample of a job that joins now, where the token budget is the run's own choice; else 0.
        """
        return []

    def open(self, output_dir: Path, group: Any, **parts: Any) -> Changes:
        """Changes of a run whose jobs may change. parts: of the run, more arguments of sweep/open_members.py, OpenMembers."""
        parts |= {"output_dir": output_dir, "group": group}
        return UntilAsked(lambda: plugin("open_members").OpenMembers([], **parts), output_dir, group)


def job_set(run: Any, saved: Any) -> JobSet:
    """Jobs of a run, by its file and by what run.json says of a run that is continued, or None. Raises InputError."""
    if not run.compares and (saved is None or _is_as_begun(run, saved)):
        return JobSet(run if saved is None else whole_run(run, saved))
    found: JobSet = plugin("job_set").ChangedJobSet(run, saved)
    return found


def whole_run(run: Any, saved: Any) -> Any:
    """A run file that continues a run, with the jobs that have joined since it began. Jobs to which the file gives no learning
    rate keep the one that run.json records: their trainer's default was another one in earlier versions."""
    found = run if _is_as_begun(run, saved) else plugin("changes").whole_run(run, saved)
    begun_with = {job.name: job.train.learning_rate for job in saved.config.jobs}
    kept = [_at_rate(job, begun_with.get(job.name, job.train.learning_rate)) for job in found.jobs]
    return found.model_copy(update={"jobs": kept})


def _at_rate(job: Any, rate: float) -> Any:
    if "learning_rate" in job.train.model_fields_set or job.train.learning_rate == rate:
        return job
    return job.model_copy(update={"train": job.train.model_copy(update={"learning_rate": rate})})


def new_jobs(run: Any, saved: Any) -> list[str]:
    """Names of the jobs that a run file has in addition to those of the run that it continues."""
    known = {job.name for job in saved.config.jobs}
    return [job.name for job in run.jobs if job.name not in known]


def _is_as_begun(run: Any, saved: Any) -> bool:
    return not (saved.changes or new_jobs(run, saved))


# --- in the loop ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Changed:
    """Changes that were made between two windows. left: jobs that leave. told: events."""

    left: list[Any] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)


class Changes:
    """Changes of jobs (runtime/job.py) in the training loop: here of a run that keeps its jobs. All processes that train the
    jobs ask the same."""

    def first(self, jobs: Sequence[Any]) -> int | None:
        """The round of which an interrupted run has yet to decide who joins and leaves before it; None where there is none."""
        return None

    def pending(self, round_: int, jobs: Sequence[Any]) -> bool:
        """Whether jobs may have to join or leave before a round."""
        return False

    def change(self, round_: int, jobs: list[Any], budget: Any) -> Changed | None:
        """Let jobs join and leave before a round.

        Args:
            jobs: that are on the model; those that join are added.
            budget: of tokens, engine/memory.py.

        Returns:
            What was changed; None where nothing was, and no job is to be taken off.

        Raises:
            WriteError: what a sweep has decided cannot be recorded; it was not made. A request that cannot be met or recorded
                is refused, and costs the run nothing.
            MemoryError: there is no room for a sweep's next candidate, and no other job that is to leave.
        """
        return None

    def take_off(self, jobs: list[Any], round_: int) -> list[Any]:
        """Take jobs that have ended and left off the model, and out of `jobs`. Returns them."""
        return []

    def held_out(self, jobs: Sequence[Any], forwards: Any) -> Mapping[str, Sequence[Any]]:
        """Held-out samples of jobs, by name; one that is left out waits for what it generates, and takes no step meanwhile."""
        return {job.name: job.eval_samples for job in jobs}

    def judged(self, ends: Mapping[str, Any]) -> Mapping[str, Any]:
        """Select the results by which a run is done or has failed."""
        return ends

    def end(self, jobs: Sequence[Any], files: Any) -> None:
        """The session ends, with these jobs on the model. files: of the run, report/metrics.py, BestEffort."""


class UntilAsked(Changes):
    """Changes of a run that keeps its jobs until somebody asks for a change; from then on those of the plug-in.

    Args:
        make: makes these.
        group: processes that train the jobs (parallel/replicas.py); the first one looks for requests.
    """

    def __init__(self, make: Callable[[], Changes], output_dir: Path, group: Any) -> None:
        self._make, self._output_dir, self._group = make, output_dir, group
        self._now, self._is_made = Changes(), False

    def _finds(self) -> bool:
        return bool(self._group.leads and is_asked(self._output_dir))

    def _after(self, asked: bool) -> Changes:
        if asked:
            self._now, self._is_made = self._make(), True
        return self._now

    def _after_look(self) -> Changes:
        return self._after(not self._is_made and self._group.told(self._finds()))

    def pending(self, round_: int, jobs: Sequence[Any]) -> bool:
        return self._after_look().pending(round_, jobs)

    def change(self, round_: int, jobs: list[Any], budget: Any) -> Changed | None:
        return self._after_look().change(round_, jobs, budget)

    def take_off(self, jobs: list[Any], round_: int) -> list[Any]:
        return self._now.take_off(jobs, round_)

    def judged(self, ends: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._now.judged(ends)

    def end(self, jobs: Sequence[Any], files: Any) -> None:
        # what is asked is refused; no message to the others, as an error may have ended this process alone
        self._after(not self._is_made and self._finds()).end(jobs, files)
