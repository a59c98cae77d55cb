"""One frozen layer with one adapter as registered operators, for torch.compile: no graph break, nothing traced into.

    packlora::lora_linear            y, S, z         from x, weight, bias, A, B and, for DoRA, magnitude and norm
    packlora::lora_linear_backward   dx, dA, dB, dm  from dy, x, weight, A, B, magnitude, norm, S, z

In eager mode ops.lora_linear.autograd is called directly: the dispatch of a registered operator costs more host time than the
operator itself.

Shapes: T tokens, K inputs, N outputs, r rank; S [T, R], R the rank as the plan pads it, or [0, R] where it is not kept; z
[T, N], or [0] for LoRA.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch

from packlora.ops.lora_linear.autograd import gradients, outputs_of
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import Plan
from packlora.ops.lora_linear.prepared import GroupState, Prepared
from packlora.ops.lora_linear.types import Layer, LowRank, Segment, check_tokens


@lru_cache
def plan_of(text: str) -> Plan:
    """The plan whose `to_dict` is this JSON text."""
    return Plan.from_dict(json.loads(text))


def _width(plan: Plan, rank: int) -> int:
    return -(-rank // 16) * 16 if plan.needs_triton else rank


def _prepare(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, A_rK: torch.Tensor, B_Nr: torch.Tensor,
    magnitude_N: torch.Tensor | None, norm_N: torch.Tensor | None, scaling: float, plan: Plan,
) -> Prepared:  # fmt: skip
    if magnitude_N is not None:
        magnitude_N = magnitude_N.detach().requires_grad_()  # its gradient is always made
    layers = (Layer(Dense(weight_NK), bias_N, {0: LowRank(A_rK, B_Nr, scaling, magnitude_N, norm_N)}),)
    prepared = GroupState().prepared(x_TK, layers, plan)
    prepared.refresh()
    return prepared


@torch.library.custom_op("packlora::lora_linear", mutates_args=())
def lora_linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    A_rK: torch.Tensor,
    B_Nr: torch.Tensor,
    magnitude_N: torch.Tensor | None,
    norm_N: torch.Tensor | None,
    scaling: float,
    p: float,
    keys_T2: torch.Tensor | None,
    salt: int,
    plan: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y [T, N], S and z; differentiable in x, A, B and magnitude. Operands as in ops.lora_linear.autograd.lora_group, plan as
    JSON."""
    chosen, segments = plan_of(plan), (Segment(0, 0, len(x_TK), p),)
    check_tokens(x_TK, segments, keys_T2)
    prepared = _prepare(x_TK, weight_NK, bias_N, A_rK, B_Nr, magnitude_N, norm_N, scaling, chosen)
    call = prepared.call(x_TK, segments, salt, chosen)
    S = call.down.down(call, prepared.operands, x_TK, keys_T2)
    (y_TN,), (z_TN,) = outputs_of(prepared, call, x_TK, keys_T2, S)
    return y_TN, S if chosen.keep_s else S.new_empty(0, S.shape[1]), y_TN.new_empty(0) if z_TN is None else z_TN


@lora_linear.register_fake
def _(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, A_rK: torch.Tensor, B_Nr: torch.Tensor,
    magnitude_N: torch.Tensor | None, norm_N: torch.Tensor | None, scaling: float, p: float, keys_T2: torch.Tensor | None,
    salt: int, plan: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    (T, _), N, kept = x_TK.shape, weight_NK.shape[0], plan_of(plan).keep_s
    return (
        x_TK.new_empty(T, N),
        x_TK.new_empty(T if kept else 0, _width(plan_of(plan), A_rK.shape[0])),
        x_TK.new_empty(0) if magnitude_N is None else x_TK.new_empty(T, N),
    )


@torch.library.custom_op("packlora::lora_linear_backward", mutates_args=())
def lora_linear_backward(
    d_TN: torch.Tensor,
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    A_rK: torch.Tensor,
    B_Nr: torch.Tensor,
    magnitude_N: torch.Tensor | None,
    norm_N: torch.Tensor | None,
    keys_T2: torch.Tensor | None,
    S: torch.Tensor,
    z_TN: torch.Tensor,
    scaling: float,
    p: float,
    salt: int,
    plan: str,
    need_x: bool,
    need_A: bool,
    need_B: bool,
    need_magnitude: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx [T, K], dA [r, K], dB [N, r], dm [N]; empty where not needed."""
    chosen, segments = plan_of(plan), (Segment(0, 0, len(x_TK), p),)
    prepared = _prepare(x_TK, weight_NK, None, A_rK, B_Nr, magnitude_N, norm_N, scaling, chosen)
    need = {"A": need_A, "B": need_B, "magnitude": need_magnitude}
    needed = [need[name] for _, _, name in prepared.slots]
    dx, grads = gradients(
        prepared, prepared.call(x_TK, segments, salt, chosen), x_TK, keys_T2, S if chosen.keep_s else None,
        (None if magnitude_N is None else z_TN,), (d_TN,), need_x, needed,
    )  # fmt: skip
    named = {name: grad for (_, _, name), grad in zip(prepared.slots, grads, strict=True)}
    out = [dx, named["A"], named["B"], named.get("magnitude")]
    return tuple(x_TK.new_empty(0) if grad is None else grad.contiguous() for grad in out)  # type: ignore[return-value]


@lora_linear_backward.register_fake
def _(
    d_TN: torch.Tensor, x_TK: torch.Tensor, weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor,
    magnitude_N: torch.Tensor | None, norm_N: torch.Tensor | None, keys_T2: torch.Tensor | None, S: torch.Tensor,
    z_TN: torch.Tensor, scaling: float, p: float, salt: int, plan: str, need_x: bool, need_A: bool, need_B: bool,
    need_magnitude: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    nothing = x_TK.new_empty(0)
    return (
        torch.empty_like(x_TK) if need_x else nothing,
        A_rK.new_empty(A_rK.shape) if need_A else nothing.clone(),
        B_Nr.new_empty(B_Nr.shape) if need_B else nothing.clone(),
        magnitude_N.new_empty(magnitude_N.shape) if need_magnitude and magnitude_N is not None else nothing.clone(),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    x_TK, weight_NK, _, A_rK, B_Nr, magnitude_N, norm_N, scaling, p, keys_T2, salt, plan = inputs
    ctx.save_for_backward(x_TK, weight_NK, A_rK, B_Nr, magnitude_N, norm_N, keys_T2, *output[1:])
    ctx.scaling, ctx.p, ctx.salt, ctx.plan = scaling, p, salt, plan


def _backward(ctx: Any, d_TN: torch.Tensor, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    x_TK, weight_NK, A_rK, B_Nr, magnitude_N, norm_N, keys_T2, S, z_TN = ctx.saved_tensors
    need = [ctx.needs_input_grad[index] for index in (0, 3, 4, 5)]
    grads = lora_linear_backward(
        d_TN,
        x_TK,
        weight_NK,
        A_rK,
        B_Nr,
        magnitude_N,
        norm_N,
        keys_T2,
        S,
        z_TN,
        ctx.scaling,
        ctx.p,
        ctx.salt,
        ctx.plan,
        *need,
    )
    dx, dA, dB, dm = (grad if wanted else None for grad, wanted in zip(grads, need, strict=True))
    return dx, None, None, dA, dB, dm, None, None, None, None, None, None


lora_linear.register_autograd(_backward, setup_context=_setup)
