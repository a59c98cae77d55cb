"""A module of experts as transformers has it: how its weights lie, and its forward around products that a caller makes.

Shapes: T tokens, k experts a token, S = T k rows sorted by expert, D width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from packlora.ops.lora_experts.routing import Routing
from packlora.ops.lora_experts.types import ExpertWeight
from packlora.ops.lora_experts.weighted import weighted_sums

LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""What transformers' registry of experts' functions notes of a module that it calls through them."""


def is_experts(module: torch.nn.Module) -> bool:
    """Whether transformers calls a module through its registry of experts' functions."""
    return all(hasattr(module, name) for name in LAYOUT) and hasattr(module, "num_experts")


def weight_names(experts: Any) -> tuple[str, str]:
    """Of the weights of all experts, in the order of their products."""
    return "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", "down_proj"


def frozen_at(experts: Any, name: str) -> ExpertWeight:
    """One weight of all experts as the operator takes it."""
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return ExpertWeight(getattr(experts, name), bias, bool(experts.is_transposed))


def sorted_outputs(
    experts: Any, x: torch.Tensor, product: Callable[[torch.Tensor, str, bool], torch.Tensor]
) -> torch.Tensor:
    """What experts give, without the routers' weights, by sorted rows [S, D].

    Args:
        x: hidden states [T, D].
        product: of what is given to a weight, the weight's name, and whether what is given is of tokens, [T, K], and not of
            sorted rows, [S, K]; gives [S, N].
    """
    first, last = weight_names(experts)
    inner = product(x, first, True)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    y_SD = product(inner, last, False)
    # not in every transformers that is supported
    return experts.post_expert_norm(y_SD) if getattr(experts, "has_post_expert_norm", False) else y_SD


def outputs(
    experts: Any, hidden_states: torch.Tensor, top_k_weights: torch.Tensor, routing: Routing,
    product: Callable[[torch.Tensor, str, bool], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The forward of a module of experts, [T, D].

    Args:
        hidden_states: [T, D].
        top_k_weights: of the chosen experts, [T, k].
        product: see sorted_outputs.
    """
    y_SD = sorted_outputs(experts, hidden_states, product)
    return weighted_sums(y_SD, top_k_weights, routing, hidden_states.dtype)
