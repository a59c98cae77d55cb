"""One frozen layer with one adapter as registered operators, for torch.compile: no graph break, nothing traced into.

    packlora::lora_linear            y, S        from x, weight, bias, A, B
    packlora::lora_linear_backward   dx, dA, dB  from dy, x, weight, A, B, S

In eager mode ops.lora_linear.group is called directly: the dispatch of a registered operator costs more host time than the
operator itself.

Shapes: T tokens, K inputs, N outputs, r rank; S [T, R], R the rank as the plan pads it, or [0, R] where it is not kept.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch

from packlora.ops.lora_linear.group import (
    GroupState,
    Layer,
    LowRank,
    Prepared,
    Run,
    check_tokens,
    group_backward,
    group_forward,
)
from packlora.ops.lora_linear.plan import Plan


@lru_cache
def plan_of(text: str) -> Plan:
    """The plan whose `to_dict` is this JSON text."""
    return Plan.from_dict(json.loads(text))


def _width(plan: Plan, rank: int) -> int:
    return -(-rank // 16) * 16 if plan.needs_triton else rank


def compilable(plan: Plan) -> bool:
    """Whether the plan can run as a registered operator: those that merge weights or associate otherwise cannot."""
    return not plan.lossy and (plan.dA, plan.dB) == ("dS", "S")


def _prepare(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, A_rK: torch.Tensor, B_Nr: torch.Tensor,
    scaling: float, plan: Plan,
) -> Prepared:  # fmt: skip
    layers = (Layer(weight_NK, bias_N, {0: LowRank(A_rK, B_Nr, scaling)}),)
    prepared = GroupState().prepared(x_TK, layers, plan)
    prepared.packed.refresh(layers)
    return prepared


@torch.library.custom_op("packlora::lora_linear", mutates_args=())
def lora_linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    A_rK: torch.Tensor,
    B_Nr: torch.Tensor,
    scaling: float,
    p: float,
    keys_T2: torch.Tensor | None,
    salt: int,
    plan: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [T, N] and S; differentiable in x, A and B. Operands as in ops.lora_linear.group.lora_group, plan as JSON."""
    chosen, runs = plan_of(plan), (Run(0, 0, len(x_TK), p),)
    check_tokens(x_TK, runs, keys_T2)
    prepared = _prepare(x_TK, weight_NK, bias_N, A_rK, B_Nr, scaling, chosen)
    (y_TN,), S = group_forward(prepared, x_TK, runs, keys_T2, salt, chosen)
    return y_TN, S if chosen.keep_s else S.new_empty(0, S.shape[1])


@lora_linear.register_fake
def _(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, A_rK: torch.Tensor, B_Nr: torch.Tensor,
    scaling: float, p: float, keys_T2: torch.Tensor | None, salt: int, plan: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    T, kept = x_TK.shape[0], plan_of(plan).keep_s
    return (
        x_TK.new_empty(T, weight_NK.shape[0]),
        x_TK.new_empty(T if kept else 0, _width(plan_of(plan), A_rK.shape[0])),
    )


@torch.library.custom_op("packlora::lora_linear_backward", mutates_args=())
def lora_linear_backward(
    d_TN: torch.Tensor,
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    A_rK: torch.Tensor,
    B_Nr: torch.Tensor,
    keys_T2: torch.Tensor | None,
    S: torch.Tensor,
    scaling: float,
    p: float,
    salt: int,
    plan: str,
    need_x: bool,
    need_A: bool,
    need_B: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx [T, K], dA [r, K], dB [N, r]; empty where not needed."""
    chosen, runs = plan_of(plan), (Run(0, 0, len(x_TK), p),)
    prepared = _prepare(x_TK, weight_NK, None, A_rK, B_Nr, scaling, chosen)
    kept = S if chosen.keep_s else None
    dx, (dA, dB) = group_backward(prepared, x_TK, kept, (d_TN,), runs, keys_T2, salt, chosen, need_x, (need_A, need_B))
    return (
        x_TK.new_empty(0) if dx is None else dx,
        A_rK.new_empty(0) if dA is None else dA.contiguous(),
        B_Nr.new_empty(0) if dB is None else dB.contiguous(),
    )


@lora_linear_backward.register_fake
def _(
    d_TN: torch.Tensor, x_TK: torch.Tensor, weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor,
    keys_T2: torch.Tensor | None, S: torch.Tensor, scaling: float, p: float, salt: int, plan: str,
    need_x: bool, need_A: bool, need_B: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return (
        torch.empty_like(x_TK) if need_x else x_TK.new_empty(0),
        A_rK.new_empty(A_rK.shape if need_A else 0),
        B_Nr.new_empty(B_Nr.shape if need_B else 0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x_TK, weight_NK, _, A_rK, B_Nr, scaling, p, keys_T2, salt, plan = inputs
    ctx.save_for_backward(x_TK, weight_NK, A_rK, B_Nr, keys_T2, output[1])
    ctx.scaling, ctx.p, ctx.salt, ctx.plan = scaling, p, salt, plan


def _backward(ctx: Any, d_TN: torch.Tensor, d_S: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    x_TK, weight_NK, A_rK, B_Nr, keys_T2, S = ctx.saved_tensors
    need_x, need_A, need_B = (ctx.needs_input_grad[index] for index in (0, 3, 4))
    dx, dA, dB = lora_linear_backward(
        d_TN, x_TK, weight_NK, A_rK, B_Nr, keys_T2, S, ctx.scaling, ctx.p, ctx.salt, ctx.plan, need_x, need_A, need_B
    )
    return (
        dx if need_x else None, None, None, dA if need_A else None, dB if need_B else None, None, None, None, None, None,
    )  # fmt: skip


lora_linear.register_autograd(_backward, setup_context=_setup)
