"""Cross entropy after a frozen output layer, without ever holding the logits of all rows.

Rows are taken in chunks: their logits, their losses, and at once the gradient with respect to their hidden states, for which
the weight of each loss in the total has to be known beforehand. What is kept for backward is that gradient [L, D] alone.

    losses_L, total = linear_cross_entropy(hidden_LD, weight_VD, bias_V, labels_L, weights_L)
    total.backward()

The losses carry no gradient of their own; the total does, and it is the only way in. So no other weights than those given
can be asked for by mistake, and whatever the total is multiplied with comes out multiplied, as it should.

Rows never meet: a NaN in one stays in its loss and its gradient (and in the number `total`, which backward does not read).
In float32 and bfloat16 on the CPU a row has the same bits whatever the other rows are, as long as there are
ROWS_WITH_EQUAL_BITS of them; in float64 and on a GPU the rounding of a product depends on its size. No atomics: the same
rows give the same bits every time.

Shapes: L label rows, D hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from packlora.ops.cross_entropy import torch_path
from packlora.ops.cross_entropy.reference import IGNORE
from packlora.ops.cross_entropy.rows import columns, gradient_of, logits_of
from packlora.ops.first_order import first_order
from packlora.ops.gpu import runs_triton

CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}
"""Bytes of a chunk's logits, and of their float32 copy where one is made (the kernels make none). A GPU needs about 1,000 rows
to read a large weight at the speed of its matrix products."""
ROWS_WITH_EQUAL_BITS = 16
"""Products of fewer rows take other routines with other rounding; chunks are never smaller, unless L is."""


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


def linear_cross_entropy(
    hidden_LD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_L: torch.Tensor,
    weights_L: torch.Tensor | None = None,
    chunk_bytes: int | None = None,
    part: VocabularyPart | None = None,
    smoothing_L: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of logits = hidden weight' + bias, which are rounded to hidden's dtype; softmax in float32 at least.

    Args:
        hidden_LD: [L, D]; the only operand that gets a gradient.
        weight_VD, bias_V: of the output layer, frozen, in hidden's dtype.
        labels_L: int64; reference.IGNORE counts nothing. A label outside the vocabulary gives NaN.
        weights_L: of each loss in the total; None is 1 for each.
        chunk_bytes: memory for the logits of a chunk; None is CHUNK_BYTES of the device.
        part: which rows of the output layer weight_VD and bias_V are; None: all. Losses and the gradient are those of the whole
            vocabulary, for one message a chunk and one for the gradient.
        smoothing_L: share of each label that all words have in equal parts, as of torch's label_smoothing; None: 0 for each.

    Returns:
        losses [L], without gradient, and their weighted sum, a number with one; float32 (float64 for float64 operands).

    Raises:
        ValueError: an operand's shape or the weight's dtype does not fit, or the output layer is not frozen.
    """
    (L, D), V = hidden_LD.shape, len(weight_VD)
    if weight_VD.shape != (V, D) or (bias_V is not None and bias_V.shape != (V,)):
        raise ValueError(
            f"hidden states of {D} features do not fit an output layer {tuple(weight_VD.shape)} and its bias"
        )
    if weight_VD.dtype != hidden_LD.dtype:
        raise ValueError(
            f"hidden states of {hidden_LD.dtype} do not fit an output layer of {weight_VD.dtype}; cast one of them, also under "
            "torch.autocast, which does not reach into this loss"
        )
    for name, tensor in (("labels", labels_L), ("weights", weights_L), ("smoothing", smoothing_L)):
        if tensor is not None and tensor.shape != (L,):
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} for {L} rows; there must be one a row")
    if torch.is_grad_enabled() and (weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad)):
        raise ValueError("the output layer must be frozen: this loss gives it no gradient")
    wide = torch.promote_types(hidden_LD.dtype, torch.float32)
    if weights_L is None:
        weights_L = torch.ones(L, device=hidden_LD.device)
    rows = chunk_rows(
        L,
        columns(V if part is None else part.share, hidden_LD.device),
        hidden_LD.dtype,
        chunk_bytes or CHUNK_BYTES.get(hidden_LD.device.type, 2**26),
        not _has_kernels(hidden_LD),
    )
    losses_L, total = _LinearCrossEntropy.apply(
        hidden_LD, weight_VD, bias_V, labels_L, weights_L.detach().to(wide), rows, part,
        None if smoothing_L is None else smoothing_L.detach().to(wide),
    )  # fmt: skip
    return losses_L, total


