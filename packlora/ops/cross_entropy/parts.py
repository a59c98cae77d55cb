"""A part of the vocabulary: losses over all of it, from logits of the words that are here, and the gradient of these logits.

Shapes: C rows of a chunk, v words that are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from packlora.ops.cross_entropy.reference import IGNORE
from packlora.ops.cross_entropy.rows import has_kernels


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Consecutive rows of an output layer that are here; others have the rest, and make the same calls.

    words: of the vocabulary. start, count: of the rows here. share: the most rows that anyone has. join: own [2, C] to those of
    all parts, [parts, 2, C]. add_up: sums a tensor over all parts, in place.
    """

    words: int
    start: int
    count: int
    share: int
    join: Callable[[torch.Tensor], torch.Tensor]
    add_up: Callable[[torch.Tensor], None]


def part_gradient(
    logits_Cv: torch.Tensor, labels_C: torch.Tensor, weights_C: torch.Tensor, gradient: bool, part: VocabularyPart
) -> torch.Tensor:
    """Compute softmax.softmax_gradient from the logits [C, v] of a part of the vocabulary: the losses are those of
    the whole vocabulary, the gradient is that of the part."""
    here_C = labels_C - part.start
    sums_C, at_label_C = part.join(part_sums(logits_Cv, here_C, weights_C.dtype)).unbind(1)
    sum_C = sums_C.logsumexp(0)
    ignored_C = labels_C == IGNORE
    outside_C = ~ignored_C & ((labels_C < 0) | (labels_C >= part.words))
    losses_C = (sum_C - at_label_C.sum(0)).masked_fill_(ignored_C, 0).masked_fill_(outside_C, math.nan)
    if gradient:
        weights_C = weights_C.masked_fill(outside_C, math.nan)
        write_gradient(logits_Cv, here_C, weights_C, sum_C, ignored_C)
    return losses_C


def part_sums(logits_Cv: torch.Tensor, here_C: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[2, C] in a wide dtype: the logarithm of the sum of the exponentials, and the logit of the label, 0 where it is not here.

    Args:
        here_C: int64, the label's place in the part.
    """
    if has_kernels(logits_Cv):
        from packlora.ops.cross_entropy import triton_path

        return triton_path.part_sums(logits_Cv, here_C)
    is_here_C = (here_C >= 0) & (here_C < logits_Cv.shape[1])
    at_label_C = logits_Cv.gather(1, here_C.where(is_here_C, 0)[:, None])[:, 0].to(dtype)
    return torch.stack([logits_Cv.to(dtype).logsumexp(1), at_label_C.masked_fill(~is_here_C, 0)])


def write_gradient(
    logits_Cv: torch.Tensor, here_C: torch.Tensor, weights_C: torch.Tensor, sum_C: torch.Tensor, ignored_C: torch.Tensor
) -> None:
    """Overwrite the logits with weight * (softmax - one-hot), 0 in ignored rows.

    Args:
        here_C: see part_sums.
        sum_C: of the whole vocabulary, in the dtype of the weights.
    """
    if has_kernels(logits_Cv):
        from packlora.ops.cross_entropy import triton_path

        triton_path.part_gradient(logits_Cv, here_C, weights_C, sum_C, ignored_C)
        return
    wide_Cv = logits_Cv.to(weights_C.dtype)  # a copy, unless the logits are wide themselves
    wide_Cv.sub_(sum_C[:, None]).exp_().mul_(weights_C[:, None])
    is_here_C = (here_C >= 0) & (here_C < logits_Cv.shape[1])
    rows_C = torch.arange(len(here_C), device=here_C.device)
    wide_Cv[rows_C, here_C.where(is_here_C, 0)] -= weights_C.masked_fill(~is_here_C, 0)
    wide_Cv.masked_fill_(ignored_C[:, None], 0)
    if wide_Cv.data_ptr() != logits_Cv.data_ptr():
        logits_Cv.copy_(wide_Cv)
