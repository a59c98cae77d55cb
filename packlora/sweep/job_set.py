"""Jobs of a run in which some have joined or left, or do so as a session begins: by the changes that run.json records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packlora.changes import JobSet, new_jobs, whole_run
from packlora.config import Run
from packlora.data.dataset import configured_steps
from packlora.errors import InputError
from packlora.parallel.layout import Layout
from packlora.runtime import restoring
from packlora.runtime.job import Job
from packlora.runtime.resume import SavedRun
from packlora.runtime.windows import last_round, slowest, window_of
from packlora.sweep.candidates import Sweep, begun
from packlora.sweep.changes import Change, check_folders, joined_rounds, leaves, place
from packlora.sweep.open_members import OpenMembers

CLOSED = (
    "output_dir {}: jobs have joined this run or left it while it trained, or are to do so now, which one process can do, or "
    "pipelines that share all jobs (parallel.pipeline); this run goes on there"
)


class ChangedJobSet(JobSet):
    """See JobSet. A run that begins has the first candidates of its sweep.

    Raises:
        InputError: a candidate would not be a job, or a job has the name of one.
    """

    def __init__(self, run: Run, saved: SavedRun | None) -> None:
        self.saved = saved
        self.new: list[str] = []
        """Jobs that the run file has in addition to those of the run that it continues."""
        self.changes: list[Change] = []
        if saved is None:
            run, self.changes = begun(run)
        else:
            run, self.new, self.changes = whole_run(run, saved), new_jobs(run, saved), list(saved.changes)
            if self.new and run.sweep is not None:
                Sweep(run).refuse_names(self.new)
        super().__init__(run)
        self.left: Mapping[str, Change] = leaves(self.changes)
        self.budgets = {change.join.name: change.budget for change in self.changes if change.join and change.budget}

    def check_layout(self, layout: Layout, processes: int) -> None:
        if self.run.sweep is not None:
            raise InputError(
                "sweep: candidates join and leave pipelines that share all jobs, but parallel.devices_per_job is "
                f"{layout.devices_per_job}; set it to {processes}"
            )
        raise InputError(CLOSED.format(Path(self.run.output_dir)))

    def gone(self, starts: Mapping[str, int]) -> dict[str, str]:
        """Jobs that have left before the window with which a run goes on, and why: they have ended, and nothing is left to be
        done for them."""
        if self.saved is None:
            return {}
        joined, ended, first, folder = joined_rounds(self.changes), [], 2**40, Path(self.run.output_dir)
        for job in self.run.trained:
            known = self.saved.jobs.get(job.name)
            steps = configured_steps(job.train, known.samples) if known is not None else 1
            status, step, _ = restoring.standing(folder / job.name, job.name, self.saved.id, steps)
            if job.name in starts or status == "stopped":
                first = min(first, joined.get(job.name, 0) + starts.get(job.name, step))
            elif job.name in self.left:
                ended.append(job.name)
        begins = window_of(self.run, first).start
        gone = {name: self.left[name].reason for name in ended if self.left[name].round <= begins}
        if len(gone) == len(self.run.trained):  # one has to be there
            gone.popitem()
        return gone

    def place(self, jobs: Sequence[Job], budget: int) -> list[dict[str, Any]]:
        """Let restored jobs stand in their rounds, and new ones begin in the window that the others go on with."""
        place(jobs, self.changes)
        known = [job for job in jobs if job.name not in self.new]
        check_folders([job.config for job in jobs if job.name in self.new], known, self.run)
        running = [job for job in known if job.status == "running"]
        round_ = window_of(self.run, slowest(running)).start if running else window_of(self.run, last_round(known)).stop
        for job in jobs:
            if job.name in self.new:
                job.joined = round_
                self.changes.append(Change(round=round_, by="run file", join=job.config, budget=budget))
        return [change.record() for change in self.changes]

    def open(self, output_dir: Path, group: Any, **parts: Any) -> OpenMembers:
        return OpenMembers(self.changes, output_dir=output_dir, group=group, **parts)
