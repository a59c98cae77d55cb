"""Held-out losses of jobs: when one is due, and what it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packlora.changes import Changes
from packlora.data.encode import Sample
from packlora.engine.objective import RowsView
from packlora.engine.passes import insist
from packlora.engine.rows import NO_ADAPTER, Row
from packlora.runtime.forwards import Forwards, Found
from packlora.runtime.job import Job


@dataclass(slots=True)
class JobForwards:
    """Forwards that the objective of a job asks for (objectives.Evaluate).

    known: see there. kept: samples whose ids are in it, so that no other sample gets them.
    """

    forwards: Forwards
    job: Job
    known: dict[int, np.ndarray]
    kept: list[Sample]

    def own(self, samples: Sequence[Sample]) -> list[np.ndarray] | None:
        """Run the job's adapter as it is. Raises MemoryError: out of memory, and there is no lower budget to go on with."""
        return self._over(samples, self.job.adapter.number)

    def reference(self, samples: Sequence[Sample], keep: bool = False) -> list[np.ndarray] | None:
        """Run the base model, or the adapter of `train.reference` in the place of the job's. Raises as `own`."""
        folder, flat = self.job.config.reference_adapter, self.job.adapter.flat
        self.kept += samples if keep else ()
        if folder is None:
            return self._over(samples, NO_ADAPTER)
        trained = insist(self.forwards.executor, flat.clone)
        from packlora.adapters.reading import load_adapter

        try:
            insist(self.forwards.executor, lambda: load_adapter(folder, self.job.adapter))
            return self._over(samples, self.job.adapter.number)
        finally:
            flat.copy_(trained)

    def _over(self, samples: Sequence[Sample], owner: int) -> list[np.ndarray] | None:
        name = self.job.name
        found = self.forwards.over({name: samples}, {name: owner}, [name])
        return None if found is None else found[name].logps


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out loss of a job, a mean over the units of its objective, and the objective's metrics by their names in logs."""

    loss: float
    metrics: Mapping[str, float]

    @property
    def line(self) -> dict[str, float | None]:
        """Line of a log history, by TRL's names; null for what is not finite."""
        told = {"loss": self.loss} | dict(self.metrics)
        return {f"eval_{key}": value if math.isfinite(value) else None for key, value in told.items()}


HeldOutOf = Callable[[Sequence[Job], Forwards], Mapping[str, Sequence[Sample]]]
"""Gives the held-out samples of jobs, by name; see Changes.held_out."""
OF_FILES: HeldOutOf = Changes().held_out
"""Gives those that are read and not generated."""


class Evaluator:
    """Evaluations of a run: before a job's first step, unless it does without, every so many, and after its last; once each.

    Args:
        every: steps between two evaluations; 0: none between the first and the last.
    """

    def __init__(
        self, forwards: Forwards, jobs: Sequence[Job], every: int, held_out: HeldOutOf = OF_FILES
    ) -> None:  # fmt: skip
        self.forwards, self.every, self._held_out = forwards, every, held_out
        self._known: dict[str | None, tuple[dict[int, np.ndarray], list[Sample]]] = {}
        """Known values by the adapter of the reference, see JobForwards."""
        self.losses: dict[tuple[str, int], float | None] = {
            (job.name, line["step"]): line["eval_loss"]
            for job in jobs
            for line in job.log_history
            if "eval_loss" in line
        }
        """Losses by job and step; None where an earlier session found one that was not finite."""

    def is_due(self, job: Job) -> bool:
        if job.status != "running" or (job.name, job.step) in self.losses:
            return False
        if job.step >= job.data.num_steps:
            return True
        train = job.config.train
        every = self.every if train.eval_steps is None else train.eval_steps
        is_asked = train.eval_on_start if job.step == 0 else is_multiple(job.step, every)
        return bool(job.eval_samples) and is_asked

    def learn(self, due: Sequence[tuple[Job, int]]) -> bool:
        """Let objectives estimate what they need of the global batches that are to be run. False where a stop was asked for.

        Raises:
            MemoryError: out of memory, and there is no lower budget to go on with.
        """
        return all(job.learning.estimate(step, self._of(job)) for job, step in due if job.learning.lacks_estimate(step))

    def _of(self, job: Job) -> JobForwards:
        return JobForwards(self.forwards, job, *self._known.setdefault(job.config.reference_adapter, ({}, [])))

    def evaluate(self, jobs: Sequence[Job]) -> dict[str, HeldOut]:
        """Held-out losses of the jobs that are due and whose samples are there, by name; none where a stop was asked for.

        Objectives learn first what they need of all samples. Each loss is computed without dropout in microbatches of its own:
        which others are due at the same time changes no bit of it. After its last step a job without held-out samples is tried
        on its last global batch instead: no later step would notice that the last one ruined it.

        Raises:
            MemoryError: out of memory, and there is no lower budget to go on with.
        """
        if not all(job.learning.learn(self._of(job)) for job in jobs if job.status == "running"):
            return {}
        held_out = self._held_out([job for job in jobs if self.is_due(job)], self.forwards)
        due = [job for job in jobs if job.name in held_out]
        samples = {job.name: held_out[job.name] or job.data.last_batch() for job in due}
        wanted = [job.name for job in due if job.learning.objective.weights != "before"]
        found = self.forwards.over(samples, {job.name: job.adapter.number for job in due}, wanted) if samples else None
        if found is None:
            return {}
        out: dict[str, HeldOut] = {}
        for job in due:
            estimate = job.learning.objective.estimate(samples[job.name], self._of(job))
            if estimate is None:
                return {}
            out[job.name] = _held_out(job, samples[job.name], found[job.name], estimate)
        self.losses |= {(job.name, job.step): out[job.name].loss for job in due}
        return out


def _held_out(job: Job, samples: Sequence[Sample], found: Found, estimate: Mapping[str, float]) -> HeldOut:
    objective, learnt = job.learning.objective, sum(sample.num_learnt for sample in samples)
    if objective.weights == "before":
        return HeldOut(found.loss_sum / learnt, {})
    units = learnt if objective.unit == "token" else len(samples)
    facts = {"units": units, "samples": len(samples), **objective.facts(samples), **estimate}
    view = RowsView.of(objective, [Row(sample) for sample in samples], facts)
    losses, sums = objective.loss(torch.from_numpy(np.concatenate(found.logps)), view)
    return HeldOut(float(losses.sum()) / units, objective.report(sums.tolist(), facts))


def is_multiple(step: int, every: int) -> bool:
    """Whether something that is done every so many steps, never with 0, is due after a step, counted from 1."""
    return every > 0 and step > 0 and step % every == 0
