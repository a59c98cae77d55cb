"""Losses of a chunk of logits, and their gradient written over them, by torch's operations; in any float dtype.

Shapes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import math

import torch

from packlora.ops.cross_entropy.reference import IGNORE


def softmax_gradient(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, weights_C: torch.Tensor, gradient: bool
) -> torch.Tensor:
    """Losses [C] in the dtype of the weights, float32 at least. With gradient, the logits are overwritten:
    weight * (softmax - one-hot); else what they hold afterwards is of no use.

    Args:
        labels_C: int64; the row of IGNORE gives 0, that of a label outside the vocabulary NaN.
        weights_C: of each loss in the total.
    """
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


# --- a part of the vocabulary ------------------------------------------------------------------------------------------
# v: words that are here.


def part_sums(logits_Cv: torch.Tensor, here_C: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[2, C] in a wide dtype: the logarithm of the sum of the exponentials, and the logit of the label, 0 where it is not here.

    Args:
        here_C: int64, the label's place in the part.
    """
    is_here_C = (here_C >= 0) & (here_C < logits_Cv.shape[1])
    at_label_C = logits_Cv.gather(1, here_C.where(is_here_C, 0)[:, None])[:, 0].to(dtype)
    return torch.stack([logits_Cv.to(dtype).logsumexp(1), at_label_C.masked_fill(~is_here_C, 0)])


def part_gradient(
    logits_Cv: torch.Tensor, here_C: torch.Tensor, weights_C: torch.Tensor, sum_C: torch.Tensor, ignored_C: torch.Tensor
) -> None:
    """Overwrite the logits with weight * (softmax - one-hot), 0 in ignored rows.

    Args:
        here_C: see part_sums.
        sum_C: of the whole vocabulary, in the dtype of the weights.
    """
    wide_Cv = logits_Cv.to(weights_C.dtype)  # a copy, unless the logits are wide themselves
    wide_Cv.sub_(sum_C[:, None]).exp_().mul_(weights_C[:, None])
    is_here_C = (here_C >= 0) & (here_C < logits_Cv.shape[1])
    rows_C = torch.arange(len(here_C), device=here_C.device)
    wide_Cv[rows_C, here_C.where(is_here_C, 0)] -= weights_C.masked_fill(~is_here_C, 0)
    wide_Cv.masked_fill_(ignored_C[:, None], 0)
    if wide_Cv.data_ptr() != logits_Cv.data_ptr():
        logits_Cv.copy_(wide_Cv)
