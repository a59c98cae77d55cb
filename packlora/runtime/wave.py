"""Running planned microbatches: each replica of a team runs its own one of a wave, and all know what the others ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from packlora.engine.memory import TokenBudget, memory_now
from packlora.engine.parts import Part, Parts
from packlora.engine.rows import Row
from packlora.parallel.layout import waves
from packlora.report.events import MicrobatchDone
from packlora.runtime.job import Job
from packlora.runtime.microbatch import Executor, run_microbatch
from packlora.runtime.profiler import Profile
from packlora.runtime.team import Team
from packlora.schedule.types import Microbatch, Window

MEASURED_EVERY = 1.0
"""Seconds between two looks at memory."""


class Packer:
    """Microbatches as the executor is given them: the same objects where one was packed ahead."""

    def __init__(self, jobs: Mapping[str, Job]) -> None:
        self.jobs = jobs
        self._last: tuple[Microbatch, Parts] | None = None

    def packed(self, microbatch: Microbatch) -> Parts:
        """Its samples as parts, ordered by adapter. Of a job a microbatch holds samples of one global batch only."""
        if self._last is None or self._last[0] is not microbatch:
            numbers: dict[tuple[str, int], list[int]] = {}
            for placed in microbatch.samples:
                numbers.setdefault((placed.job, placed.batch), []).append(placed.sample)
            found: list[Part] = [_part(self.jobs[name], batch, own) for (name, batch), own in numbers.items()]
            self._last = microbatch, sorted(found, key=lambda part: part.adapter)
        return self._last[1]


def _part(job: Job, step: int, numbers: Sequence[int]) -> Part:
    """Samples of the global batch of a step of a job, by their numbers."""
    rows, own = [Row(job.data.samples[number], (job.dropout_key, step, number)) for number in numbers], job.learning
    weight = job.grad_scale / own.units(step)
    return Part(job.adapter.number, rows, own.objective, weight, own.terms, own.facts_of(step))


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
    def jobs(self) -> set[str]:
        return {placed.job for microbatch in self.microbatches for placed in microbatch.samples}


def waves_of(window: Window, replicas: int, capacity: int) -> list[Wave]:
    """All waves of a window. capacity: most tokens of a replica's microbatch."""
    out, slot = [], 0
    for microbatches in waves(window.microbatches, replicas, capacity):
        out.append(Wave(window, slot, microbatches))
        slot += len(microbatches)
    return out


