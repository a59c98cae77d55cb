"""Objective of a job while it trains, with its terms and with what is known of its samples and of its global batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from packlora.config import TrainConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.engine.objective import Evaluate, Facts, Objective, Term
from packlora.engine.objectives.configured import objective_of, terms_of


class Learning:
    """The objective of a job over its data.

    terms: what is added to the objective in training. num_metrics: M, of the objective and the terms.
    """

    def __init__(
        self, train: TrainConfig, data: JobData, held_out: Sequence[Sample], router_coefficient: float = 0.0
    ) -> None:
        self.data, self.held_out = data, held_out
        self.objective: Objective = data.objective() or objective_of(train, data.samples)
        self.terms = (*self.objective.terms, *terms_of(train, data.seed, router_coefficient))
        self.num_metrics = sum(len(one.metrics) for one in self._learnt())
        self._facts: tuple[int, Facts] = -1, {}
        """The step whose global batch they are of."""
        self._estimate: tuple[int, Facts] = -1, {}

    def _learnt(self) -> Iterator[Objective | Term]:
        yield self.objective
        yield from self.terms

    def samples_of(self, step: int) -> int:
        """Number of samples of the global batch of a step."""
        return len(self.data.planned.samples(step))

    def units(self, step: int) -> int:
        """Units of the objective in the global batch of a step, which its loss is divided by: label tokens or samples."""
        return self.data.label_tokens(step) if self.objective.unit == "token" else self.samples_of(step)

    def batch(self, step: int) -> list[Sample]:
        """Samples of the global batch of a step, in its order."""
        return [self.data.samples[number] for number in self.data.global_batch(step)]

    def facts_of(self, step: int) -> Facts:
        """Facts of the global batch of a step, see parts.Part."""
        if self._facts[0] != step:
            own = {"units": self.units(step), "samples": self.samples_of(step)}
            self._facts = step, own | dict(self.objective.facts(self.batch(step)))
        return {**self._facts[1], **self._estimate[1]}

    def lacks_estimate(self, step: int) -> bool:
        """Whether the objective is to estimate something before the global batch of a step is run."""
        return self.objective.has_estimate and self._estimate[0] != step

    def estimate(self, step: int, evaluate: Evaluate) -> bool:
        """Do so. False where a stop was asked for meanwhile."""
        found = self.objective.estimate(self.batch(step), evaluate)
        self._estimate = self._estimate if found is None else (step, found)
        return found is not None

    def learn(self, evaluate: Evaluate) -> bool:
        """Let the objective find out what it needs of all samples whose losses it may take: held-out ones, and those of all
        configured steps. False where a stop was asked for meanwhile."""
        data, order = self.data, self.data.planned
        if not self.objective.has_reference:
            return True
        if data.configured_steps >= data.batches_per_epoch:
            return self.objective.learn(data.samples, self.held_out, evaluate)
        taken = np.unique(np.concatenate([order.samples(step) for step in range(data.configured_steps)]))
        return self.objective.learn([data.samples[number] for number in taken.tolist()], self.held_out, evaluate)

    def metrics(self, step: int, sums: torch.Tensor | None) -> dict[str, float | None]:
        """Metrics of the global batch of a step; null for what is not finite. Waits for the device where there are some.

        Args:
            sums: of losses and metrics [1 + M]; None: nothing has run.
        """
        if not self.num_metrics or sums is None:
            return {}
        facts, numbers, found = self.facts_of(step), iter(sums.tolist()[1:]), dict[str, float]()
        for one in self._learnt():
            found |= one.report([next(numbers) for _ in one.metrics], facts) if one.metrics else {}
        return {name: value if math.isfinite(value) else None for name, value in found.items()}
