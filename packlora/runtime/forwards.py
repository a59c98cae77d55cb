"""Forwards without gradients and without dropout over many samples: for held-out losses, and for what a reference gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packlora.data.encode import Sample
from packlora.data.order import SampleOrder
from packlora.runtime.collate import PackedSample
from packlora.runtime.memory import TokenBudget, free_memory
from packlora.runtime.microbatch import Executor, MicrobatchResult
from packlora.runtime.team import Team
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch

Samples = Mapping[str, Sequence[Sample]]


@dataclass(frozen=True, slots=True)
class Found:
    """Of samples: the sum of the losses of their label tokens; of each with a preference its log-probabilities [N, 3]."""

    loss_sum: float
    logps_N3: np.ndarray


@dataclass(frozen=True, slots=True)
class Forwards:
    """Runs them on the processes of a team, which share the microbatches."""

    device: torch.device
    executor: Executor
    budget: TokenBudget
    team: Team

    def over(self, samples: Samples, owners: Mapping[str, int]) -> dict[str, Found] | None:
        """What is found of each name's samples, in microbatches of its own: which others there are changes no bit of it.

        Args:
            samples: by name.
            owners: by name, number of the adapter that owns the tokens, or collate.NOBODY.

        Returns:
            By name; None where a stop was asked for meanwhile.

        Raises:
            MemoryError: out of memory, and there is no lower budget to go on with.
        """
        found = None
        while found is None and not self.team.stop.asked:
            found = self._try(samples, owners)
        return None if self.team.stop.asked else found

    def _try(self, samples: Samples, owners: Mapping[str, int]) -> dict[str, Found] | None:
        """None: out of memory, to be tried again with a lower budget."""
        orders = [
            SampleOrder(name, np.array([sample.num_tokens for sample in own]), len(own), 0, 1, shuffle=False)
            for name, own in samples.items()
        ]
        longest = max(sample.num_tokens for own in samples.values() for sample in own)
        budget = max(min(self.budget.tokens, self.budget.held_out), longest)
        planners = [Planner([order], budget, method="greedy") for order in orders]
        microbatches = [microbatch for planner in planners for microbatch in planner.window(0).microbatches]
        sums, lacking = torch.zeros(len(microbatches), dtype=torch.float64), 0
        compared = [name for name, own in samples.items() if own[0].preference is not None]
        logps = {name: torch.zeros(len(samples[name]), 3, dtype=torch.float64) for name in compared}
        rank, size = self.team.group.rank, self.team.group.size
        for number in range(rank, -(-len(microbatches) // size) * size, size):
            if self.team.stop.asked:
                break
            if number >= len(microbatches):
                self.executor.idle(backward=False)
                continue
            placed = microbatches[number].samples
            done = self._microbatch(microbatches[number], samples, owners)
            if done is None:
                lacking = microbatches[number].num_tokens
                break
            name = placed[0].job
            sums[number] = done.sums[owners[name]].cpu()
            if done.logps is not None:
                logps[name][[own.sample for own in placed]] = done.logps.cpu()
        if lacking := self.team.agree(lacking, []):
            free_memory(self.device)
            self.budget.held_out = self.budget.below(lacking)
            return None
        for own in (sums, *logps.values()):
            self.team.group.add_losses(own)
        totals = dict.fromkeys(samples, 0.0)
        for microbatch, own in zip(microbatches, sums.tolist(), strict=True):  # in the order of one process
            totals[microbatch.samples[0].job] += own
        nothing = torch.zeros(0, 3)
        return {name: Found(totals[name], logps.get(name, nothing).numpy()) for name in samples}

    def _microbatch(
        self, microbatch: Microbatch, samples: Samples, owners: Mapping[str, int]
    ) -> MicrobatchResult | None:
        packed = [
            PackedSample(owners[placed.job], samples[placed.job][placed.sample], 0, 0, None)
            for placed in microbatch.samples
        ]
        return self.budget.attempt(microbatch.num_tokens, lambda: self.executor.evaluate(packed))
