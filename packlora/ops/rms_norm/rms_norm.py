"""RMS norm with a frozen weight: no gradient of the weight is computed, and nothing but x is kept for the backward.

With y = xh (weight + offset), xh = x rstd, rstd = 1 / sqrt(mean(x^2) + eps) and g = dL/dy (weight + offset):

    dL/dx = rstd (g - xh mean(g xh))        means by row

rstd is computed again in the backward, which reads x in any case. Rows never meet: a NaN in one reaches no other. The same
rows have the same bits every time.

Shapes: x [..., D], weight [D].
"""

from __future__ import annotations

from typing import Any

import torch

from packlora.ops.first_order import first_order
from packlora.ops.gpu import runs_triton
from packlora.ops.rms_norm import reference

WIDEST = 16384
"""Features of the widest rows that the kernels take: a program holds whole rows."""


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float = 0.0, rounding: str = "llama"
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) by row; reference.py is the specification.

    Args:
        x: [..., D]; rows of any order that lie at one stride, each contiguous, are read where they are.
        weight_D: frozen, in x's dtype.
        offset, rounding: one of reference.KINDS.

    Returns:
        As x, its rows dense in the order in which x's lie.

    Raises:
        ValueError: no such kind; an operand's shape or dtype does not fit; the weight is not frozen.
    """
    if (offset, rounding) not in reference.KINDS:
        raise ValueError(f"no RMS norm of offset {offset} and rounding {rounding!r}; there are {reference.KINDS}")
    if x.ndim == 0 or weight_D.shape != x.shape[-1:] or weight_D.dtype != x.dtype:
        raise ValueError(
            f"a weight {tuple(weight_D.shape)} of {weight_D.dtype} does not fit rows {tuple(x.shape)} of {x.dtype}"
        )
    if weight_D.requires_grad and torch.is_grad_enabled():
        raise ValueError("the norm's weight must be frozen: this operator gives it no gradient")
    y: torch.Tensor = _RMSNorm.apply(x, weight_D, eps, offset, rounding)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float, rounding: str
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_D)
        ctx.kind = eps, offset
        if _takes_kernels(x):
            from packlora.ops.rms_norm import triton_path

            return triton_path.forward(x, weight_D, eps, offset, rounding)
        return reference.rms_norm(x, weight_D, eps, offset, rounding)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_D = ctx.saved_tensors
        eps, offset = ctx.kind
        if _takes_kernels(x):
            from packlora.ops.rms_norm import triton_path

            dx = triton_path.backward(x, weight_D, grad_outputs[0], eps, offset)
        else:
            dx = _backward(x, weight_D, grad_outputs[0], eps, offset)
        return dx, None, None, None, None


def _takes_kernels(x: torch.Tensor) -> bool:
    return runs_triton(x.device) and x.dtype != torch.float64 and 0 < x.shape[-1] <= WIDEST


def _backward(x: torch.Tensor, weight_D: torch.Tensor, dy: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Backward in plain torch operations, for any float dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed, g = wide * rstd, dy.to(wide.dtype) * (weight_D.to(wide.dtype) + offset)
    return (rstd * (g - normed * (g * normed).mean(-1, keepdim=True))).to(x.dtype)
