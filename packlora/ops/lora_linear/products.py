"""One adapter that owns all tokens, by ordinary matrix products in any association. Any device.

    y  = x W' + s S B' + bias = x (W + s B A)' + bias,    S = xd A',    xd = dropout(x)
    dA = dS' xd = s B' (d' xd),    dB = s d' S = s (d' xd) A',    dS = s d B
    dx = d W + dropout'(dS A) = d (W + s B A)

which of them is formed is the plan's to say: `up`, `dx`, `dA`, `dB` and `keep_s` of plan.Plan. A merged weight is made where
it is used and kept by nobody; it has no place for dropout, and in a narrow dtype it loses what is under half an ulp of W.
Two associations through d' xd share that product. Layers that read the same x share it, its dropped copy and one dx.

Shapes: T tokens, K inputs, N outputs, r rank; x [T, K], W [N, K], A [r, K], B [N, r], d = dY [T, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from packlora.ops.dropout import dropout
from packlora.ops.first_order import first_order
from packlora.ops.lora_linear.autograd import Outputs, saving_is_hooked, stand_in
from packlora.ops.lora_linear.dense import base_onto, low_dtype, mm_in, scaled_mm
from packlora.ops.lora_linear.plan import CHAIN, Plan, Situation, why_not
from packlora.ops.lora_linear.types import Layer, LowRank


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
    """y [T, N] of one layer in the dtype of x; arguments and errors as in lora_group_products."""
    layer = Layer(weight_NK, bias_N, {0: LowRank(A_rK, B_Nr, scaling)})
    return lora_group_products(x_TK, [layer], 0, keys_T2, p, salt, plan)[0]


def lora_group_products(
    x_TK: torch.Tensor,
    layers: Sequence[Layer],
    adapter: int,
    keys_T2: torch.Tensor | None = None,
    p: float = 0.0,
    salt: int = 0,
    plan: Plan = CHAIN,
) -> tuple[torch.Tensor, ...]:
    """y [T, N] of every layer in the dtype of x, as one autograd node (or two: group.Outputs): differentiable in x, A's, B's
    and biases.

    A, B and bias may be of a wider dtype than x: they are cast to x's for the products and their gradients come back in
    their own dtype.

    Args:
        x_TK: tokens, all of one adapter.
        layers: those that read them; weights are frozen.
        adapter: its number. Layers that it does not target are the base layer alone; other adapters are not looked at.
        keys_T2, p, salt: of dropout on the low-rank branch, one mask for all layers; keys are needed where p is not 0.
        plan: any that `check_plan` accepts.

    Raises:
        ValueError: the plan has a kernel of its own or does not go with dropout, or keys are missing.
    """
    check_plan(plan, p)
    if p and (keys_T2 is None or tuple(keys_T2.shape) != (len(x_TK), 2)):
        found = None if keys_T2 is None else tuple(keys_T2.shape)
        raise ValueError(f"dropout needs keys [{len(x_TK)}, 2], got {found}")
    flat: list[torch.Tensor | float | None] = []
    for layer in layers:
        low = layer.adapters.get(adapter)
        flat += (layer.weight, layer.bias, *((low.A, low.B, low.scaling) if low else (None, None, 0.0)))
    if not saving_is_hooked():
        outputs: tuple[torch.Tensor, ...] = _Products.apply(x_TK, keys_T2, p, salt, plan, True, *flat)
        return outputs
    made = _Products.apply(x_TK, keys_T2, p, salt, plan, False, *flat)
    stand_ins, S = made[: len(layers)], made[len(layers) :]
    return Outputs.of(lambda: _up(x_TK, S, plan, flat), stand_ins)


def check_plan(plan: Plan, p: float) -> None:
    """Raises ValueError, naming the part, for a plan that cannot be computed here."""
    if plan.needs_triton:
        raise ValueError(f"plan {plan.name} has parts that are not plain matrix products (routed, fused or one-pass)")
    if reason := why_not(plan, Situation(True, True, p > 0, False, False)):
        raise ValueError(f"plan {plan.name}, at a dropout of {p}: {reason}")


OPERANDS = 5
"""Of each layer, in the order in which they are passed to autograd: weight, bias, A, B, scaling."""
OWN = 6
"""Arguments of the node before those of the layers."""


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, p: float, salt: int, plan: Plan, whole: bool, *flat: Any
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """The outputs; where not `whole`, their stand-ins and the S of every layer."""
        tokens, S, saved, ctx.layers = _Tokens(x_TK, keys_T2, p, salt), [], [], []
        for first in range(0, len(flat), OPERANDS):
            weight_NK, bias_N, A_rK, B_Nr, scaling = flat[first : first + OPERANDS]
            S_Tr = None if A_rK is None or plan.up == "merged" else tokens.xd_TK @ A_rK.to(x_TK.dtype).T
            S.append(S_Tr)
            keep = plan.keep_s and plan.dB == "S" and ctx.needs_input_grad[OWN + first + 3]
            # detached: autograd would give a parameter itself back, with whatever `p.data = other` put there since
            saved += [
                weight_NK.detach(),
                *(None if t is None else t.detach() for t in (A_rK, B_Nr)),
                S_Tr if keep else None,
            ]
            ctx.layers.append((scaling, None if bias_N is None else bias_N.dtype))
        outputs = _up(x_TK, S, plan, flat) if whole else [stand_in(x_TK, weight) for weight in flat[::OPERANDS]]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TK, keys_T2, *saved)
        ctx.p, ctx.salt, ctx.plan = p, salt, plan
        if whole:
            return tuple(outputs)
        ctx.mark_non_differentiable(*(S_Tr for S_Tr in S if S_Tr is not None))
        return (*outputs, *S)

    @staticmethod
    @first_order
    def backward(ctx: Any, *d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x_TK, keys_T2, *saved = ctx.saved_tensors
        d = d[: len(ctx.layers)]
        tokens, need_x = _Tokens(x_TK, keys_T2, ctx.p, ctx.salt), ctx.needs_input_grad[0]
        dx_TK: torch.Tensor | None = None
        grads: list[torch.Tensor | None] = []
        for index, (d_TN, (scaling, bias_dtype)) in enumerate(zip(d, ctx.layers, strict=True)):
            if d_TN is None:
                grads += [None] * OPERANDS
                continue
            weight_NK, A_rK, B_Nr, S_Tr = saved[4 * index : 4 * index + 4]
            first = OWN + OPERANDS * index
            _, need_bias, need_A, need_B, _ = ctx.needs_input_grad[first : first + OPERANDS]
            dA_rK, dB_Nr, dS_Tr = None, None, None
            if A_rK is not None:
                A_wide, B_wide = A_rK, B_Nr
                A_rK, B_Nr = A_rK.to(x_TK.dtype), B_Nr.to(x_TK.dtype)
                if (need_A and ctx.plan.dA == "dS") or (need_x and ctx.plan.dx != "merged"):
                    dS_Tr = scaled_mm(d_TN, B_Nr, scaling)
                dA_rK, dB_Nr = _low_rank_grads(tokens, d_TN, dS_Tr, S_Tr, A_rK, B_Nr, scaling, ctx.plan, need_A, need_B)
                dA_rK = None if dA_rK is None else dA_rK.to(A_wide.dtype)
                dB_Nr = None if dB_Nr is None else dB_Nr.to(B_wide.dtype)
            if need_x:
                dx_TK = _plus_dx(dx_TK, tokens, d_TN, dS_Tr, weight_NK, A_rK, B_Nr, scaling, ctx.plan)
            grads += [None, d_TN.to(bias_dtype).sum(0) if need_bias else None, dA_rK, dB_Nr, None]
        return (dx_TK, *(None,) * (OWN - 1), *grads)


class _Tokens:
    """x and what is dropped of it; the dropped copy is made once, when it is first asked for."""

    def __init__(self, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, p: float, salt: int) -> None:
        self.x_TK, self.keys_T2, self.p, self.salt = x_TK, keys_T2, p, salt
        self._xd_TK: torch.Tensor | None = None

    def drop(self, tensor_TK: torch.Tensor) -> torch.Tensor:
        """dropout of x and dropout' of a gradient are the same multiplication by the mask."""
        if not self.p:
            return tensor_TK
        assert self.keys_T2 is not None
        return dropout(tensor_TK, self.keys_T2, self.salt, self.p)

    @property
    def xd_TK(self) -> torch.Tensor:
        if self._xd_TK is None:
            self._xd_TK = self.drop(self.x_TK)
        return self._xd_TK


