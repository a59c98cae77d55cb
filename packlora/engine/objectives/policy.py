"""Losses of policies: weighted cross entropy, and policy gradients with a ratio to the model that has sampled the tokens.

For a token: p its log-probability now, q its log-probability when it was sampled, A its advantage, r = exp(p - q).

    cross_entropy        -w p                                     any weight w, of any sign; soft targets are several labels
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)          Schulman et al., arXiv 1707.06347
    cispo                -sg(clip(r, low, high)) A p              MiniMax-M1, arXiv 2506.13585
    dro                  -(p A - beta/2 (p - q)^2)                Richemond et al., arXiv 2405.19107
    gspo                 ppo with s = exp(mean of p - q over the sample's tokens) for r      Zheng et al., arXiv 2507.18071

sg: a constant for the gradient. The gradient of gspo goes to each token with its own advantage (GSPO-token: s is replaced by
sg(s / r) r). Losses are computed in float64, one of each label; the mean over the labels of a global batch is the job's loss.

Two things may be added: a correction, which multiplies a label's loss, of samples that a third policy has drawn; and KL, a
weight times exp(q0 - p) - (q0 - p) - 1, the estimate of the divergence from a reference with log-probabilities q0 that GRPO has
(Schulman's k3).

Shapes: L labels of N samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from packlora.engine.objective import Column, Facts, Objective, RowsView
from packlora.engine.rows import Row

WEIGHT, SAMPLED, ADVANTAGE, LOW, HIGH, COUNTED = "weights", "logprobs", "advantages", "low", "high", "counted"
CORRECTION, REFERENCE, SHARE = "correction", "reference", "share"
"""Names of columns of samples. COUNTED: 1 or 0, whether a label is a token of the policy, which gspo's mean is over."""
Over = Literal["tokens", "samples", "constant"]
"""What a job's loss is a mean over: all tokens (DAPO, BNPO), the tokens of a sample and then samples (GRPO), or samples of a
length that is set (Dr.GRPO)."""
CLIPPED, DRIFT, KL = "clip_ratio/region_mean", "sampling/kl", "kl"
CLIP = (0.8, 1.2)
"""Lowest and highest ratio that is not clipped."""
BETA = 0.05
"""Weight of the square in `dro`."""