def chunk_rows(L: int, V: int, dtype: torch.dtype, budget: int, copied: bool = True) -> list[int]:
    """Rows of each chunk: as few chunks as the bytes allow, as equal as they can be, so that none is tiny. copied: whether a
    copy of logits in 16 bits is made in float32."""
    number = math.ceil(L / most_rows(V, dtype, budget, copied))
    return [L // number + (index < L % number) for index in range(number)] if number else []


def most_rows(V: int, dtype: torch.dtype, budget: int, copied: bool = True) -> int:
    """Most rows of a chunk. Arguments as of chunk_rows."""
    wide = torch.promote_types(dtype, torch.float32)
    return max(2 * ROWS_WITH_EQUAL_BITS, budget // (V * (dtype.itemsize + wide.itemsize * (copied and wide != dtype))))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_LD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_L: torch.Tensor,
        weights_L: torch.Tensor,
        rows: list[int],
        part: VocabularyPart | None,
        smoothing_L: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses_L = torch.empty_like(weights_L)
        gradient_LD = torch.empty_like(hidden_LD) if ctx.needs_input_grad[0] else None
        start = 0
        for count in rows:
            chunk = slice(start, start + count)
            logits_CV = logits_of(hidden_LD[chunk], weight_VD)
            if bias_V is not None:
                logits_CV += bias_V
            what = logits_CV, labels_L[chunk], weights_L[chunk], gradient_LD is not None
            losses_L[chunk] = softmax_gradient(*what) if part is None else part_gradient(*what, part)
            if gradient_LD is not None:
                gradient_of(logits_CV, weight_VD, gradient_LD[chunk])
            del logits_CV, what  # before the next chunk's are made
            start += count
        if smoothing_L is not None:
            _smooth(losses_L, gradient_LD, hidden_LD, weight_VD, bias_V, labels_L, weights_L, rows, part, smoothing_L)
        if part is not None and gradient_LD is not None:
            part.add_up(gradient_LD)
        ctx.save_for_backward(gradient_LD)
        ctx.mark_non_differentiable(losses_L)
        return losses_L, (losses_L * weights_L).sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_LD,) = ctx.saved_tensors
        return gradient_LD * grad_outputs[1], None, None, None, None, None, None, None


def _smooth(
    losses_L: torch.Tensor, gradient_LD: torch.Tensor | None, hidden_LD: torch.Tensor, weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None, labels_L: torch.Tensor, weights_L: torch.Tensor, rows: list[int],
    part: VocabularyPart | None, smoothing_L: torch.Tensor,
) -> None:  # fmt: skip
    """Add what smoothing of labels makes of the losses, and of the gradient that is here."""
    from packlora.ops.cross_entropy.smoothing import Smoothing

    words, first = (len(weight_VD), 0) if part is None else (part.words, part.start)
    smoothing, added_L, start = (
        Smoothing(weight_VD, bias_V, words, first, weights_L.dtype),
        torch.empty_like(losses_L),
        0,
    )
    for count in rows:
        chunk = slice(start, start + count)
        added_L[chunk], gradient_CD = smoothing.term(hidden_LD[chunk], labels_L[chunk], smoothing_L[chunk])
        if gradient_LD is not None:
            gradient_LD[chunk] += (weights_L[chunk, None] * gradient_CD).to(gradient_LD.dtype)
        start += count
    if part is not None:
        part.add_up(added_L)
    losses_L += added_L


def softmax_gradient(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, weights_C: torch.Tensor, gradient: bool
) -> torch.Tensor:
    """Losses [C] in the dtype of the weights. With gradient, the logits are overwritten: weight * (softmax - one-hot)."""
    if _has_kernels(logits_CV):
        from packlora.ops.cross_entropy import triton_path

        return triton_path.softmax_gradient(logits_CV, labels_C, weights_C, gradient)
    return torch_path.softmax_gradient(logits_CV, labels_C, weights_C, gradient)


def part_gradient(
    logits_Cv: torch.Tensor, labels_C: torch.Tensor, weights_C: torch.Tensor, gradient: bool, part: VocabularyPart
) -> torch.Tensor:
    """Compute softmax_gradient from the logits [C, v] of a part of the vocabulary: the losses are those of the whole
    vocabulary, the gradient is that of the part."""
    here_C = labels_C - part.start
    sums_C, at_label_C = part.join(_part_sums(logits_Cv, here_C, weights_C.dtype)).unbind(1)
    sum_C = sums_C.logsumexp(0)
    ignored_C = labels_C == IGNORE
    outside_C = ~ignored_C & ((labels_C < 0) | (labels_C >= part.words))
    losses_C = (sum_C - at_label_C.sum(0)).masked_fill_(ignored_C, 0).masked_fill_(outside_C, math.nan)
    if gradient:
        weights_C = weights_C.masked_fill(outside_C, math.nan)
        _part_gradient(logits_Cv, here_C, weights_C, sum_C, ignored_C)
    return losses_C


def _part_sums(logits_Cv: torch.Tensor, here_C: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if _has_kernels(logits_Cv):
        from packlora.ops.cross_entropy import triton_path

        return triton_path.part_sums(logits_Cv, here_C)
    return torch_path.part_sums(logits_Cv, here_C, dtype)


def _part_gradient(logits_Cv: torch.Tensor, *operands: torch.Tensor) -> None:
    if _has_kernels(logits_Cv):
        from packlora.ops.cross_entropy import triton_path

        triton_path.part_gradient(logits_Cv, *operands)
    else:
        torch_path.part_gradient(logits_Cv, *operands)


def _has_kernels(logits: torch.Tensor) -> bool:
    return runs_triton(logits.device) and logits.dtype != torch.float64
