"""Cross entropy of the labels of completions, conversations and texts."""

from __future__ import annotations

from typing import Any

import torch

from packlora.engine.objective import Objective, RowsView


class CrossEntropy(Objective):
    """Mean over the label tokens of a global batch of -log p."""

    name = "sft"
    weights = "before"

    def loss(self, logp_L: torch.Tensor, rows: RowsView) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [L]; no metrics."""
        return -logp_L, logp_L.new_zeros(0)


CROSS_ENTROPY = CrossEntropy()


def objective(train: Any) -> Objective:
    """Objective of every such job."""
    return CROSS_ENTROPY
