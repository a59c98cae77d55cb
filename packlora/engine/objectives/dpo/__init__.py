"""dpo in run files: which of two completions is preferred; and its losses, each an entry of LOSSES.

Sources: TRL's documentation of DPOConfig.loss_type names a paper for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from packlora.config.shared import LEAST_WEIGHT, MOST_WEIGHT, Strict
from packlora.config.trainers import ACCURACIES, MARGINS, Declaration
from packlora.errors import quoted


class Keys(Strict):
    """Weights of losses, and parameters of some."""

    loss_weights: list[float] | None = None
    """dpo: of each of loss_type; null: 1 for each."""
    label_smoothing: float | None = Field(None, ge=0, lt=1)
    """dpo, with robust or exo_pair: share of preferences that are taken to be the other way round."""
    discopop_tau: float | None = Field(None, ge=LEAST_WEIGHT, le=MOST_WEIGHT)
    """dpo, with discopop: its temperature. null: 0.05."""


LOSSES: Mapping[str, Callable[[Any], Any]] = {
    "sigmoid": lambda pair: -pair.log_wins_N,
    "hinge": lambda pair: (1 - pair.margin_N).relu(),
    "ipo": lambda pair: (pair.mean_margin_N - 1 / (2 * pair.beta)) ** 2,
    "exo_pair": lambda pair: (
        pair.log_wins_N.exp() * (pair.log_wins_N - math.log1p(-pair.smoothing))
        + pair.log_loses_N.exp() * (pair.log_loses_N - math.log(pair.smoothing))
    ),
    "nca_pair": lambda pair: -pair.log_p(pair.own_N) - 0.5 * pair.log_p(-pair.own_N) - 0.5 * pair.log_p(-pair.other_N),
    "robust": lambda pair: (
        -((1 - pair.smoothing) * pair.log_wins_N - pair.smoothing * pair.log_loses_N) / (1 - 2 * pair.smoothing)
    ),
    "bco_pair": lambda pair: -pair.log_p(pair.own_N) - pair.log_p(-pair.other_N),
    "sppo_hard": lambda pair: (pair.chosen_N - 0.5 / pair.beta) ** 2 + (pair.rejected_N + 0.5 / pair.beta) ** 2,
    "apo_zero": lambda pair: 1 - pair.own_N.sigmoid() + pair.other_N.sigmoid(),
    "apo_down": lambda pair: pair.own_N.sigmoid() + 1 - pair.margin_N.sigmoid(),
    "discopop": lambda pair: (  # the last term in one, as its factors leave float64
        -pair.log_wins_N * (1 - (pair.margin_N / pair.tau).sigmoid())
        + (pair.log_p(pair.margin_N / pair.tau) - pair.margin_N).exp()
    ),
    "sft": lambda pair: pair.cross_entropy_N,
    "sigmoid_norm": lambda pair: -pair.log_p(pair.beta * pair.mean_margin_N),
}
"""Losses [N] of pairs (loss.py, Pair) by loss_type; the first one is the default."""


def check(train: Any) -> None:
    """Raises ValueError where weights and parameters do not go with the losses."""
    types, weights, smoothing = train.loss_types, train.loss_weights or [], train.label_smoothing
    if train.loss_weights is not None and len(weights) != len(types):
        raise ValueError(f"loss_weights has {len(weights)} numbers for {len(types)} losses")
    if odd := [weight for weight in weights if not 0 <= weight <= MOST_WEIGHT]:
        raise ValueError(f"loss_weights has {odd[0]}; a weight is a number from 0 to {MOST_WEIGHT:g}")
    if weights and max(weights) < LEAST_WEIGHT:
        raise ValueError(
            f"loss_weights is {quoted(weights)}, so nothing would be learnt; one of them is at least {LEAST_WEIGHT:g}"
        )
    if smoothing and not {"robust", "exo_pair"} & set(types):
        raise ValueError("label_smoothing goes with loss_type robust or exo_pair")
    if "exo_pair" in types and not smoothing:
        raise ValueError("loss_type exo_pair needs label_smoothing above 0, such as 1e-3")
    if "robust" in types and (smoothing or 0) >= 0.5:
        raise ValueError(f"label_smoothing is {smoothing}; robust takes less than 0.5")
    if "discopop" not in types and train.discopop_tau is not None:
        raise ValueError("discopop_tau goes with loss_type discopop")


DECLARATION = Declaration(
    rows="pairs", takes_images=True, learning_rate=5e-6, units=("nats per pair", "per pair"), losses=tuple(LOSSES),
    adds_losses=True, refused=dict.fromkeys(("aot", "aot_unpaired"), "sorts the whole global batch"), keys=Keys, check=check,
    shared=("beta", "loss_type", "reference"), metrics=(ACCURACIES, MARGINS),
)  # fmt: skip
