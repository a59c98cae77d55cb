"""Common parts of objectives of preferences: of two completions of a prompt, or of one that is judged, from log-probabilities
of whole completions. Their losses are in the folders dpo, kto and orpo.

The formulas are those of TRL's DPOTrainer, KTOTrainer and ORPOTrainer. A sample is the unit: a job's loss is the mean over the
samples of a global batch. All of it is computed in float64, for a few numbers a sample.

Shapes: N samples. Three columns: label tokens outside of completions, the chosen completion or the only one, the rejected one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from packlora.data.encode import Sample
from packlora.data.preference import compared
from packlora.engine.objective import Column, Evaluate, Facts, Objective, RowsView
from packlora.engine.rows import Row

CONTEXT, CHOSEN, REJECTED = range(3)
AT_ONCE = 4096
"""Samples whose references are found by one call, so that log-probabilities of few labels are held at a time."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Numbers that a loss is computed from, float64 on one device.

    logps_N3: sums of log-probabilities of the model's own tokens. reference_N3: the same of the reference. counts_N3: tokens.
    desirable_N: 1 or 0. per_token: samples of the global batch over its tokens of chosen parts, which weighs a token's cross
    entropy beside a sample's loss. divergence: estimate of the model's divergence from the reference, where the
    loss has one.
    """

    logps_N3: torch.Tensor
    reference_N3: torch.Tensor
    counts_N3: torch.Tensor
    desirable_N: torch.Tensor
    per_token: float
    divergence: float = 0.0

    @property
    def ratios_N3(self) -> torch.Tensor:
        """Log-ratios of the model to the reference."""
        return self.logps_N3 - self.reference_N3

    @property
    def cross_entropy_N(self) -> torch.Tensor:
        """Cross entropy of the chosen part, so that the mean over samples is the mean over the global batch's tokens."""
        return -(self.logps_N3[:, CONTEXT] + self.logps_N3[:, CHOSEN]) * self.per_token


class PreferenceObjective(Objective):
    """Objective of a job with preferences. beta: key of `train`. compares: whether a sample has two completions."""

    unit = "sample"
    columns = MappingProxyType(
        {"counts": Column("sample", 3), "reference": Column("sample", 3), "desirable": Column("sample")}
    )
    metrics = (
        "chosen", "rejected", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "rewards/accuracies",
    )  # fmt: skip
    has_reference = True
    compares = True
    _references: dict[int, np.ndarray] | None = None
    """Log-probabilities [3] of the groups of labels under the reference, by the id of a sample; None before `learn`."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    # --- what is known of samples ------------------------------------------------------------------------------------------

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """Tokens and reference log-probabilities of the groups of labels, and the label of a single completion. References are
        0 where the loss has none, and for a job that had ended before they were computed, whose numbers are not used.
        """
        samples, known = compared([row.sample for row in rows]), self._references
        reference_N3 = np.zeros((len(samples), 3))
        if known is not None:
            reference_N3 = np.stack([known[id(sample)] for sample in samples])
        desirable = [sample.desirable for sample in samples]
        counts_N3 = np.array([sample.group_counts for sample in samples], np.float64)
        return {"counts": counts_N3, "reference": reference_N3, "desirable": np.array(desirable, np.float64)}

    def facts(self, batch: Sequence[Sample]) -> Facts:
        """`per_token`, see Scores."""
        return {"per_token": len(batch) / sum(sum(sample.group_counts[:2]) for sample in compared(batch))}

    def learn(self, samples: Sequence[Sample], held_out: Sequence[Sample], evaluate: Evaluate) -> bool:
        """Find the log-probabilities of completions under the reference, which does not change while the job trains.

        The reference is what `train.reference` says: the frozen base model without an adapter, or with one. One forward for
        each sample is enough, in every session, for no file is written.
        """
        if not self.has_reference or self._references is not None:
            return True
        asked = [*samples, *held_out]
        lacking = list({id(sample): sample for sample in asked if id(sample) not in evaluate.known}.values())
        for start in range(0, len(lacking), AT_ONCE):
            some = lacking[start : start + AT_ONCE]
            if (found := evaluate.reference(some, keep=True)) is None:
                return False
            evaluate.known.update(zip(map(id, some), by_group(found, some), strict=True))
        self._references = evaluate.known
        return True

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
        raise NotImplementedError

    def rewards_of(self, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewards and log-probabilities [N, 3] of completions, for metrics."""
        return self.beta * scores.ratios_N3, scores.logps_N3

    def sums_of(self, scores: Scores) -> torch.Tensor:
        """Sums over samples [7]: numbers of chosen and of rejected completions, their rewards, their log-probabilities, and how
        often the chosen one has the higher reward. A completion that is judged is chosen if it is desirable."""
        found = [own_N3.detach() for own_N3 in self.rewards_of(scores)]
        if self.compares:
            is_N2, pairs = torch.ones_like(found[0][:, CHOSEN:]), [own_N3[:, CHOSEN:] for own_N3 in found]
            wins = (pairs[0][:, 0] > pairs[0][:, 1]).sum(0, keepdim=True)
        else:
            is_N2 = torch.stack([scores.desirable_N > 0, scores.desirable_N == 0], 1)
            pairs = [torch.where(is_N2, own_N3[:, CHOSEN, None], 0.0) for own_N3 in found]
            wins = found[0].new_zeros(1)
        return torch.cat([is_N2.sum(0), *(pair.sum(0) for pair in pairs), wins]).to(found[0].dtype)

    def report(self, sums: Sequence[float], facts: Facts) -> dict[str, float]:
        """Metrics by TRL's names. sums: as `sums_of` gives them."""
        counts, rewards, logps, wins = sums[:2], sums[2:4], sums[4:6], sums[6]
        names = [(at, name) for at, name in enumerate(("chosen", "rejected")) if counts[at]]
        found = {f"rewards/{name}": rewards[at] / counts[at] for at, name in names}
        if self.compares:
            found["rewards/accuracies"] = wins / counts[0]
        if len(names) == 2:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found | {f"logps/{name}": logps[at] / counts[at] for at, name in names}


def sums_by_group(values_L: torch.Tensor, counts_N3: np.ndarray) -> torch.Tensor:
    """Sum of the values of each group of labels [N, 3]; the labels of a group lie together."""
    parts = values_L.split(counts_N3.astype(np.int64).reshape(-1).tolist())
    return torch.stack([part.sum() for part in parts]).view(-1, 3)


def by_group(logps: Sequence[np.ndarray], samples: Sequence[Sample]) -> np.ndarray:
    """Sums [N, 3] by group of log-probabilities [l] of each sample."""
    counts_N3 = np.array([sample.group_counts for sample in compared(samples)])
    return sums_by_group(torch.from_numpy(np.concatenate(logps)), counts_N3).numpy()