class Runner:
    """Runs waves and counts what was run.

    Args:
        profile: predicts the time of microbatches.
        logged: microbatches that earlier sessions have told of.
        elapsed: seconds since the run began.
    """

    def __init__(
        self, executor: Executor, jobs: Sequence[Job], team: Team, budget: TokenBudget, profile: Profile, logged: int,
        elapsed: Callable[[], float],
    ) -> None:  # fmt: skip
        self.executor, self.jobs, self.team, self.budget, self.profile = executor, jobs, team, budget, profile
        self.by_name: dict[str, Job] = {}
        self.packer = Packer(self.by_name)
        self.began: dict[str, float] = {}
        """When the global batch that a job is in began."""
        self.tokens, self.logged, self._elapsed = 0, logged, elapsed
        self._untold: list[MicrobatchDone] = []
        self._start = 0.0
        self._measured = (-MEASURED_EVERY, 0)
        """When memory was last looked at, and how much there was."""
        self.follow()

    def follow(self) -> None:
        """The jobs are others now."""
        self.by_name.clear()
        self.by_name.update({job.name: job for job in self.jobs})

    def run(self, wave: Wave) -> int:
        """Gradients go to the parameters, losses to the jobs. Of a job a wave holds samples of one global batch only.

        Returns:
            0, or the tokens of a microbatch for which memory ran out.
        """
        due = [job for job, _ in self.due(wave)]
        complete = [self.by_name[name] for name, batch in wave.completes if self.by_name[name].is_due(batch)]
        if not due and not complete:
            return 0
        self.begin()
        for job in due:
            self.began.setdefault(job.name, self._start)
        own = self.own(wave)
        if own is None:
            self.executor.idle(backward=True)
        lacking = self._run(own) if own is not None else 0
        if self.team.group.exchanges:
            self._collect_for_others(due, own)
        if lacking := self.team.agree(lacking, complete):
            return lacking
        for rank, microbatch in enumerate(wave.microbatches):
            if self.is_run(microbatch):
                self.ran(wave, rank)
        for job in due:
            job.count(sum(done.tokens.get(job.name, 0) for done in self._untold))
        return 0

    def due(self, wave: Wave) -> list[tuple[Job, int]]:
        """Jobs whose samples in a wave count, with their global batches."""
        batches = {placed.job: placed.batch for microbatch in wave.microbatches for placed in microbatch.samples}
        own = [(self.by_name[name], batch) for name, batch in batches.items() if self.by_name[name].is_due(batch)]
        return sorted(own, key=lambda found: found[0].adapter.number)

    def prepare(self, wave: Wave | None) -> None:
        """Let the executor make ready what comes next, if anything does and is known before the steps that are being taken."""
        if wave is None or any(job.learning.lacks_estimate(batch) for job, batch in self.due(wave)):
            return
        own = self.own(wave)
        if own is not None:
            self.executor.prepare(self.packer.packed(own))

    def begin(self) -> None:
        """Begin what is told next now."""
        self._start = self._elapsed()

    def told(self) -> list[MicrobatchDone]:
        """The microbatches that have been run since this was last asked; they end now."""
        now = self._elapsed()
        if self._untold and now - self._measured[0] >= MEASURED_EVERY:
            self._measured = now, memory_now(self.budget.device)
        seconds, memory = now - self._start, self._measured[1]
        out = [replace(done, seconds=seconds, elapsed=now, memory=memory) for done in self._untold]
        self._untold = []
        return out

    def own(self, wave: Wave) -> Microbatch | None:
        """The microbatch of this replica, if it has one that anybody needs."""
        own = wave.microbatches[self.team.group.rank : self.team.group.rank + 1]
        return own[0] if own and self.is_run(own[0]) else None

    def is_run(self, microbatch: Microbatch) -> bool:
        return any(self.by_name[placed.job].is_due(placed.batch) for placed in microbatch.samples)

    def _run(self, microbatch: Microbatch) -> int:
        """Returns as `run`."""
        parts = self.packer.packed(microbatch)
        done = self.budget.attempt(microbatch.num_tokens, lambda: run_microbatch(self.executor, parts))
        if done is None:
            return microbatch.num_tokens
        for name, batch in {placed.job: placed.batch for placed in microbatch.samples}.items():
            job = self.by_name[name]
            if job.is_due(batch):
                job.state.collect(done.sums[job.adapter.number])
            else:
                job.discard()
        return 0

    def _collect_for_others(self, due: Sequence[Job], own: Microbatch | None) -> None:
        """Collect, where experts here have computed tokens of other replicas, their gradients of jobs that have none here."""
        here, counted = set() if own is None else {placed.job for placed in own.samples}, {job.name for job in due}
        for job in self.jobs:  # experts compute the operands of all adapters, those without tokens in the wave included
            if job.name in here:
                continue
            if job.name in counted:
                job.state.collect(job.state.no_sums())
            job.state.drop_gradients()

    def ran(self, wave: Wave, rank: int) -> None:
        """Note that a replica has run its microbatch."""
        microbatch = wave.microbatches[rank]
        batches, tokens, samples = dict[str, int](), dict[str, int](), dict[str, int]()
        for placed in sorted(microbatch.samples, key=lambda placed: self.by_name[placed.job].adapter.number):
            name = placed.job
            batches[name] = placed.batch
            tokens[name], samples[name] = tokens.get(name, 0) + placed.length, samples.get(name, 0) + 1
        self.tokens += microbatch.num_tokens
        first = min(self.by_name[name].joined + batch for name, batch in batches.items())
        self._untold.append(
            MicrobatchDone(
                self.logged, wave.window.first_round, wave.slot + rank, first, batches, self.budget.tokens,
                tokens, samples, 0.0, self.profile.pace(microbatch), rank,
            )
        )  # fmt: skip
        self.logged += 1
