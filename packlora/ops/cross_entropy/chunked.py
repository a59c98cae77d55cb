"""Cross entropy after an output layer of any kind, such as one with adapters, without ever holding the logits of all rows.

As linear_cross_entropy.py, whose chunks and whose losses these are; but the output layer is called, and autograd gives the
gradients of its parameters with those of the hidden states, chunk by chunk.

Shapes: L label rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from packlora.ops.cross_entropy.linear_cross_entropy import CHUNK_BYTES, chunk_rows
from packlora.ops.cross_entropy.reference import IGNORE
from packlora.ops.cross_entropy.softmax import softmax_gradient
from packlora.ops.first_order import first_order

Logits = Callable[[torch.Tensor, int, int], torch.Tensor]
Weigh = Callable[[torch.Tensor, int, int], torch.Tensor]


def chunked_cross_entropy(
    hidden_LD: torch.Tensor,
    logits_of: Logits,
    parameters: Sequence[torch.Tensor],
    vocabulary: int,
    labels_L: torch.Tensor,
    weights_L: torch.Tensor | None = None,
    chunk_bytes: int | None = None,
    smoothing_L: torch.Tensor | None = None,
    weigh: Weigh | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of logits_of(hidden); softmax in float32 at least.

    Args:
        hidden_LD: gets a gradient.
        logits_of: gives the logits [stop - start, V] of hidden states that are those of rows start to stop. Nothing may need
            their values in a backward: they are written over.
        parameters: of the output layer, which get gradients.
        vocabulary: V.
        labels_L, weights_L, chunk_bytes, smoothing_L: as of linear_cross_entropy.
        weigh: gives more factors of the gradient [C], from the losses of rows start to stop; None: there are none.
        sizes: rows of each owner, whose sums are not to depend on others (owners.py); None: rows are cut evenly.

    Returns:
        As linear_cross_entropy. A parameter that no row has reached gets no gradient.
    """
    wide = torch.promote_types(hidden_LD.dtype, torch.float32)
    if weights_L is None:
        weights_L = torch.ones(len(labels_L), device=hidden_LD.device)
    budget = chunk_bytes or CHUNK_BYTES.get(hidden_LD.device.type, 2**26)
    rows = chunk_rows(len(labels_L), vocabulary, hidden_LD.dtype, budget)
    if sizes is not None:
        from packlora.ops.cross_entropy.owners import chunk_rows_of_owners

        rows = chunk_rows_of_owners(sizes, vocabulary, hidden_LD.dtype, budget)
    needed = torch.is_grad_enabled()
    losses_L, total = _Chunked.apply(
        hidden_LD, logits_of, weigh, labels_L, weights_L.detach().to(wide), rows, needed,
        None if smoothing_L is None else torch.where(labels_L == IGNORE, 0, smoothing_L.detach().to(wide)), *parameters,
    )  # fmt: skip
    return losses_L, total


def _towards_mean(logits_CV: torch.Tensor, labels_C: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Difference between the label's logit and the mean of all logits, [C]; of no word, anything."""
    label_C1 = labels_C.clamp(0, logits_CV.shape[1] - 1)[:, None]
    return logits_CV.gather(1, label_C1)[:, 0].to(dtype) - logits_CV.mean(1, dtype=dtype)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_LD: torch.Tensor, logits_of: Logits, weigh: Weigh | None, labels_L: torch.Tensor,
        weights_L: torch.Tensor, rows: list[int], needed: bool, smoothing_L: torch.Tensor | None, *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        losses_L = torch.empty_like(weights_L)
        of_hidden = torch.empty_like(hidden_LD) if ctx.needs_input_grad[0] else None
        grads: list[torch.Tensor | None] = [None] * len(parameters)
        wanted = [index for index, one in enumerate(parameters) if needed and one.requires_grad]
        start = 0
        for count in rows:
            stop = start + count
            with torch.set_grad_enabled(needed):
                given = hidden_LD[start:stop].detach().requires_grad_(needed)
                logits = logits_of(given, start, stop)
            d = logits.detach()
            at = slice(start, stop)
            smoothed_C = None if smoothing_L is None else _towards_mean(d, labels_L[at], losses_L.dtype)
            losses_L[at] = softmax_gradient(d, labels_L[at], weights_L[at], needed)
            if smoothing_L is not None and smoothed_C is not None:
                losses_L[at] += torch.where(smoothing_L[at] == 0, 0, smoothing_L[at] * smoothed_C)
                share_C1 = (weights_L[at] * smoothing_L[at])[:, None]
                label_C1 = labels_L[at, None].clamp(0, d.shape[1] - 1)
                d.sub_(share_C1 / d.shape[1]).scatter_add_(1, label_C1, share_C1.to(d.dtype))
            if weigh is not None and needed:
                d.mul_(weigh(losses_L[at], start, stop)[:, None].to(d.dtype))
            if needed:
                found = torch.autograd.grad(logits, [given, *(parameters[i] for i in wanted)], d, allow_unused=True)
                if of_hidden is not None and found[0] is not None:
                    of_hidden[start:stop] = found[0]
                for index, grad in zip(wanted, found[1:], strict=True):
                    if grad is not None:
                        before = grads[index]
                        grads[index] = grad if before is None else before.add_(grad)
            del given, logits, d  # before the next chunk's are made
            start = stop
        ctx.grads = of_hidden, grads
        ctx.mark_non_differentiable(losses_L)
        return losses_L, (losses_L * weights_L).sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, grads = ctx.grads
        ctx.grads = None
        d = grad_outputs[1]
        out = [None if grad is None else grad * d.to(grad.dtype) for grad in grads]
        return (None if of_hidden is None else of_hidden * d, *[None] * 7, *out)
