"""Losses of a chunk of logits, and their gradient written over them: by kernels, or by torch's operations in any float dtype.

Shapes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import math

import torch

from packlora.ops.cross_entropy.reference import IGNORE
from packlora.ops.cross_entropy.rows import has_kernels


def softmax_gradient(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, weights_C: torch.Tensor, gradient: bool
) -> torch.Tensor:
    """Losses [C] in the dtype of the weights, float32 at least. With gradient, the logits are overwritten:
    weight * (softmax - one-hot); else what they hold afterwards is of no use.

    Args:
        labels_C: int64; the row of IGNORE gives 0, that of a label outside the vocabulary NaN.
        weights_C: of each loss in the total.
    """
    if has_kernels(logits_CV):
        from packlora.ops.cross_entropy import triton_path

        return triton_path.softmax_gradient(logits_CV, labels_C, weights_C, gradient)
    V = logits_CV.shape[1]
    ignored_C = labels_C == IGNORE
    outside_C = ~ignored_C & ((labels_C < 0) | (labels_C >= V))
    label_C1 = labels_C.masked_fill(ignored_C | outside_C, 0)[:, None]
    wide_CV = logits_CV.to(weights_C.dtype)  # a copy, unless the logits are wide themselves
    wide_CV -= wide_CV.amax(1, keepdim=True)
    at_label_C = wide_CV.gather(1, label_C1)[:, 0]
    sum_C = wide_CV.exp_().sum(1)
    losses_C = (sum_C.log() - at_label_C).masked_fill_(ignored_C, 0).masked_fill_(outside_C, math.nan)
    if gradient:
        weights_C = weights_C.masked_fill(outside_C, math.nan)
        wide_CV *= (weights_C / sum_C)[:, None]
        wide_CV[torch.arange(len(labels_C), device=labels_C.device), label_C1[:, 0]] -= weights_C
        wide_CV.masked_fill_(ignored_C[:, None], 0)
        if wide_CV.data_ptr() != logits_CV.data_ptr():
            logits_CV.copy_(wide_CV)
    return losses_C
