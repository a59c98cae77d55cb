"""Cross entropy of soft targets: the sum over the targets of a token of -weight log p.

The loss is the mean over the tokens of a global batch that have targets. A label of a row without targets is one of weight 1.
"""

from __future__ import annotations

from typing import Any

from packlora.engine.objectives.policy import WeightedCrossEntropy


class Distillation(WeightedCrossEntropy):
    """Weighted cross entropy under the name that run files have."""

    name = "distillation"


def objective(train: Any) -> Distillation:
    """Objective of a job."""
    return Distillation()