def _up(x_TK: torch.Tensor, S: Sequence[torch.Tensor | None], plan: Plan, flat: Sequence[Any]) -> list[torch.Tensor]:
    """y [T, N] of every layer. S [T, r] is None for layers without an adapter and where the plan makes none."""
    outputs = []
    for index, S_Tr in enumerate(S):
        weight_NK, bias_N, A_rK, B_Nr, scaling = flat[OPERANDS * index : OPERANDS * (index + 1)]
        bias_N = None if bias_N is None else bias_N.to(x_TK.dtype)
        if A_rK is None:
            outputs.append(linear(x_TK, weight_NK, bias_N))
            continue
        A_rK, B_Nr = A_rK.to(x_TK.dtype), B_Nr.to(x_TK.dtype)
        if S_Tr is None:
            outputs.append(linear(x_TK, _merged(weight_NK, A_rK, B_Nr, scaling), bias_N))
        elif plan.up == "after":
            outputs.append(linear(x_TK, weight_NK, bias_N).addmm_(S_Tr, B_Nr.T, alpha=scaling))
        else:
            wide = low_dtype(x_TK) != x_TK.dtype
            low_TN = mm_in(S_Tr, B_Nr.T, torch.float32).mul_(scaling) if wide else scaled_mm(S_Tr, B_Nr.T, scaling)
            outputs.append(base_onto(low_TN, x_TK, weight_NK, bias_N))
    return outputs


