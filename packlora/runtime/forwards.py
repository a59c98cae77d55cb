"""Forwards without gradients and without dropout over many samples: for held-out losses, and for what a reference gives."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packlora.data.encode import Sample
from packlora.data.order import SampleOrder
from packlora.engine.memory import TokenBudget, free_memory
from packlora.engine.objective import Term
from packlora.engine.parts import Part
from packlora.engine.passes import Executor, MicrobatchResult
from packlora.engine.rows import Row
from packlora.runtime.team import Team
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch

Samples = Mapping[str, Sequence[Sample]]
Terms = tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Results for some samples: the sum of the cross entropies of their labels; of each the labels' log-probabilities,
    float64 [l], where they were asked for."""

    loss_sum: float
    logps: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Forwards:
    """Runs them on the processes of a team, which share the microbatches."""

    device: torch.device
    executor: Executor
    budget: TokenBudget
    team: Team
    by_graph: bool = False
    """See Executor.evaluate."""

    def over(
        self, samples: Samples, owners: Mapping[str, int], wants_logps: Collection[str] = (), terms: Terms = ()
    ) -> dict[str, Found] | None:
        """Run each name's samples, in microbatches of its own: which others there are changes no bit of it.

        Args:
            samples: by name.
            owners: by name, number of the adapter that owns the tokens, or rows.NO_ADAPTER.
            wants_logps: names whose samples' log-probabilities are wanted.
            terms: of all samples, as a temperature.

        Returns:
            By name; None where a stop was asked for meanwhile.

        Raises:
            MemoryError: out of memory, and there is no lower budget to go on with.
        """
        found = None
        while found is None and not self.team.stop.asked:
            found = self._try(samples, owners, wants_logps, terms)
        return None if self.team.stop.asked else found

    def _try(
        self, samples: Samples, owners: Mapping[str, int], wants_logps: Collection[str], terms: Terms
    ) -> dict[str, Found] | None:
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
        logps = {name: _Logps(samples[name]) for name in wants_logps}
        rank, size = self.team.group.rank, self.team.group.size
        for number in range(rank, -(-len(microbatches) // size) * size, size):
            if self.team.stop.asked:
                break
            if number >= len(microbatches):
                self.executor.idle(backward=False)
                continue
            placed = microbatches[number].samples
            done = self._microbatch(microbatches[number], samples, owners, terms)
            if done is None:
                lacking = microbatches[number].num_tokens
                break
            name = placed[0].job
            sums[number] = done.sums[owners[name]][0].cpu()
            if name in logps:
                logps[name].put([own.sample for own in placed], -done.losses_L.cpu().double())
        if lacking := self.team.agree(lacking):
            free_memory(self.device)
            self.budget.held_out = self.budget.below(lacking)
            return None
        for own in (sums, *(found.values for found in logps.values())):
            self.team.group.add_losses(own)
        totals = dict.fromkeys(samples, 0.0)
        for microbatch, own in zip(microbatches, sums.tolist(), strict=True):  # in the order of one process
            totals[microbatch.samples[0].job] += own
        return {name: Found(totals[name], logps[name].by_sample() if name in logps else []) for name in samples}

    def _microbatch(
        self, microbatch: Microbatch, samples: Samples, owners: Mapping[str, int], terms: Terms
    ) -> MicrobatchResult | None:
        (name,) = {placed.job for placed in microbatch.samples}
        part = Part(owners[name], [Row(samples[name][placed.sample]) for placed in microbatch.samples], terms=terms)
        return self.budget.attempt(microbatch.num_tokens, lambda: self.executor.evaluate([part], self.by_graph))


class _Logps:
    """Log-probabilities of the labels of samples, one sample behind the other; 0 where others find them."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._sizes = [sample.num_labels for sample in samples]
        self._stops = list(itertools.accumulate(self._sizes))
        self.values = torch.zeros(self._stops[-1], dtype=torch.float64)

    def put(self, numbers: Sequence[int], logp_L: torch.Tensor) -> None:
        """Take those of some samples, in their order, with padding behind."""
        sizes = [self._sizes[number] for number in numbers]
        for number, own in zip(numbers, logp_L[: sum(sizes)].split(sizes), strict=True):
            self.values[self._stops[number] - len(own) : self._stops[number]] = own

    def by_sample(self) -> list[np.ndarray]:
        """Log-probabilities of each sample."""
        return [own.numpy() for own in self.values.split(self._sizes)]
