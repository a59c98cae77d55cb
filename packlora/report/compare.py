"""Page of several runs side by side: a table of the runs, and the jobs of all of them in the same curves and one table.

A job is named RUN / JOB there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from packlora.report.cells import UNKNOWN, badge, duration, row, short, size, table
from packlora.report.follow import Line
from packlora.report.run_files import FollowedRun, JobFiles, RunFiles
from packlora.report.sections import base_of, figures, job_table, legend
from packlora.report.series import PageData

COLUMNS = ("Base model", "Jobs", "Steps", "Tokens", "Tokens per second", "Wall time", "Peak memory", "Status")


@dataclasses.dataclass
class SeveralRuns(RunFiles):
    """Jobs of several runs, as if they were of one. runs: with the names that they have on the page."""

    runs: Sequence[tuple[str, RunFiles]] = ()

    @property
    def status(self) -> str:
        """Running while any run is."""
        return next((run.status for _, run in self.runs if run.status in ("running", "waiting")), "done")

    def status_of(self, job: JobFiles) -> str:
        run, own = self._owners[job.name]
        return run.status_of(own)

    @functools.cached_property
    def ends(self) -> dict[str, str]:
        return {name: run.ends[own.name] for name, (run, own) in self._owners.items() if own.name in run.ends}

    def __post_init__(self) -> None:
        self._owners: dict[str, tuple[RunFiles, JobFiles]] = {}
        for name, run in self.runs:
            for own in run.jobs:
                job = dataclasses.replace(own, name=f"{name} / {own.name}", style=f"job-{len(self.jobs)}")
                self._owners[job.name] = run, own
                self.jobs.append(job)


class SeveralData:
    """Numbers of several runs for their page; it has the functions of PageData."""

    def __init__(self, folders: Sequence[Path]) -> None:
        names = [folder.resolve().name for folder in folders]
        alike = len(set(names)) < len(names)
        self.names = [str(folder) if alike else name for folder, name in zip(folders, names, strict=True)]
        self._runs = [PageData(FollowedRun(folder)) for folder in folders]
        self.look = 0
        self.files = self._files()

    def _files(self) -> SeveralRuns:
        runs = [(name, run.files) for name, run in zip(self.names, self._runs, strict=True)]
        return SeveralRuns(Path(), {}, [], [], [], runs=runs)

    def follow(self) -> bool:
        """Read on. Whether anything is new."""
        changed = [run.follow() for run in self._runs]
        if not any(changed):
            return False
        self.look += 1
        self.files = self._files()
        return True

    def numbers(self) -> Line:
        """All numbers of the page."""
        jobs = [job for run in self._runs for job in run.numbers()["jobs"]]
        named = [{**job, "name": own.name, "style": own.style} for job, own in zip(jobs, self.files.jobs, strict=True)]
        return {
            "look": self.look, "status": self.files.status, "jobs": named, "machine": None, "ranks": 1, "several": True,
        }  # fmt: skip


def parts(runs: SeveralRuns) -> dict[str, str]:
    """HTML of the page by the name of its place."""
    names = ", ".join(name for name, _ in runs.runs)
    rows = [_row(number, name, run) for number, (name, run) in enumerate(runs.runs, 1)]
    return {
        "title": f"{names} · packlora",
        "header": f'<header><p class="over">packlora runs side by side</p><h1>{escape(names)}</h1></header>',
        "tiles": f"<section><h2>Runs</h2>{table(('Run', *COLUMNS), rows)}</section>",
        "legend": legend(runs),
        "jobs": job_table(runs),
    }


def _row(number: int, name: str, run: RunFiles) -> str:
    known = figures(run)
    cells: list[tuple[str, Any]] = [
        (escape(base_of(run)) or UNKNOWN, base_of(run)),
        (str(len(run.jobs)), len(run.jobs)),
        (f"{known.steps:,}" + (f" / {known.total:,}" if known.total else ""), known.steps),
        (short(known.tokens), known.tokens),
        (f"{known.rate:,.0f}" if known.seconds else UNKNOWN, known.rate),
        (duration(known.seconds) if known.seconds else UNKNOWN, known.seconds),
        (size(known.peak) if known.peak else UNKNOWN, known.peak),
        (
            badge(run.status) + (f"<small>{duration(known.left)} left</small>" if known.left is not None else ""),
            run.status,
        ),
    ]
    return row(COLUMNS, f"<a href='{number}/'>{escape(name)}</a>", name, cells)
