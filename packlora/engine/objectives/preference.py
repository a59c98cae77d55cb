"""Losses of preferences: of two completions of a prompt, or of one that is judged, from log-probabilities of whole completions.

The formulas are those of TRL's DPOTrainer, KTOTrainer and ORPOTrainer. A sample is the unit: a job's loss is the mean over the
samples of a global batch. All of it is computed in float64, for a few numbers a sample.

Shapes: N samples. Three columns: label tokens outside of completions, the chosen completion or the only one, the rejected one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F

from packlora.config import TrainConfig
from packlora.data.encode import Sample
from packlora.data.preference import mismatched
from packlora.engine.objectives import Column, Evaluate, Facts, Objective, RowsView
from packlora.engine.rows import Row

CONTEXT, CHOSEN, REJECTED = range(3)
SURE = 2.0**-53
"""Less log p than this is p = 1 in float64."""


AT_ONCE = 4096
"""Samples whose references are found by one call, so that log-probabilities of few labels are held at a time."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Numbers that a loss is computed from, float64 on one device.

    logps_N3: sums of log-probabilities of the model's own tokens. reference_N3: the same of the reference. counts_N3: tokens.
    desirable_N: 1 or 0. per_token: samples of the global batch over its tokens of chosen parts, which weighs a token's cross
    entropy beside a sample's loss. divergence: estimate of the model's divergence from the reference (PreferenceObjective.
    estimate).
    """

    logps_N3: torch.Tensor
    reference_N3: torch.Tensor
    counts_N3: torch.Tensor
    desirable_N: torch.Tensor
    per_token: float
    divergence: float = 0.0

    @property
    def cross_entropy_N(self) -> torch.Tensor:
        """Cross entropy of the chosen part, so that the mean over samples is the mean over the global batch's tokens."""
        return -(self.logps_N3[:, CONTEXT] + self.logps_N3[:, CHOSEN]) * self.per_token


