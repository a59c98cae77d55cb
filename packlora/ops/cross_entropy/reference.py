"""Specification of a frozen output layer with cross entropy; the operator is tested against this file.

Shapes: L label rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE = -100
"""Label of rows that count nothing: loss 0, gradient 0. The value of torch's cross_entropy."""


def cross_entropy(
    hidden_LD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_L: torch.Tensor,
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Losses [L] of logits = hidden weight' + bias in hidden's dtype; softmax in float32 at least. All logits are held.

    smoothing: share of every label that all words have in equal parts.
    """
    logits_LV = F.linear(hidden_LD, weight_VD, bias_V)
    wide_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    return F.cross_entropy(wide_LV, labels_L, reduction="none", ignore_index=IGNORE, label_smoothing=smoothing)
