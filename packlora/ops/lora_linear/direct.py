"""One layer with one plain LoRA adapter in as few operations of torch as can be, for calls where the host decides the time.

    y = x W' + s xd A' B' + bias

In 16 bits the low-rank part is there before y is rounded. Shapes: T tokens, K inputs, N outputs, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from packlora.ops.lora_linear.dense import base_onto, low_dtype, mm_in


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
        A = A_rK if A_rK.dtype == dtype else A_rK.to(dtype)
        B = B_Nr if B_Nr.dtype == dtype else B_Nr.to(dtype)
        S_Tr = torch.mm(read, A.t()).mul_(scaling)
        if dtype.itemsize == 2:
            low_TN = mm_in(S_Tr, B.t(), low_dtype(x_TK))
            y_TN = base_onto(low_TN, x_TK, weight_NK, bias_N)
        else:  # a product rounds more when it accumulates onto something
            y_TN = linear(x_TK, weight_NK, None if bias_N is None else bias_N.to(dtype)).add_(torch.mm(S_Tr, B.t()))
        ctx.save_for_backward(read, weight_NK, A, B, S_Tr)
        ctx.more = xd_TK is not None, scaling, None if bias_N is None else bias_N.dtype, A_rK.dtype, B_Nr.dtype
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        read, weight_NK, A, B, S_Tr = ctx.saved_tensors
        need_x, need_xd, _, need_bias, need_A, need_B, _ = ctx.needs_input_grad
        dropped, scaling, bias_dtype, A_dtype, B_dtype = ctx.more
        dx = dxd = dbias = dA = dB = None
        if need_x or need_xd or need_A:
            dS_Tr = torch.mm(d_TN, B).mul_(scaling)
            if need_A:
                dA = mm_in(dS_Tr.t(), read, A_dtype)
            if need_xd:
                dxd = torch.mm(dS_Tr, A)
        if need_x:
            dx = torch.mm(d_TN, weight_NK)
            if not dropped:
                dx = dx.addmm_(dS_Tr, A) if dx.element_size() == 2 else dx.add_(torch.mm(dS_Tr, A))
        if need_B:
            dB = mm_in(d_TN.t(), S_Tr, B_dtype)
        if need_bias:
            dbias = d_TN.sum(0, dtype=bias_dtype)
        return dx, dxd, None, dbias, dA, dB, None
