"""kto in run files: which completions are desirable."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from packlora.config.shared import LEAST_WEIGHT, MOST_WEIGHT, Strict
from packlora.config.trainers import MARGINS, Declaration


class Keys(Strict):
    """Weights of the losses of desirable and of undesirable completions."""

    desirable_weight: float | None = Field(None, ge=LEAST_WEIGHT, le=MOST_WEIGHT)
    """kto: of the losses of desirable completions. null: 1."""
    undesirable_weight: float | None = Field(None, ge=LEAST_WEIGHT, le=MOST_WEIGHT)
    """kto: of the others. null: 1."""


def check(train: Any) -> None:
    """Raises ValueError where there is nothing to compare a completion with."""
    if train.loss_types == ("kto",) and train.global_batch_size < 2 and train.objective is None:
        raise ValueError(
            "global_batch_size is 1; loss_type kto compares with the completions of other samples of the global batch and "
            "takes at least 2; apo_zero_unpaired takes 1"
        )


DECLARATION = Declaration(
    rows="judged", learning_rate=5e-6, units=("per sample",), losses=("kto", "apo_zero_unpaired"),
    shared=("beta", "loss_type", "reference"), keys=Keys, compared=(MARGINS,), check=check,
)  # fmt: skip