class PreferenceObjective(Objective):
    """Objective of a job with preferences.

    trainer, beta and the others: keys of `train`. losses: names with weights.
    """

    unit = "sample"
    columns = MappingProxyType(
        {"counts": Column("sample", 3), "reference": Column("sample", 3), "desirable": Column("sample")}
    )
    metrics = (
        "chosen", "rejected", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "rewards/accuracies",
    )  # fmt: skip

    def __init__(
        self, trainer: str, beta: float, losses: Sequence[tuple[str, float]], label_smoothing: float = 0.0,
        discopop_tau: float = 0.05, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
    ) -> None:  # fmt: skip
        self.name = self.trainer = trainer
        self.beta, self.losses, self.label_smoothing, self.discopop_tau = beta, losses, label_smoothing, discopop_tau
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight
        self.has_reference = trainer != "orpo"
        self.has_estimate = trainer == "kto" and losses[0][0] == "kto"
        self._references: dict[int, np.ndarray] | None = None
        """Log-probabilities [3] of the groups of labels under the reference, by the id of a sample; None before `learn`."""
        self._held_out: Sequence[Sample] = ()
        self._pairs: list[Sample] = []
        """Held-out samples with one another's completions, where the loss has a divergence."""

    @staticmethod
    def of(train: TrainConfig) -> PreferenceObjective:
        """Objective of a job whose trainer is not sft."""
        names = train.loss_types
        weights = train.loss_weights or [1.0] * len(names)
        return PreferenceObjective(
            train.trainer, train.beta or 0.1, tuple(zip(names, weights, strict=True)), train.label_smoothing or 0.0,
            train.discopop_tau or 0.05, train.desirable_weight or 1.0, train.undesirable_weight or 1.0,
        )  # fmt: skip

    # --- what is known of samples ------------------------------------------------------------------------------------------

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """Tokens and reference log-probabilities of the groups of labels, and the label of a single completion. References are
        0 where the loss has none, and for a job that had ended before they were computed, whose numbers are not used.
        """
        samples, known = [row.sample for row in rows], self._references
        reference_N3 = np.zeros((len(samples), 3))
        if known is not None:
            reference_N3 = np.stack([known[id(sample)] for sample in samples])
        desirable = [sample.preference is not None and sample.preference.desirable for sample in samples]
        counts_N3 = np.array([sample.group_counts for sample in samples], np.float64)
        return {"counts": counts_N3, "reference": reference_N3, "desirable": np.array(desirable, np.float64)}

    def why_not(self, samples: Sequence[Sample]) -> str | None:
        """Reason for a refusal of one sample: it has no other completion to be compared with."""
        if not self.has_estimate or len(samples) != 1:
            return None
        return (
            "is 1 sample; loss_type kto compares with the completions of other samples and takes at least 2; "
            "apo_zero_unpaired takes 1"
        )

    def doubts(self, samples: int, train: TrainConfig) -> list[str]:
        """A global batch of one sample is compared with itself."""
        if not self.has_estimate or train.drop_last or samples % train.global_batch_size != 1:
            return []
        return [
            "an epoch's last global batch is one sample, which loss_type kto compares with its own completion; set drop_last, "
            "or another global_batch_size"
        ]

    def longest_of(self, samples: Sequence[Sample]) -> int:
        """Tokens that a prompt with another sample's completion may have."""
        own = [sample for sample in samples if sample.preference is not None] if self.has_estimate else []
        if not own:
            return 0
        starts = [int(np.argmax(sample.is_label)) for sample in own]
        ends = [sample.num_tokens - start for sample, start in zip(own, starts, strict=True)]
        return min(max(starts) + max(ends), *(s.preference.limit for s in own if s.preference is not None))

    def facts(self, batch: Sequence[Sample]) -> Facts:
        """`per_token`, see Scores."""
        return {"per_token": len(batch) / sum(sum(sample.group_counts[:2]) for sample in batch)}

    def learn(self, samples: Sequence[Sample], held_out: Sequence[Sample], evaluate: Evaluate) -> bool:
        """Find the log-probabilities of completions under the reference, which does not change while the job trains.

        The reference is what `train.reference` says: the frozen base model without an adapter, or with one. One forward for
        each sample is enough, in every session, for no file is written.
        """
        if not self.has_reference or self._references is not None:
            return True
        self._held_out, self._pairs = held_out, mismatched(held_out) if self.has_estimate else []
        asked = [*samples, *held_out, *self._pairs]
        lacking = list({id(sample): sample for sample in asked if id(sample) not in evaluate.known}.values())
        for start in range(0, len(lacking), AT_ONCE):
            some = lacking[start : start + AT_ONCE]
            if (found := evaluate.reference(some, keep=True)) is None:
                return False
            evaluate.known.update(zip(map(id, some), by_group(found, some), strict=True))
        self._references = evaluate.known
        return True

    def estimate(self, batch: Sequence[Sample], evaluate: Evaluate) -> Facts | None:
        """`divergence`: how far the model is from its reference, as the loss of KTO takes it.

        TRL's estimate: the prompt of each sample with the completion of the one before, the first one's with that of the last;
        the mean over them of the model's log-probability less the reference's, at least 0, and a constant for the gradient.
        Completions are mismatched within a global batch in its order, whatever microbatches it is in, and within all held-out
        samples. So it is found before the first microbatch, by forwards without a gradient and without dropout.
        """
        if not self.has_estimate:
            return {}
        if batch is self._held_out and self._references is not None:
            pairs, reference_N3 = self._pairs, np.stack([self._references[id(pair)] for pair in self._pairs])
        else:
            pairs = mismatched(batch)
            if (found := evaluate.reference(pairs)) is None:
                return None
            reference_N3 = by_group(found, pairs)
        if (own := evaluate.own(pairs)) is None:
            return None
        mean = float((by_group(own, pairs) - reference_N3)[:, CHOSEN].mean())
        return {"divergence": mean if mean != mean else max(mean, 0.0)}

    # --- losses ------------------------------------------------------------------------------------------------------------

    def loss(self, logp_L: torch.Tensor, rows: RowsView) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [N], and seven sums over samples, see `sums_of`."""
        scores = Scores(
            sums_by_group(logp_L, rows.host["counts"]), rows.column("reference"), rows.column("counts"),
            rows.column("desirable"), rows.facts["per_token"], rows.facts.get("divergence", 0.0),
        )  # fmt: skip
        return self.losses_of(scores), self.sums_of(scores)

    def losses_of(self, scores: Scores) -> torch.Tensor:
        """[N]; their mean over a global batch is the job's loss."""
        if self.trainer == "orpo":
            return scores.cross_entropy_N - self.beta * F.logsigmoid(_log_odds(scores))
        ratios_N3 = scores.logps_N3 - scores.reference_N3
        if self.trainer == "kto":
            ratio_N = self.beta * (ratios_N3[:, CHOSEN] - scores.divergence)
            desirable_N = self.desirable_weight * (1 - torch.sigmoid(ratio_N))
            return torch.where(scores.desirable_N > 0, desirable_N, self.undesirable_weight * torch.sigmoid(ratio_N))
        total_N = torch.zeros_like(ratios_N3[:, CHOSEN])
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

    def sums_of(self, scores: Scores) -> torch.Tensor:
        """Sums over samples [7]: numbers of chosen and of rejected completions, their rewards, their log-probabilities, and how
        often the chosen one has the higher reward. For kto a completion is chosen that is said to be desirable."""
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
        return torch.cat([is_N2.sum(0), *(pair.sum(0) for pair in pairs), wins]).to(logps_N3.dtype)

    def report(self, sums: Sequence[float], facts: Facts) -> dict[str, float]:
        """Metrics by TRL's names. sums: as `sums_of` gives them."""
        counts, rewards, logps, wins = sums[:2], sums[2:4], sums[4:6], sums[6]
        names = [(at, name) for at, name in enumerate(("chosen", "rejected")) if counts[at]]
        found = {f"rewards/{name}": rewards[at] / counts[at] for at, name in names}
        if self.trainer != "kto":
            found["rewards/accuracies"] = wins / counts[0]
        if len(names) == 2:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        found |= {f"logps/{name}": logps[at] / counts[at] for at, name in names}
        return found | {"kl": facts.get("divergence", 0.0)} if self.has_estimate else found


