"""One layer with one plain LoRA adapter in as few operations of torch as can be, for calls where the host decides the time.

    y = x W' + s xd A' B' + bias

In 16 bits the low-rank part is there before y is rounded. Shapes: T tokens, K inputs, N outputs, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from packlora.ops.lora_linear.dense import base_onto, low_dtype, mm_in, scaled_mm


def direct_lora(
    x_TK: torch.Tensor, xd_TK: torch.Tensor | None, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, A_rK: torch.Tensor,
    B_Nr: torch.Tensor, scaling: float,
) -> torch.Tensor:  # fmt: skip
    """y [T, N] in x's dtype, differentiable in x, xd, bias, A and B.

    Args:
        xd_TK: x after dropout, or None where it is x.
        weight_NK: frozen, of x's dtype. bias, A, B: of any; their gradients come back in their own.
    """
    y: torch.Tensor = _Direct.apply(x_TK, xd_TK, weight_NK, bias_N, A_rK, B_Nr, scaling)
    return y


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: torch.Tensor, xd_TK: torch.Tensor | None, weight_NK: torch.Tensor, bias_N: torch.Tensor | None,
        A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        dtype = x_TK.dtype
        read = x_TK if xd_TK is None else xd_TK
        A, B = A_rK.to(dtype), B_Nr.to(dtype)
        bias = None if bias_N is None else bias_N.to(dtype)
        S_Tr = scaled_mm(read, A.T, scaling)
        if dtype.itemsize == 2:
            low_TN = mm_in(S_Tr, B.T, low_dtype(x_TK))
            y_TN = base_onto(low_TN if bias is None else low_TN.add_(bias), x_TK, weight_NK)
        else:  # a product rounds more when it accumulates onto something
            y_TN = linear(x_TK, weight_NK, bias).add_(S_Tr @ B.T)
        ctx.save_for_backward(read, weight_NK, A, B, S_Tr)
        ctx.dropped, ctx.scaling = xd_TK is not None, scaling
        ctx.dtypes = None if bias_N is None else bias_N.dtype, A_rK.dtype, B_Nr.dtype
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        read, weight_NK, A, B, S_Tr = ctx.saved_tensors
        need_x, need_xd, _, need_bias, need_A, need_B, _ = ctx.needs_input_grad
        bias_dtype, A_dtype, B_dtype = ctx.dtypes
        need_low = need_xd if ctx.dropped else need_x
        dx = dxd = dbias = dA = dB = None
        if need_low or need_A:
            dS = scaled_mm(d_TN, B, ctx.scaling)
            if need_A:
                dA = mm_in(dS.T, read, A_dtype)
            if need_low and ctx.dropped:
                dxd = dS @ A
        if need_x:
            dx = d_TN @ weight_NK
            if not ctx.dropped:
                dx = dx.addmm_(dS, A) if dx.element_size() == 2 else dx.add_(dS @ A)
        if need_B:
            dB = mm_in(d_TN.T, S_Tr, B_dtype)
        if need_bias:
            dbias = d_TN.sum(0, dtype=bias_dtype)
        return dx, dxd, None, dbias, dA, dB, None
