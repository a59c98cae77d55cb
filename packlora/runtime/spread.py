"""How a run spreads over devices: what each layout is predicted to take, and which one training takes.

Work is predicted from shapes alone (work.py): so every process of a run finds the same layout, and a resumed run too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packlora.parallel import layout as layouts
from packlora.parallel.layout import Layout, Prediction, Wave
from packlora.runtime.prepare import PreparedRun
from packlora.runtime.work import Work
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch

SAMPLES = 20_000
"""Samples of a group that are planned; of a longer run the first windows, scaled up."""


@dataclass(slots=True)
class Spread:
    """A layout and what its groups run at the beginning.

    waves, parts: by group, see layout.predict.
    """

    layout: Layout
    waves: list[list[Wave]]
    parts: list[float]

    @property
    def fullest(self) -> list[int]:
        """By group, tokens of its fullest microbatch; 0 where it has no jobs."""
        return [max((one.num_tokens for wave in own for one in wave), default=0) for own in self.waves]

    def predict(self, cost: Callable[[Microbatch], float]) -> Prediction:
        """See layout.predict."""
        return layouts.predict(self.layout, self.waves, self.parts, cost)


def candidates(prepared: PreparedRun, devices: int, work: Mapping[str, float]) -> list[Layout]:
    """The layouts that the run file allows on so many devices, those whose jobs share the fewest first.

    Args:
        work: by job, what it is predicted to take.
    """
    parallel = prepared.run.parallel
    asked = devices if parallel.shard_base else parallel.devices_per_job
    found = layouts.layouts(work, devices, parallel.tensor)
    return [own for own in found if asked in ("auto", own.devices_per_job)]


def layout_of(prepared: PreparedRun, devices: int) -> Layout:
    """The layout in which the run is trained on so many devices."""
    work = Work(prepared)
    found = candidates(prepared, devices, work.jobs())
    if len(found) == 1:
        return found[0]
    return layouts.choose([spread(prepared, own).predict(work.of) for own in found]).layout


def spread(prepared: PreparedRun, layout: Layout) -> Spread:
    """Plan what the groups of a layout run."""
    planned = [_waves(prepared, names, layout.split) for names in layout.groups]
    return Spread(layout, [waves for waves, _ in planned], [part for _, part in planned])


def _waves(prepared: PreparedRun, names: tuple[str, ...], split: int) -> tuple[list[Wave], float]:
    """Of the jobs of a group, and the part of their tokens that they are."""
    jobs = [job.data for job in prepared.jobs if job.data.name in names]
    if not jobs:
        return [], 1.0
    method = "solo" if prepared.run.schedule.method == "solo" else "greedy"
    out: list[Wave] = []
    samples = tokens = 0
    for window in Planner(
        [job.planned for job in jobs], layouts.planned(prepared.budget, split), method=method
    ).windows():
        out += layouts.waves(window.microbatches, split, prepared.budget)
        samples += sum(len(microbatch.samples) for microbatch in window.microbatches)
        tokens += sum(microbatch.num_tokens for microbatch in window.microbatches)
        if samples >= SAMPLES:
            break
    return out, min(1.0, tokens / sum(job.tokens for job in jobs))
