"""The windows that a run trains on: planned in a process beside it (schedule/), and told to subscribers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from packlora.config import ScheduleConfig
from packlora.parallel.replicas import ALONE, Alone
from packlora.report.events import Note, WindowPlanned
from packlora.runtime.events import Emitter
from packlora.runtime.job import Job
from packlora.runtime.profiler import Profile
from packlora.schedule.background import BackgroundPlanner
from packlora.schedule.cost import CostModel
from packlora.schedule.planner import Planner
from packlora.schedule.simulate import makespan
from packlora.schedule.types import Window
from packlora.schedule.wire import window_from_json, window_to_json


@contextmanager
def planned_windows(
    schedule: ScheduleConfig, jobs: Sequence[Job], budget: int, profile: Profile, events: Emitter, group: Alone = ALONE,
    cost: CostModel | None = None,
) -> Iterator[Iterator[Window]]:  # fmt: skip
    """Windows from the slowest job's on, each told when it is handed out.

    Args:
        budget: tokens of a microbatch.
        profile: predicts the time of microbatches.
        group: of processes that train the same windows; its first one plans them.
        cost: of a microbatch on each stage of a pipeline.
    """
    if not group.leads:
        yield _received(group)
        return
    with BackgroundPlanner(_planner(schedule, jobs, budget, cost)) as planner:
        yield _told(planner.windows(_slowest(jobs)), budget, profile, events, group)


def first_round(schedule: ScheduleConfig, jobs: Sequence[Job], budget: int) -> int:
    """Of the first window. A resumed run plans from the slowest job's window on, and so plans what it planned before."""
    return _planner(schedule, jobs, budget).window_start(_slowest(jobs))


def _planner(schedule: ScheduleConfig, jobs: Sequence[Job], budget: int, cost: CostModel | None = None) -> Planner:
    orders = [job.data.planned for job in jobs]
    stages = 1 if cost is None else cost.stages
    return Planner(orders, budget, stages=stages, method=schedule.method, time_limit_s=schedule.time_limit_s, cost=cost)


def _slowest(jobs: Sequence[Job]) -> int:
    """Round that the slowest job is in."""
    return min((job.step for job in jobs if job.status == "running"), default=2**31)


def _received(group: Alone) -> Iterator[Window]:
    while (tree := group.told(None)) is not None:
        yield window_from_json(tree)


def _told(windows: Iterator[Window], budget: int, profile: Profile, events: Emitter, group: Alone) -> Iterator[Window]:
    while (window := _next(windows, events)) is not None:
        if group.processes > 1:
            group.told(window_to_json(window))
        report = window.report
        predicted = makespan(window.microbatches, profile.cost)
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


def _next(windows: Iterator[Window], events: Emitter) -> Window | None:
    """The next window, or None at the end. Where the process that plans has failed, a note says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        window = next(windows, None)
    for warning in caught:
        events.emit(Note(str(warning.message)))
    return window
