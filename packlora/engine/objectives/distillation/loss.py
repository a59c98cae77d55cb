"""Cross entropy of soft targets: the sum over the targets of a token of -weight log p.

The loss is the mean over the tokens of a global batch that have targets. A label of a row without targets is one of weight 1.
"""

from __future__ import annotations

from typing import Any

from packlora.engine.objectives.policy import WeightedCrossEntropy
from packlora.errors import InputError


class Distillation(WeightedCrossEntropy):
    """Weighted cross entropy under the name that run files have."""

    name = "distillation"


def objective(train: Any) -> Distillation:
    """Objective of a job. Raises InputError where its labels are to be smoothed."""
    if train.label_smoothing_factor:
        raise InputError(
            "train.label_smoothing_factor is for trainer sft; soft targets have the weights that their rows give them"
        )
    return Distillation()
