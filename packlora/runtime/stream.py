"""The slots of a run: planned windows of microbatches as the engine is given them.

Every replica of a group runs its own microbatch of a wave, and all know what the others run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packlora.engine.engine import Slot
from packlora.engine.parts import Part, Parts
from packlora.engine.rows import Row
from packlora.parallel.layout import waves
from packlora.runtime.evaluate import Evaluator
from packlora.runtime.job import Job
from packlora.runtime.tally import Tally
from packlora.runtime.team import Team
from packlora.runtime.windows import Plan
from packlora.schedule.types import Microbatch, Window


@dataclass(frozen=True, slots=True)
class Wave:
    """Microbatches that run at the same time, in the order of the team's replicas. slot: of the first one in its window."""

    window: Window
    slot: int
    microbatches: Sequence[Microbatch]

    @property
    def completes(self) -> list[tuple[str, int]]:
        return [step for microbatch in self.microbatches for step in microbatch.completes]

    @property
    def batches(self) -> dict[str, int]:
        """Jobs with samples here, and their global batches: of a job a wave holds samples of one."""
        return {placed.job: placed.batch for microbatch in self.microbatches for placed in microbatch.samples}


def waves_of(window: Window, replicas: int, capacity: int) -> list[Wave]:
    """All waves of a window. capacity: most tokens of a replica's microbatch."""
    out, slot = [], 0
    for microbatches in waves(window.microbatches, replicas, capacity):
        out.append(Wave(window, slot, microbatches))
        slot += len(microbatches)
    return out


class Stream:
    """Slots of the windows of a plan.

    A job that a resumed run finds already past one of its global batches still takes part, and what it computes is dropped: the
    others then see exactly the microbatches that they would have seen without the interruption. So does a job that has been
    stopped, and one that has failed: matrix products of other shapes, other groups of layers and other plans round
    differently. Only microbatches that nobody needs are left out.

    Args:
        jobs: by name; those that join and leave come and go.
        capacity: most tokens of a replica's microbatch.
    """

    def __init__(
        self, plan: Plan, jobs: Mapping[str, Job], team: Team, capacity: int, evaluator: Evaluator, tally: Tally
    ) -> None:
        self.plan, self.jobs, self.team, self.capacity = plan, jobs, team, capacity
        self.evaluator, self.tally = evaluator, tally
        self.waiting: dict[str, Job] = {}
        """Jobs for which something is due before their next global batch: an evaluation, a checkpoint, an end."""
        self.is_ending = False
        """Whether somebody waits for a quiet moment."""
        self._waves: list[Wave] = []
        """Those of the present window that are left."""
        self._packed: tuple[Microbatch, list[float], Parts] | None = None
        """A microbatch, the loss scales of its jobs, and its parts."""

    # --- as the engine asks ------------------------------------------------------------------------------------------------

    def next(self) -> Slot | None:
        """See Slots."""
        if self.is_ending or self.team.stop.asked or self._has_ended():
            return None
        if not self._waves and not self._begin_window():
            return None
        wave = self._waves[0]
        due = self._due(wave)
        self.waiting |= {job.name: job for job, _ in due if self._is_to_end(job)}
        if self.waiting and not self.waiting.keys().isdisjoint(wave.batches):
            return None
        if not self.evaluator.learn(due):  # all processes are here; they have agreed on a stop
            return None
        self._waves.pop(0)
        return self._slot(wave, due)

    def peek(self) -> Parts:
        """See Slots."""
        if not self._waves:
            return ()
        wave = self._waves[0]
        if any(job.learning.lacks_estimate(batch) for job, batch in self._due(wave)):
            return ()
        own = self._own(wave)
        return () if own is None else self._parts(own)

    def is_asked(self) -> bool:
        """See Slots."""
        return self.team.is_asked

    # --- between two runs of the engine ------------------------------------------------------------------------------------

    def take_waiting(self) -> list[Job]:
        """Jobs for which something is due, at a quiet moment; nothing is due for them any more."""
        waiting, self.waiting, self.is_ending = list(self.waiting.values()), {}, False
        return waiting

    # --- windows and waves -------------------------------------------------------------------------------------------------

    def _has_ended(self) -> bool:
        return any(job.status != "running" or job.step >= job.data.num_steps for job in self.waiting.values())

    def _is_to_end(self, job: Job) -> bool:
        """Whether a job that is between two steps was asked to end."""
        return job.name in self.team.stop.jobs and job.step > 0 and job.name not in self.tally.began

    def _begin_window(self) -> bool:
        """False where none is handed out now."""
        if (window := self.plan.following()) is None:
            return False
        self._waves = waves_of(window, self.team.group.size, self.capacity)
        return True

    def _slot(self, wave: Wave, due: Sequence[tuple[Job, int]]) -> Slot:
        own = self._own(wave)
        self.tally.entered(wave.window, own, [job for job, _ in due])
        complete = [(self.jobs[name], batch) for name, batch in wave.completes]
        steps = tuple(job.next_step() for job, batch in complete if job.is_due(batch))
        assert all(job.step == batch for job, batch in due), "a global batch would begin before the step it follows"
        counted = frozenset(job.adapter.number for job, _ in due)
        return Slot(() if own is None else self._parts(own), counted, steps, wave)

    def _due(self, wave: Wave) -> list[tuple[Job, int]]:
        """Jobs whose samples in a wave count, with their global batches."""
        own = [(self.jobs[name], batch) for name, batch in wave.batches.items()]
        return sorted((one for one in own if one[0].is_due(one[1])), key=lambda one: one[0].adapter.number)

    def _own(self, wave: Wave) -> Microbatch | None:
        """The microbatch of this replica, if it has one that anybody needs."""
        for own in wave.microbatches[self.team.group.rank : self.team.group.rank + 1]:
            if any(self.jobs[placed.job].is_due(placed.batch) for placed in own.samples):
                return own
        return None

    def _parts(self, microbatch: Microbatch) -> Parts:
        """Its samples as parts, ordered by adapter; the same objects where it was asked for them before, unless a step has
        changed a loss scale since."""
        scales = [self.jobs[placed.job].state.grad_scale for placed in microbatch.samples]
        if self._packed is None or self._packed[0] is not microbatch or self._packed[1] != scales:
            numbers: dict[tuple[str, int], list[int]] = {}
            for placed in microbatch.samples:
                numbers.setdefault((placed.job, placed.batch), []).append(placed.sample)
            found = [_part(self.jobs[name], batch, own) for (name, batch), own in numbers.items()]
            self._packed = microbatch, scales, sorted(found, key=lambda part: part.adapter)
        return self._packed[2]


def _part(job: Job, step: int, numbers: Sequence[int]) -> Part:
    """Samples of the global batch of a step of a job, by their numbers."""
    rows, own = [Row(job.data.samples[number], (job.dropout_key, step, number)) for number in numbers], job.learning
    weight = job.state.grad_scale / own.units(step)
    return Part(job.adapter.number, rows, own.objective, weight, own.terms, own.facts_of(step))
