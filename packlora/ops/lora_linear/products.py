"""One adapter that owns all tokens of one layer, by ordinary matrix products in any association. Any device.

    y  = x W' + s S B' + bias = x (W + s B A)' + bias,    S = xd A',    xd = dropout(x)
    dA = dS' xd = s B' (d' xd),    dB = s d' S = s (d' xd) A',    dS = s d B
    dx = d W + dropout'(dS A) = d (W + s B A)

which of them is formed is the plan's to say: `up`, `dx`, `dA`, `dB` and `keep_s` of plan.Plan. A merged weight is made where
it is used and kept by nobody; it has no place for dropout, and in a narrow dtype it loses what is under half an ulp of W.
Two associations through d' xd share that product.

Shapes: T tokens, K inputs, N outputs, r rank; x [T, K], W [N, K], A [r, K], B [N, r], d = dY [T, N].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from packlora.ops.dropout import dropout
from packlora.ops.lora_linear.plan import CHAIN, Plan

Needs = tuple[bool, bool, bool]
"""Whether the gradients of x, A and B are wanted."""


@dataclass(frozen=True, slots=True)
class Dropout:
    """What is dropped of x: keys [T, 2] int32 of its tokens, the salt of the layer, the rate."""

    keys_T2: torch.Tensor | None = None
    salt: int = 0
    p: float = 0.0

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """xd of x, and dropout' of a gradient: both are multiplied by the same mask. x itself at rate 0."""
        if not self.p:
            return x_TK
        assert self.keys_T2 is not None
        return dropout(x_TK, self.keys_T2, self.salt, self.p)


def lora_linear_products(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    A_rK: torch.Tensor,
    B_Nr: torch.Tensor,
    scaling: float,
    keys_T2: torch.Tensor | None = None,
    p: float = 0.0,
    salt: int = 0,
    plan: Plan = CHAIN,
) -> torch.Tensor:
    """y [T, N] in the dtype of x, differentiable in x, A, B and bias. The weight is frozen.

    A, B and bias may be of a wider dtype than x: they are cast to x's for the products and their gradients come back in
    their own dtype.

    Args:
        keys_T2, p, salt: of dropout on the low-rank branch; keys are needed where p is not 0.
        plan: any that `check_plan` accepts.

    Raises:
        ValueError: the plan has a kernel of its own or does not go with dropout, or keys are missing.
    """
    check_plan(plan, p)
    if p and (keys_T2 is None or tuple(keys_T2.shape) != (len(x_TK), 2)):
        raise ValueError(f"dropout needs keys [{len(x_TK)}, 2], got {None if keys_T2 is None else tuple(keys_T2.shape)}")
    drop = Dropout(keys_T2, salt, p)
    y_TN: torch.Tensor = _Products.apply(x_TK, weight_NK, bias_N, A_rK, B_Nr, scaling, drop, plan)
    return y_TN


def check_plan(plan: Plan, p: float) -> None:
    """Raises ValueError, naming the part, for a plan that cannot be computed here."""
    if plan.needs_triton:
        raise ValueError(f"plan {plan.name} has parts that are not plain matrix products (routed, fused or one-pass)")
    if p and plan.lossy:
        raise ValueError(f"plan {plan.name}: a merged weight has no place for dropout, and the rate is {p}")
    if plan.up == "merged" and plan.keep_s and plan.dB == "S":
        raise ValueError(f"plan {plan.name}: a merged forward makes no S that could be kept; keep_s must be False")


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        A_rK: torch.Tensor,
        B_Nr: torch.Tensor,
        scaling: float,
        drop: Dropout,
        plan: Plan,
    ) -> torch.Tensor:
        y_TN, S_Tr = forward(x_TK, weight_NK, bias_N, A_rK, B_Nr, scaling, drop, plan)
        if not ctx.needs_input_grad[4] or plan.dB == "xd" or not plan.keep_s:
            S_Tr = None
        ctx.save_for_backward(x_TK, weight_NK, A_rK, B_Nr, S_Tr, drop.keys_T2)
        ctx.scaling, ctx.salt, ctx.p, ctx.plan = scaling, drop.salt, drop.p, plan
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        return y_TN

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_TN,) = grad_outputs
        x_TK, weight_NK, A_rK, B_Nr, S_Tr, keys_T2 = ctx.saved_tensors
        need_x, _, need_bias, need_A, need_B, *_ = ctx.needs_input_grad
        drop, needs = Dropout(keys_T2, ctx.salt, ctx.p), (need_x, need_A, need_B)
        dx_TK, dA_rK, dB_Nr = backward(d_TN, x_TK, weight_NK, A_rK, B_Nr, S_Tr, ctx.scaling, drop, ctx.plan, needs)
        db_N = d_TN.to(ctx.bias_dtype).sum(0) if need_bias else None
        return (dx_TK, None, db_N, dA_rK, dB_Nr, None, None, None)