def _low_rank_grads(
    tokens: _Tokens,
    d_TN: torch.Tensor,
    dS_Tr: torch.Tensor | None,
    S_Tr: torch.Tensor | None,
    A_rK: torch.Tensor,
    B_Nr: torch.Tensor,
    scaling: float,
    plan: Plan,
    need_A: bool,
    need_B: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dA and dB in x's dtype, None where they are not wanted. S is computed again where it was not kept."""
    through_NK = dA_rK = dB_Nr = None
    if (need_A and plan.dA == "xd") or (need_B and plan.dB == "xd"):
        through_NK = d_TN.T @ tokens.xd_TK
    if need_A:
        if through_NK is not None and plan.dA == "xd":
            dA_rK = scaled_mm(B_Nr.T, through_NK, scaling)
        else:
            assert dS_Tr is not None
            dA_rK = dS_Tr.T @ tokens.xd_TK
    if need_B:
        if through_NK is not None and plan.dB == "xd":
            dB_Nr = scaled_mm(through_NK, A_rK.T, scaling)
        else:
            dB_Nr = scaled_mm(d_TN.T, tokens.xd_TK @ A_rK.T if S_Tr is None else S_Tr, scaling)
    return dA_rK, dB_Nr


def _plus_dx(
    dx_TK: torch.Tensor | None,
    tokens: _Tokens,
    d_TN: torch.Tensor,
    dS_Tr: torch.Tensor | None,
    weight_NK: torch.Tensor,
    A_rK: torch.Tensor | None,
    B_Nr: torch.Tensor | None,
    scaling: float,
    plan: Plan,
) -> torch.Tensor:
    """dx of the layers before plus this layer's, in place where there is one."""
    if A_rK is None or B_Nr is None:
        return _plus_mm(dx_TK, d_TN, weight_NK)
    if plan.dx == "merged":
        return _plus_mm(dx_TK, d_TN, _merged(weight_NK, A_rK, B_Nr, scaling))
    assert dS_Tr is not None
    if plan.dx == "before":
        return _plus_mm(_plus_low_rank(dx_TK, dS_Tr, A_rK, tokens), d_TN, weight_NK)
    return _plus_low_rank(_plus_mm(dx_TK, d_TN, weight_NK), dS_Tr, A_rK, tokens)


def _plus_low_rank(
    dx_TK: torch.Tensor | None, dS_Tr: torch.Tensor, A_rK: torch.Tensor, tokens: _Tokens
) -> torch.Tensor:
    """dx + dropout'(dS A), in place where dx is given."""
    if not tokens.p:
        return _plus_mm(dx_TK, dS_Tr, A_rK)
    low_rank_TK = tokens.drop(dS_Tr @ A_rK)
    return low_rank_TK if dx_TK is None else dx_TK.add_(low_rank_TK)


def _plus_mm(out: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """out + a @ b, in place where out is given."""
    return a @ b if out is None else out.addmm_(a, b)


def _merged(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float) -> torch.Tensor:
    """W + s B A, [N, K], in W's dtype."""
    return torch.addmm(weight_NK, B_Nr, A_rK, alpha=scaling)
