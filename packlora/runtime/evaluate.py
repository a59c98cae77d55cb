"""Held-out losses of jobs: when one is due, and what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from packlora.data.encode import Sample
from packlora.data.order import SampleOrder
from packlora.runtime.collate import PackedSample
from packlora.runtime.job import Job
from packlora.runtime.memory import TokenBudget, free_memory
from packlora.runtime.microbatch import Executor
from packlora.runtime.team import Team
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch


class Evaluator:
    """Evaluations of a run: before a job's first step, every so many steps, and after its last one, once each."""

    def __init__(
        self,
        device: torch.device,
        executor: Executor,
        jobs: Sequence[Job],
        every: int,
        budget: TokenBudget,
        team: Team,
    ) -> None:
        self.device, self.executor, self.jobs, self.every, self.budget, self.team = (
            device,
            executor,
            jobs,
            every,
            budget,
            team,
        )
        self.losses: dict[tuple[str, int], float | None] = {
            (job.name, line["step"]): line["eval_loss"]
            for job in jobs
            for line in job.log_history
            if "eval_loss" in line
        }
        """By job and step; None where an earlier session found one that was not finite."""

    def losses_of(self, job: Job) -> dict[int, float | None]:
        """Held-out losses of a job by step."""
        return {step: loss for (name, step), loss in self.losses.items() if name == job.name}

    def is_due(self, job: Job) -> bool:
        if job.status != "running" or (job.name, job.step) in self.losses:
            return False
        if job.step >= job.data.num_steps:
            return True
        own = job.config.train.eval_steps
        every = self.every if own is None else own
        return bool(job.eval_samples) and (job.step == 0 or is_multiple(job.step, every))

    def evaluate(self, jobs: Sequence[Job]) -> dict[str, float]:
        """Held-out loss of those jobs that are due, by name: of all of them, or of none where a stop was asked for meanwhile.

        Each is computed without dropout in microbatches of its own: which others are due at the same time changes no bit of it.
        After its last step a job without held-out samples is tried on its last global batch instead: no later step would notice
        that the last one ruined it.

        Raises:
            MemoryError: out of memory, and there is no lower budget to go on with.
        """
        due = [job for job in jobs if self.is_due(job)]
        samples = {job.name: job.eval_samples or job.data.last_batch() for job in due}
        sums = None
        while samples and sums is None and not self.team.stop.asked:
            sums = self._sums(samples)
        if sums is None or self.team.stop.asked:
            return {}
        losses = {
            job.name: float(sums[job.adapter.number]) / sum(sample.num_labels for sample in samples[job.name])
            for job in due
        }
        self.losses |= {(job.name, job.step): losses[job.name] for job in due}
        return losses

    def _sums(self, samples: Mapping[str, list[Sample]]) -> np.ndarray | None:
        """Sum of the label tokens' losses by job number, or None: out of memory, to be tried again with a lower budget."""
        orders = [
            SampleOrder(name, np.array([sample.num_tokens for sample in own]), len(own), 0, 1, shuffle=False)
            for name, own in samples.items()
        ]
        budget = min(self.budget.tokens, self.budget.held_out)
        planners = [Planner([order], budget, method="greedy") for order in orders]
        microbatches = [microbatch for planner in planners for microbatch in planner.window(0).microbatches]
        owners = 1 + max(job.adapter.number for job in self.jobs)
        found, lacking = torch.zeros(len(microbatches), owners, dtype=torch.float64), 0
        rank, size = self.team.group.rank, self.team.group.size
        for number in range(rank, -(-len(microbatches) // size) * size, size):
            if self.team.stop.asked:
                break
            if number >= len(microbatches):
                self.executor.idle(backward=False)
                continue
            sums = self._microbatch(microbatches[number], samples, owners)
            if sums is None:
                lacking = microbatches[number].num_tokens
                break
            found[number] = sums
        if lacking := self.team.agree(lacking, []):
            free_memory(self.device)
            self.budget.held_out = self.budget.below(lacking)
            return None
        self.team.group.add_losses(found)
        total = np.zeros(owners)
        for own in found.numpy():  # in the order of one process
            total += own
        return total

    def _microbatch(
        self, microbatch: Microbatch, samples: Mapping[str, list[Sample]], owners: int
    ) -> torch.Tensor | None:
        number = {job.name: job.adapter.number for job in self.jobs}
        packed = [
            PackedSample(number[placed.job], samples[placed.job][placed.sample], 0, 0, None)
            for placed in microbatch.samples
        ]
        done = self.budget.attempt(microbatch.num_tokens, lambda: self.executor.evaluate(packed, owners))
        return None if done is None else done.sums.cpu()


def is_multiple(step: int, every: int) -> bool:
    """Whether something that is done every so many steps, never with 0, is due after a step, counted from 1."""
    return every > 0 and step > 0 and step % every == 0
