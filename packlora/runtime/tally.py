"""Counts of what a run has trained on: tokens of jobs, time of global batches and microbatches, as subscribers are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from packlora.engine.engine import Slot
from packlora.engine.memory import TokenBudget, memory_now, utilisation_now
from packlora.events import MicrobatchDone
from packlora.runtime.flow import Flow
from packlora.runtime.job import Job
from packlora.runtime.profiles import Profile
from packlora.schedule.types import Microbatch, Window

MEASURED_EVERY = 1.0
"""Seconds between two looks at memory and at how busy the GPU is."""


class Tally:
    """Counts of one session.

    Args:
        jobs: by name.
        profile: predicts the time of microbatches.
        logged: microbatches that earlier sessions have told of.
        elapsed: seconds since the run began.
        flow: hears of the slots that enter.
    """

    def __init__(
        self, jobs: Mapping[str, Job], budget: TokenBudget, profile: Profile, logged: int, elapsed: Callable[[], float],
        flow: Flow,
    ) -> None:  # fmt: skip
        self.jobs, self.budget, self.profile, self.logged, self.flow = jobs, budget, profile, logged, flow
        self.tokens = 0
        self.began: dict[str, float] = {}
        """When the global batch that a job is in began."""
        self._elapsed, self._start = elapsed, 0.0
        self._measured: tuple[float, int, float | None] = (-MEASURED_EVERY, 0, None)
        """When the machine was last looked at, its memory in use, and how busy its GPU was."""

    def entered(self, window: Window, own: Microbatch | None, due: Sequence[Job]) -> None:
        """A slot enters. own: the microbatch of this replica, if it runs one. due: jobs whose samples count."""
        self.flow.entered(window.first_round, own)
        self._start = self._elapsed()
        for job in due:
            self.began.setdefault(job.name, self._start)

    def done(self, slot: Slot) -> Iterator[MicrobatchDone]:
        """A slot is done: its tokens are counted. Yields the microbatches that replicas have run."""
        if not slot.counted:
            return
        now, wave = self._elapsed(), slot.tag
        if now - self._measured[0] >= MEASURED_EVERY:
            self._measured = now, memory_now(self.budget.device), utilisation_now(self.budget.device)
        for rank, microbatch in enumerate(wave.microbatches):
            found = self._microbatch(microbatch, slot)
            if found is None:
                continue
            batches, tokens, samples = found
            self.tokens += microbatch.num_tokens
            first = min(self.jobs[name].joined + batch for name, batch in batches.items())
            yield MicrobatchDone(
                self.logged, wave.window.first_round, wave.slot + rank, first, batches, self.budget.tokens, tokens,
                samples, now - self._start, self.profile.pace(microbatch), rank, elapsed=now, memory=self._measured[1],
                gpu=self._measured[2],
            )  # fmt: skip
            self.logged += 1
        self._start = now

    def _microbatch(
        self, microbatch: Microbatch, slot: Slot
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int]] | None:
        """Global batches, tokens and samples by job; None where nobody needed it. Counts tokens for the jobs that did."""
        batches, tokens, samples = dict[str, int](), dict[str, int](), dict[str, int]()
        for placed in sorted(microbatch.samples, key=lambda placed: self.jobs[placed.job].adapter.number):
            name = placed.job
            batches[name] = placed.batch
            tokens[name], samples[name] = tokens.get(name, 0) + placed.length, samples.get(name, 0) + 1
        counted = [job for job in map(self.jobs.__getitem__, batches) if job.adapter.number in slot.counted]
        for job in counted:
            job.count(tokens[job.name])
        return (batches, tokens, samples) if counted else None

    def stepped(self, job: Job) -> tuple[float, float]:
        """Seconds since the global batch of a job began, which is over, and since the run began."""
        now = self._elapsed()
        return now - self.began.pop(job.name), now