class WeightedCrossEntropy(Objective):
    """Sum of -w p with a weight w for each label, of any sign."""

    name = "cross_entropy"
    weights = "row"
    columns = MappingProxyType({WEIGHT: Column("label")})

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """Weights [L]."""
        return {WEIGHT: _joined(rows, WEIGHT, 1.0)}

    def loss(self, logp_L: torch.Tensor, rows: RowsView) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [L]; no metrics."""
        return -rows.column(WEIGHT) * logp_L, logp_L.new_zeros(0)

    def factors(self, rows: RowsView) -> torch.Tensor:
        """See Objective."""
        return rows.column(WEIGHT)


class PolicyObjective(Objective):
    """A policy gradient.

    Args:
        name: importance_sampling, ppo, cispo, dro or gspo.
        clip: lowest and highest ratio, of labels whose sample has no columns `low` and `high`; not for importance_sampling and
            dro.
        beta: of dro.
        over: what the loss is a mean over. length: tokens of a sample, for `constant`.
        kl: weight of the divergence from a reference.

    Samples have columns `logprobs` and `advantages`; for gspo `counted` (1 where it is missing), for `kl` above 0 `reference`,
    and maybe `correction`.
    """

    def __init__(
        self, name: str, clip: tuple[float, float] = CLIP, beta: float = BETA, over: Over = "tokens", length: int = 1,
        kl: float = 0.0,
    ) -> None:  # fmt: skip
        self.name, self.clip, self.beta, self.over, self.length, self.kl = name, clip, beta, over, length, kl
        self.weights = "sample" if name == "gspo" else "row"
        self.metrics = (CLIPPED, DRIFT, KL) if kl else (CLIPPED, DRIFT)
        self._loss = _LOSSES[name]
        names = [SAMPLED, ADVANTAGE, CORRECTION]
        names += [LOW, HIGH] if name in CLIPS else []
        names += [COUNTED] if name == "gspo" else []
        names += [REFERENCE] if kl else []
        names += [SHARE] if over != "tokens" else []
        self.columns = {name: Column("label") for name in names}

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """Values of each column [L]."""
        default = {LOW: self.clip[0], HIGH: self.clip[1], COUNTED: 1.0, CORRECTION: 1.0}
        found = {name: _joined(rows, name, default.get(name)) for name in self.columns if name != SHARE}
        if self.over != "tokens":
            counts = np.array([row.sample.num_labels for row in rows])
            own = 1.0 / (counts if self.over == "samples" else np.full(len(counts), self.length))
            found[SHARE] = np.repeat(own, counts)
        return found

    def loss(self, logp_L: torch.Tensor, rows: RowsView) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [L], and sums over labels: 1 for a ratio that is clipped, as TRL counts it; q - p, whose mean estimates the
        divergence of the policy that sampled from the present one; and KL without its weight."""
        away_L = logp_L - rows.column(SAMPLED)
        losses_L, outside_L = self._loss(self, logp_L, away_L, rows)
        losses_L = losses_L * rows.column(CORRECTION)
        sums = [outside_L.to(away_L.dtype).sum(), -away_L.detach().sum()]
        if self.kl:
            from_L = rows.column(REFERENCE) - logp_L
            kl_L = from_L.exp() - from_L - 1
            losses_L = losses_L + self.kl * kl_L
            sums.append(kl_L.detach().sum())
        if self.over != "tokens":
            losses_L = losses_L * rows.column(SHARE) * (rows.facts["units"] / rows.facts["samples"])
        return losses_L, torch.stack(sums)

    def report(self, sums: Sequence[float], facts: Facts) -> dict[str, float]:
        """Means over the labels of the global batch."""
        return {name: value / facts["units"] for name, value in zip(self.metrics, sums, strict=True)}

    # --- losses and whether ratios are outside, each [L] -------------------------------------------------------------------

    def _importance(self, logp_L: torch.Tensor, away_L: torch.Tensor, rows: RowsView) -> _Found:
        return -away_L.exp() * rows.column(ADVANTAGE), torch.zeros_like(away_L)

    def _ppo(self, logp_L: torch.Tensor, away_L: torch.Tensor, rows: RowsView) -> _Found:
        ratio_L, clipped_L, outside_L = _clipped(away_L, rows)
        own_L = rows.column(ADVANTAGE)
        return -torch.minimum(ratio_L * own_L, clipped_L * own_L), outside_L

    def _cispo(self, logp_L: torch.Tensor, away_L: torch.Tensor, rows: RowsView) -> _Found:
        _, clipped_L, outside_L = _clipped(away_L.detach(), rows)
        return -clipped_L * rows.column(ADVANTAGE) * logp_L, outside_L

    def _dro(self, logp_L: torch.Tensor, away_L: torch.Tensor, rows: RowsView) -> _Found:
        return self.beta / 2 * away_L**2 - rows.column(ADVANTAGE) * logp_L, torch.zeros_like(away_L)

    def _gspo(self, logp_L: torch.Tensor, away_L: torch.Tensor, rows: RowsView) -> _Found:
        counted_L = (rows.column(COUNTED) != 0).to(away_L.dtype)
        kept_L = away_L.detach() * counted_L
        mean_N = rows.per_sample(kept_L) / rows.per_sample(counted_L).clamp(min=1)
        lengths_N = torch.tensor(rows.lengths, device=away_L.device)
        of_sample_L = mean_N.repeat_interleave(lengths_N, output_size=len(away_L))
        losses_L, outside_L = self._ppo(logp_L, of_sample_L + away_L - away_L.detach(), rows)
        return losses_L * counted_L, outside_L * counted_L


_Found = tuple[torch.Tensor, torch.Tensor]
_LOSSES: Mapping[str, Callable[[PolicyObjective, torch.Tensor, torch.Tensor, RowsView], _Found]] = {
    "importance_sampling": PolicyObjective._importance,
    "ppo": PolicyObjective._ppo,
    "cispo": PolicyObjective._cispo,
    "dro": PolicyObjective._dro,
    "gspo": PolicyObjective._gspo,
}
CLIPS = ("ppo", "cispo", "gspo")
POLICY_LOSSES = tuple(_LOSSES)


def _clipped(away_L: torch.Tensor, rows: RowsView) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ratios, ratios between their bounds, and whether one is outside on the side to which its advantage drives it, [L]
    each."""
    low_L, high_L, ratio_L, gain_L = rows.column(LOW), rows.column(HIGH), away_L.exp(), rows.column(ADVANTAGE)
    clipped_L = torch.minimum(torch.maximum(ratio_L, low_L), high_L)
    return ratio_L, clipped_L, ((ratio_L < low_L) & (gain_L < 0)) | ((ratio_L > high_L) & (gain_L > 0))


def _joined(rows: Sequence[Row], name: str, default: float | None) -> np.ndarray:
    """Values [L] of a column of samples; the default where a sample has none."""
    found = [row.sample.columns[name] if default is None else row.sample.columns.get(name, default) for row in rows]
    return np.concatenate([np.broadcast_to(own, row.sample.num_labels) for own, row in zip(found, rows, strict=True)])