def sums_by_group(values_L: torch.Tensor, counts_N3: np.ndarray) -> torch.Tensor:
    """Sum of the values of each group of labels [N, 3]; the labels of a group lie together."""
    parts = values_L.split(counts_N3.astype(np.int64).reshape(-1).tolist())
    return torch.stack([part.sum() for part in parts]).view(-1, 3)


def by_group(logps: Sequence[np.ndarray], samples: Sequence[Sample]) -> np.ndarray:
    """Sums [N, 3] by group of log-probabilities [l] of each sample."""
    counts_N3 = np.array([sample.group_counts for sample in samples])
    return sums_by_group(torch.from_numpy(np.concatenate(logps)), counts_N3).numpy()


def _log_odds(scores: Scores) -> torch.Tensor:
    """[N] logarithm of the odds of the chosen completion over those of the rejected one, by mean log-probabilities."""
    mean_N3 = scores.logps_N3 / scores.counts_N3.clamp(min=1)
    return _logit(mean_N3[:, CHOSEN]) - _logit(mean_N3[:, REJECTED])


def _logit(logp_N: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of log p <= 0. A completion that is learnt has p = 1 in the last bit: it is taken for the largest p < 1,
    whose loss and gradient are finite."""
    below_N = logp_N - torch.relu(logp_N.detach() + SURE)
    return below_N - torch.log(-torch.expm1(below_N))
