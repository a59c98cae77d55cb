"""The windows that a run trains on: planned (schedule/) as they are asked for, and told to subscribers.

A job takes part from the round in which it joins to the one in which it leaves, both at borders of windows; see
packlora/changes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from packlora.base.device import choose_device
from packlora.changes import Changes
from packlora.config import Run
from packlora.events import Note, WindowPlanned
from packlora.parallel.alone import Alone
from packlora.runtime.events import Emitter
from packlora.runtime.flow import Flow
from packlora.runtime.job import Job
from packlora.runtime.profiles import Profile
from packlora.schedule.planner import WINDOW_ROUNDS, Planner
from packlora.schedule.types import Window

WINDOW = TypeAdapter(Window)
"""Form in which windows travel between processes that train them; decoding an encoded one gives an equal one."""


@dataclass(slots=True)
class Plan:
    """Windows, each told when it is handed out, and who takes part in them.

    planner: None where another process plans. changes: of `jobs`, the present ones. border: the round before which some of them
    join or leave, at the next quiet moment; no window is handed out meanwhile. has_ended: there are no more windows.
    """

    windows: Iterator[Window]
    planner: Planner | None
    jobs: Sequence[Job] = ()
    changes: Changes = field(default_factory=Changes)
    border: int | None = None
    has_ended: bool = False
    _present: Window | None = None
    _joined: dict[str, int] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)

    def following(self) -> Window | None:
        """The next window; None where jobs are to join or leave before it, and where there is none."""
        if self._present is not None:
            round_, self._present = self._present.first_round + self._present.num_rounds, None
            if self.changes.pending(round_, self.jobs):
                self.border = round_
        if self.border is not None:
            return None
        self._present = next(self.windows, None)
        self.has_ended = self._present is None
        return self._present

    def follow(self) -> None:
        """Windows that are yet to be handed out hold the jobs that have joined, in their rounds, and none that has left."""
        if self.planner is None:
            return
        for job in self.jobs:
            if job.name not in self._joined:
                self.planner.add(job.data.planned, job.joined)
            elif self._joined[job.name] != job.joined:
                self.planner.put_off(job.name, job.joined)
            self._joined[job.name] = job.joined
            if job.left is not None and job.name not in self._gone:
                self.planner.remove(job.name, job.left)
                self._gone.add(job.name)


def planned_windows(
    run: Run, jobs: Sequence[Job], budget: int, profile: Profile, events: Emitter, group: Alone, changes: Changes,
    flow: Flow,
) -> Plan:  # fmt: skip
    """Windows from the slowest job's on. A thousand samples take one to four hundredths of a second, in which a GPU may still
    compute what it was given before.

    Args:
        jobs: that are on the model, also those that join.
        budget: tokens of a microbatch.
        profile: predicts the time of microbatches.
        group: of processes that train the same windows; its first one plans them.
        changes: of the jobs.
        flow: of the slots.
    """
    if not group.leads:
        return Plan(_received(group), None, jobs, changes)
    planner = _planner(run, budget, flow)
    plan = Plan(iter(()), planner, jobs, changes)
    plan.follow()
    plan.windows = _told(planner.windows(slowest(jobs)), budget, profile, events, group)
    return plan


def window_of(run: Run, round_: int) -> range:
    """The rounds of the window that a round is in. A resumed run plans from the slowest job's window on, and so plans what it
    planned before."""
    planner = _planner(run, 2**31, Flow())
    start = planner.window_start(round_)
    return range(start, start + planner.window_rounds)


def _planner(run: Run, budget: int, flow: Flow) -> Planner:
    more: dict[str, Any] = {}
    if run.compares and run.eval_every:
        more["window_rounds"] = min(run.eval_every, WINDOW_ROUNDS)
    if run.generates:
        more["window_rounds"] = 1
    return Planner(
        [], budget, lag=flow.lag, method=_method(run), time_limit_s=run.schedule.time_limit_s, cost=flow.cost, **more
    )


def _method(run: Run) -> str:
    """Method of the schedule. What an adapter draws depends on its bits, and on a CPU these do not depend on other jobs where
    the cut of a job's global batch does not."""
    return "solo" if run.generates and choose_device(run.device).type == "cpu" else run.schedule.method


def last_round(jobs: Sequence[Job]) -> int:
    """Round in which the last of the ended jobs ended."""
    return max((job.joined + max(job.step, 1) - 1 for job in jobs), default=0)


def slowest(jobs: Sequence[Job]) -> int:
    """Round that the slowest job is in."""
    return min((job.joined + job.step for job in jobs if job.status == "running"), default=2**31)


def _received(group: Alone) -> Iterator[Window]:
    while (tree := group.told(None)) is not None:
        yield WINDOW.validate_python(tree)


def _told(windows: Iterator[Window], budget: int, profile: Profile, events: Emitter, group: Alone) -> Iterator[Window]:
    for window in windows:
        if group.processes > 1:
            group.told(WINDOW.dump_python(window, mode="json"))
        report = window.report
        predicted = profile.cost.makespan(window.microbatches)
        events.emit(
            WindowPlanned(
                window.first_round, window.num_rounds, report.method, budget, report.microbatches, report.noops,
                report.bound, report.gap, report.stopped, report.seconds, predicted,
            )
        )  # fmt: skip
        for text in report.notes:
            events.emit(Note(f"schedule, rounds from {window.first_round}: {text}"))
        yield window
    if group.processes > 1:
        group.told(None)
