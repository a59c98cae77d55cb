"""Cross entropy of the chosen completion with its prompt, and the odds of it over those of the rejected one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from packlora.engine.objective import Objective
from packlora.engine.objectives.preference import CHOSEN, REJECTED, PreferenceObjective, Scores

SURE = 2.0**-53
"""Less log p than this is p = 1 in float64."""


def objective(train: Any) -> Objective:
    """Objective of a job."""
    return Orpo(train.beta or 0.1)


class Orpo(PreferenceObjective):
    """Rewards are mean log-probabilities. beta: weight of the odds."""

    name = "orpo"
    has_reference = False

    def losses_of(self, scores: Scores) -> torch.Tensor:
        """See PreferenceObjective."""
        return scores.cross_entropy_N - self.beta * F.logsigmoid(_log_odds(scores))

    def rewards_of(self, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """See PreferenceObjective."""
        logps_N3 = scores.logps_N3 / scores.counts_N3.clamp(min=1)
        return self.beta * logps_N3, logps_N3


def _log_odds(scores: Scores) -> torch.Tensor:
    """[N] logarithm of the odds of the chosen completion over those of the rejected one, by mean log-probabilities."""
    mean_N3 = scores.logps_N3 / scores.counts_N3.clamp(min=1)
    return _logit(mean_N3[:, CHOSEN]) - _logit(mean_N3[:, REJECTED])


def _logit(logp_N: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of log p <= 0. A completion that is learnt has p = 1 in the last bit: it is taken for the largest p < 1,
    whose loss and gradient are finite."""
    below_N = logp_N - torch.relu(logp_N.detach() + SURE)
    return below_N - torch.log(-torch.expm1(below_N))
