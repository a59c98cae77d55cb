"""Held-out losses of jobs: when one is due, and what it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packlora.data.encode import Sample
from packlora.runtime.divergence import Divergences
from packlora.runtime.forwards import Forwards, Found
from packlora.runtime.job import Job
from packlora.runtime.objective import Scores
from packlora.runtime.reference import References


@dataclass(frozen=True, slots=True)
class HeldOut:
    """loss: mean over label tokens, or over samples with preferences. metrics: what else is told of the latter."""

    loss: float
    metrics: Mapping[str, float]

    @property
    def line(self) -> dict[str, float | None]:
        """Of a log history, by TRL's names; null for what is not finite."""
        told = {"loss": self.loss} | dict(self.metrics)
        return {f"eval_{key}": value if math.isfinite(value) else None for key, value in told.items()}


class Evaluator:
    """Evaluations of a run: before a job's first step, unless it does without, every so many, and after its last; once each."""

    def __init__(self, forwards: Forwards, jobs: Sequence[Job], every: int) -> None:
        self.forwards, self.every = forwards, every
        self.references = References(forwards)
        self.divergences = Divergences(forwards, self.references)
        self.learn = self.divergences.learn
        self.losses: dict[tuple[str, int], float | None] = {
            (job.name, line["step"]): line["eval_loss"]
            for job in jobs
            for line in job.log_history
            if "eval_loss" in line
        }
        """By job and step; None where an earlier session found one that was not finite."""

    def is_due(self, job: Job) -> bool:
        if job.status != "running" or (job.name, job.step) in self.losses:
            return False
        if job.step >= job.data.num_steps:
            return True
        train = job.config.train
        every = self.every if train.eval_steps is None else train.eval_steps
        is_asked = train.eval_on_start if job.step == 0 else is_multiple(job.step, every)
        return bool(job.eval_samples) and is_asked

    def evaluate(self, jobs: Sequence[Job]) -> dict[str, HeldOut]:
        """Held-out losses of those jobs that are due, by name: of all of them, or of none where a stop was asked for meanwhile.

        Jobs with preferences learn first what their references give. Each loss is computed without dropout in microbatches of
        its own: which others are due at the same time changes no bit of it. After its last step a job without held-out samples
        is tried on its last global batch instead: no later step would notice that the last one ruined it.

        Raises:
            MemoryError: out of memory, and there is no lower budget to go on with.
        """
        self.references.learn(jobs)
        due = [job for job in jobs if self.is_due(job)]
        samples = {job.name: job.eval_samples or job.data.last_batch() for job in due}
        found = self.forwards.over(samples, {job.name: job.adapter.number for job in due}) if samples else None
        if found is None:  # then references may not be known either
            return {}
        divergences = {job.name: self.divergences.held_out(job, samples[job.name]) for job in due}
        if any(divergence is None for divergence in divergences.values()):
            return {}
        told = {job.name: _told(job, samples[job.name], found[job.name], divergences[job.name] or 0.0) for job in due}
        self.losses |= {(job.name, job.step): told[job.name].loss for job in due}
        return told


def _told(job: Job, samples: Sequence[Sample], found: Found, divergence: float) -> HeldOut:
    objective = job.preferences.objective
    if objective is None:
        return HeldOut(found.loss_sum / sum(sample.num_labels for sample in samples), {})
    scores = _scores(job, samples, found.logps_N3, divergence)
    return HeldOut(
        float(objective.losses_of(scores).mean()), objective.metrics(objective.told(scores).tolist(), divergence)
    )


def _scores(job: Job, samples: Sequence[Sample], logps_N3: np.ndarray, divergence: float) -> Scores:
    counts_N3 = np.array([[len(places) for places in sample.groups()] for sample in samples], np.float64)
    reference_N3 = np.stack([job.preferences.reference_of(sample) for sample in samples])
    desirable_N = np.array(
        [sample.preference is not None and sample.preference.desirable for sample in samples], np.float64
    )
    per_token_N = np.full(len(samples), len(samples) / counts_N3[:, :2].sum())
    divergence_N = np.full(len(samples), divergence)
    return Scores(*map(torch.from_numpy, (logps_N3, reference_N3, counts_N3, per_token_N, desirable_N, divergence_N)))


def is_multiple(step: int, every: int) -> bool:
    """Whether something that is done every so many steps, never with 0, is due after a step, counted from 1."""
    return every > 0 and step > 0 and step % every == 0
