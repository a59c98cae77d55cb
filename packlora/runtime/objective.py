"""Losses of preferences: of two completions of a prompt, or of one that is judged, from log-probabilities of whole completions.

The formulas are those of TRL's DPOTrainer, KTOTrainer and ORPOTrainer. A sample is the unit: a job's loss is the mean over the
samples of a global batch. All of it is computed in float64, for a few numbers a sample.

Shapes: N samples. Three columns: label tokens outside of completions, the chosen completion or the only one, the rejected one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from packlora.config import TrainConfig

CONTEXT, CHOSEN, REJECTED = range(3)
SURE = 2.0**-53
"""Less log p than this is p = 1 in float64."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a loss is made of, float64 on one device.

    logps_N3: sums of log-probabilities of the model's own tokens. reference_N3: the same of the reference. counts_N3: tokens.
    per_token_N: samples of the global batch over its tokens of chosen parts, which weighs a token's cross entropy beside a
    sample's loss. desirable_N: 1 or 0. divergence_N: estimate of the model's divergence from the reference, of the samples'
    global batch; see divergence.py.
    """

    logps_N3: torch.Tensor
    reference_N3: torch.Tensor
    counts_N3: torch.Tensor
    per_token_N: torch.Tensor
    desirable_N: torch.Tensor
    divergence_N: torch.Tensor

    @property
    def cross_entropy_N(self) -> torch.Tensor:
        """Of the chosen part, so that the mean over samples is the mean over the global batch's tokens."""
        return -(self.logps_N3[:, CONTEXT] + self.logps_N3[:, CHOSEN]) * self.per_token_N


