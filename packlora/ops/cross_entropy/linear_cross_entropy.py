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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from packlora.ops.cross_entropy.rows import columns, gradient_of, has_kernels, logits_of
from packlora.ops.cross_entropy.softmax import softmax_gradient
from packlora.ops.first_order import first_order

if TYPE_CHECKING:
    from packlora.ops.cross_entropy.parts import VocabularyPart

CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}
"""Bytes of a chunk's logits, and of their float32 copy where one is made (the kernels make none). A GPU needs about 1,000 rows
to read a large weight at the speed of its matrix products."""
ROWS_WITH_EQUAL_BITS = 16
"""Products of fewer rows take other routines with other rounding; chunks are never smaller, unless L is."""


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
        not has_kernels(hidden_LD),
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
        compute, start = softmax_gradient, 0
        if part is not None:
            from packlora.ops.cross_entropy.parts import part_gradient

            compute = partial(part_gradient, part=part)
        for count in rows:
            chunk = slice(start, start + count)
            logits_CV = logits_of(hidden_LD[chunk], weight_VD)
            if bias_V is not None:
                logits_CV += bias_V
            what = logits_CV, labels_L[chunk], weights_L[chunk], gradient_LD is not None
            losses_L[chunk] = compute(*what)
            if gradient_LD is not None:
                gradient_of(logits_CV, weight_VD, gradient_LD[chunk])
            del logits_CV, what  # before the next chunk's are made
            start += count
        if smoothing_L is not None:
            from packlora.ops.cross_entropy.smoothing import smooth

            smooth(losses_L, gradient_LD, hidden_LD, weight_VD, bias_V, labels_L, weights_L, rows, part, smoothing_L)
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
