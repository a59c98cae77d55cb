"""Losses of pairs of completions, from log-ratios to a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from packlora.engine.objective import Objective
from packlora.engine.objectives.dpo import LOSSES
from packlora.engine.objectives.preference import CHOSEN, REJECTED, PreferenceObjective, Scores


def objective(train: Any) -> Objective:
    """Objective of a job."""
    names = train.loss_types
    losses = tuple(zip(names, train.loss_weights or [1.0] * len(names), strict=True))
    return Dpo(train.beta or 0.1, losses, train.label_smoothing or 0.0, train.discopop_tau or 0.05)


@dataclass(frozen=True, slots=True)
class Pair:
    """Pairs of completions as a loss sees them.

    chosen_N, rejected_N: log-ratios of each to the reference. own_N, other_N: beta times these. margin_N: beta times their
    difference. mean_margin_N: difference of their means over tokens. log_wins_N, log_loses_N: log-probability that the chosen,
    and the rejected one, is preferred. cross_entropy_N: of the chosen one. smoothing, tau: label_smoothing and discopop_tau.
    """

    beta: float
    smoothing: float
    tau: float
    chosen_N: torch.Tensor
    rejected_N: torch.Tensor
    own_N: torch.Tensor
    other_N: torch.Tensor
    margin_N: torch.Tensor
    mean_margin_N: torch.Tensor
    log_wins_N: torch.Tensor
    log_loses_N: torch.Tensor
    cross_entropy_N: torch.Tensor

    @staticmethod
    def log_p(odds_N: torch.Tensor) -> torch.Tensor:
        """Log-probability [N] of what has such log-odds."""
        return logsigmoid(odds_N)


class Dpo(PreferenceObjective):
    """Weighted sum of losses of pairs. losses: names with weights."""

    name = "dpo"

    def __init__(self, beta: float, losses: Sequence[tuple[str, float]], smoothing: float, tau: float) -> None:
        super().__init__(beta)
        self.losses, self.smoothing, self.tau = losses, smoothing, tau

    def losses_of(self, scores: Scores) -> torch.Tensor:
        """See PreferenceObjective."""
        chosen_N, rejected_N = (scores.ratios_N3[:, part] for part in (CHOSEN, REJECTED))
        margin_N = self.beta * (chosen_N - rejected_N)
        mean_margin_N = chosen_N / scores.counts_N3[:, CHOSEN] - rejected_N / scores.counts_N3[:, REJECTED]
        pair = Pair(
            self.beta, self.smoothing, self.tau, chosen_N, rejected_N, self.beta * chosen_N, self.beta * rejected_N, margin_N,
            mean_margin_N, logsigmoid(margin_N), logsigmoid(-margin_N), scores.cross_entropy_N,
        )  # fmt: skip
        total_N = torch.zeros_like(chosen_N)
        for name, weight in self.losses:
            total_N = total_N + weight * LOSSES[name](pair)
        return total_N