@dataclass(frozen=True, slots=True)
class Objective:
    """What a job with preferences learns. losses: names with weights."""

    trainer: str
    beta: float
    losses: tuple[tuple[str, float], ...]
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @staticmethod
    def of(train: TrainConfig) -> Objective | None:
        """That of a job; None of one that learns completions."""
        if train.trainer == "sft":
            return None
        names = train.loss_types
        weights = train.loss_weights or [1.0] * len(names)
        return Objective(
            train.trainer, train.beta or 0.1, tuple(zip(names, weights, strict=True)), train.label_smoothing or 0.0,
            train.discopop_tau or 0.05, train.desirable_weight or 1.0, train.undesirable_weight or 1.0,
        )  # fmt: skip

    @property
    def has_reference(self) -> bool:
        return self.trainer != "orpo"

    @property
    def has_divergence(self) -> bool:
        """Whether the loss compares with mismatched completions of the global batch."""
        return self.trainer == "kto" and self.losses[0][0] == "kto"

    def losses_of(self, scores: Scores) -> torch.Tensor:
        """[N]; their mean over a global batch is the job's loss."""
        if self.trainer == "orpo":
            return scores.cross_entropy_N - self.beta * F.logsigmoid(_log_odds(scores))
        ratios_N3 = scores.logps_N3 - scores.reference_N3
        if self.trainer == "kto":
            ratio_N = self.beta * (ratios_N3[:, CHOSEN] - scores.divergence_N)
            desirable_N = self.desirable_weight * (1 - torch.sigmoid(ratio_N))
            return torch.where(scores.desirable_N > 0, desirable_N, self.undesirable_weight * torch.sigmoid(ratio_N))
        total_N = torch.zeros_like(scores.per_token_N)
        for name, weight in self.losses:
            if name == "sft":
                own_N = scores.cross_entropy_N
            else:
                own_N = self._pair_loss(name, ratios_N3[:, CHOSEN], ratios_N3[:, REJECTED], scores.counts_N3)
            total_N = total_N + weight * own_N
        return total_N

    def _pair_loss(
        self, name: str, chosen_N: torch.Tensor, rejected_N: torch.Tensor, counts_N3: torch.Tensor
    ) -> torch.Tensor:
        """[N] of log-ratios to the reference. Sources: TRL's documentation of DPOConfig.loss_type names a paper for each."""
        beta, smoothing = self.beta, self.label_smoothing
        margin_N = beta * (chosen_N - rejected_N)
        mean_margin_N = chosen_N / counts_N3[:, CHOSEN] - rejected_N / counts_N3[:, REJECTED]
        log_wins_N, log_loses_N = F.logsigmoid(margin_N), F.logsigmoid(-margin_N)
        match name:
            case "sigmoid":
                return -log_wins_N
            case "hinge":
                return torch.relu(1 - margin_N)
            case "ipo":
                return (mean_margin_N - 1 / (2 * beta)) ** 2
            case "sigmoid_norm":
                return -F.logsigmoid(beta * mean_margin_N)
            case "exo_pair":
                wins_N = log_wins_N.exp() * (log_wins_N - math.log1p(-smoothing))
                return wins_N + log_loses_N.exp() * (log_loses_N - math.log(smoothing))
            case "robust":
                return -((1 - smoothing) * log_wins_N - smoothing * log_loses_N) / (1 - 2 * smoothing)
            case "nca_pair":
                own_N, other_N = beta * chosen_N, beta * rejected_N
                return -F.logsigmoid(own_N) - 0.5 * F.logsigmoid(-own_N) - 0.5 * F.logsigmoid(-other_N)
            case "bco_pair":
                return -F.logsigmoid(beta * chosen_N) - F.logsigmoid(-beta * rejected_N)
            case "sppo_hard":
                return (chosen_N - 0.5 / beta) ** 2 + (rejected_N + 0.5 / beta) ** 2
            case "apo_zero":
                return 1 - torch.sigmoid(beta * chosen_N) + torch.sigmoid(beta * rejected_N)
            case "apo_down":
                return torch.sigmoid(beta * chosen_N) + 1 - torch.sigmoid(margin_N)
        assert name == "discopop"
        share_N = torch.sigmoid(margin_N / self.discopop_tau)
        loses_N = torch.exp(
            F.logsigmoid(margin_N / self.discopop_tau) - margin_N
        )  # in one, as the factors leave float64
        return -log_wins_N * (1 - share_N) + loses_N

    def told(self, scores: Scores) -> torch.Tensor:
        """[7] sums over samples: numbers of chosen and of rejected completions, their rewards, their log-probabilities, and how
        often the chosen one has the higher reward. Of kto by what is said of the completions."""
        logps_N3 = scores.logps_N3.detach()
        if self.trainer == "orpo":
            logps_N3 = logps_N3 / scores.counts_N3.clamp(min=1)
            rewards_N3 = self.beta * logps_N3
        else:
            rewards_N3 = self.beta * (logps_N3 - scores.reference_N3)
        if self.trainer == "kto":
            is_N2 = torch.stack([scores.desirable_N > 0, scores.desirable_N == 0], 1)
            pairs = [torch.where(is_N2, own_N3[:, CHOSEN, None], 0.0) for own_N3 in (rewards_N3, logps_N3)]
            wins = rewards_N3.new_zeros(1)
        else:
            is_N2 = torch.ones_like(logps_N3[:, CHOSEN:])
            pairs = [own_N3[:, CHOSEN:] for own_N3 in (rewards_N3, logps_N3)]
            wins = (rewards_N3[:, CHOSEN] > rewards_N3[:, REJECTED]).sum(0, keepdim=True)
        return torch.cat([is_N2.sum(0), *(pair.sum(0) for pair in pairs), wins]).double()

    def metrics(self, told: Sequence[float], divergence: float) -> dict[str, float]:
        """What is told of samples beside their loss, by TRL's names. told: as `told` gives it."""
        counts, rewards, logps, wins = told[:2], told[2:4], told[4:6], told[6]
        names = [(at, name) for at, name in enumerate(("chosen", "rejected")) if counts[at]]
        found = {f"rewards/{name}": rewards[at] / counts[at] for at, name in names}
        if self.trainer != "kto":
            found["rewards/accuracies"] = wins / counts[0]
        if len(names) == 2:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        found |= {f"logps/{name}": logps[at] / counts[at] for at, name in names}
        return found | {"kl": divergence} if self.has_divergence else found


def _log_odds(scores: Scores) -> torch.Tensor:
    """[N] logarithm of the odds of the chosen completion over those of the rejected one, by mean log-probabilities."""
    mean_N3 = scores.logps_N3 / scores.counts_N3.clamp(min=1)
    return _logit(mean_N3[:, CHOSEN]) - _logit(mean_N3[:, REJECTED])


def _logit(logp_N: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of log p <= 0. A completion that is learnt has p = 1 in the last bit: it is taken for the largest p < 1,
    whose loss and gradient are finite."""
    below_N = logp_N - torch.relu(logp_N.detach() + SURE)
    return below_N - torch.log(-torch.expm1(below_N))