def forward(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    A_rK: torch.Tensor,
    B_Nr: torch.Tensor,
    scaling: float,
    drop: Dropout,
    plan: Plan,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y [T, N] and S [T, r], outside autograd. S is None where the forward is merged."""
    A_rK, B_Nr = A_rK.to(x_TK.dtype), B_Nr.to(x_TK.dtype)
    bias_N = None if bias_N is None else bias_N.to(x_TK.dtype)
    if plan.up == "merged":
        return linear(x_TK, _merged(weight_NK, A_rK, B_Nr, scaling), bias_N), None
    S_Tr = drop(x_TK) @ A_rK.T
    if plan.up == "after":
        return linear(x_TK, weight_NK, bias_N).addmm_(S_Tr, B_Nr.T, alpha=scaling), S_Tr
    if bias_N is None:
        y_TN = _scaled_mm(S_Tr, B_Nr.T, scaling)
    else:
        y_TN = torch.addmm(bias_N, S_Tr, B_Nr.T, alpha=scaling)
    return y_TN.addmm_(x_TK, weight_NK.T), S_Tr


def backward(
    d_TN: torch.Tensor,
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    A_rK: torch.Tensor,
    B_Nr: torch.Tensor,
    S_Tr: torch.Tensor | None,
    scaling: float,
    drop: Dropout,
    plan: Plan,
    needs: Needs,
    dx_TK: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dx in x's dtype, dA and dB in their own, outside autograd; None for what is not needed.

    Args:
        S_Tr: from forward; None to compute it again where the plan needs it.
        dx_TK: of other layers that read the same x: this layer's is added to it, in place.
    """
    (need_x, need_A, need_B), (A_dtype, B_dtype) = needs, (A_rK.dtype, B_Nr.dtype)
    A_rK, B_Nr = A_rK.to(x_TK.dtype), B_Nr.to(x_TK.dtype)
    dA_rK = dB_Nr = None

    # 1. The gradients of A and B.
    again = need_B and plan.dB == "S" and S_Tr is None
    xd_TK = drop(x_TK) if need_A or again or (need_B and plan.dB == "xd") else None
    dS_Tr = None
    if (need_A and plan.dA == "dS") or (need_x and plan.dx != "merged"):
        dS_Tr = _scaled_mm(d_TN, B_Nr, scaling)
    through_NK = None
    if (need_A and plan.dA == "xd") or (need_B and plan.dB == "xd"):
        assert xd_TK is not None
        through_NK = d_TN.T @ xd_TK
    if need_A:
        if through_NK is not None and plan.dA == "xd":
            dA_rK = _scaled_mm(B_Nr.T, through_NK, scaling).to(A_dtype)
        else:
            assert dS_Tr is not None and xd_TK is not None
            dA_rK = (dS_Tr.T @ xd_TK).to(A_dtype)
    if need_B:
        if through_NK is not None and plan.dB == "xd":
            dB_Nr = _scaled_mm(through_NK, A_rK.T, scaling).to(B_dtype)
        else:
            if S_Tr is None:
                assert xd_TK is not None
                S_Tr = xd_TK @ A_rK.T
            dB_Nr = _scaled_mm(d_TN.T, S_Tr, scaling).to(B_dtype)
    del through_NK, xd_TK

    # 2. The gradient of x.
    if not need_x:
        return None, dA_rK, dB_Nr
    if plan.dx == "merged":
        return _plus_mm(dx_TK, d_TN, _merged(weight_NK, A_rK, B_Nr, scaling)), dA_rK, dB_Nr
    assert dS_Tr is not None
    if plan.dx == "before":
        dx_TK = _plus_low_rank(dx_TK, dS_Tr, A_rK, drop)
        return dx_TK.addmm_(d_TN, weight_NK), dA_rK, dB_Nr
    return _plus_low_rank(_plus_mm(dx_TK, d_TN, weight_NK), dS_Tr, A_rK, drop), dA_rK, dB_Nr


def _plus_low_rank(dx_TK: torch.Tensor | None, dS_Tr: torch.Tensor, A_rK: torch.Tensor, drop: Dropout) -> torch.Tensor:
    """dx + dropout'(dS A), in place where dx is given."""
    if not drop.p:
        return _plus_mm(dx_TK, dS_Tr, A_rK)
    low_rank_TK = drop(dS_Tr @ A_rK)
    return low_rank_TK if dx_TK is None else dx_TK.add_(low_rank_TK)


def _plus_mm(out: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """out + a @ b, in place where out is given."""
    return a @ b if out is None else out.addmm_(a, b)


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * a @ b, rounded once."""
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)


def _merged(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float) -> torch.Tensor:
    """W + s B A, [N, K], in W's dtype."""
    return torch.addmm(weight_NK, B_Nr, A_rK, alpha=scaling)
