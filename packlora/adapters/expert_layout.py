"""A module of experts as transformers has it: how its weights lie.

Most are called through transformers' registry of experts' functions, with hidden states, chosen experts and their weights.
Those of Llama 4 are given every token once for every expert, multiplied with the router's weight, which is 0 where the token
does not go there; they add nothing to such rows, so the others are all that is computed here.

Shapes: T tokens, K inputs, N outputs, D width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

LAYOUT = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Properties that transformers' registry of experts' functions notes of a module that it calls through them."""
STATE = "_packlora_experts"
"""The attribute of a module of experts that holds what is adapted of it; no module and no buffer, so in no state dict."""
PART = "_packlora_expert_part"
"""The attribute of a module of experts of which a process has some, with what it has and what it does about the others
(packlora/experts/part.py)."""
ROUTED = "packlora_product"
"""The name of a router's AdaptedLinear among its modules."""
SCALED = ("transformers.models.llama4.modeling_llama4.Llama4TextExperts",)
"""Classes of modules of experts that are given every token times the router's weight, [E T, D], and give as many rows. Their
weights are [E, K, N], and PEFT takes them to be [E, N, K]: in its files A and B have changed places."""


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module's experts can be computed here."""
    return by_registry(module) or is_scaled(module)


def experts_of(model: torch.nn.Module) -> dict[str, Any]:
    """The modules of experts, by path."""
    return {path: module for path, module in model.named_modules() if is_experts(module)}


def part_of(experts: torch.nn.Module) -> Any:
    """Part of the experts that a module has; None where it has all."""
    return vars(experts).get(PART)


def by_registry(module: torch.nn.Module) -> bool:
    """Whether transformers calls a module through its registry of experts' functions."""
    return all(hasattr(module, name) for name in LAYOUT) and hasattr(module, "num_experts")


def is_scaled(module: torch.nn.Module) -> bool:
    """Whether a module is one of SCALED."""
    return f"{type(module).__module__}.{type(module).__qualname__}" in SCALED


def weight_names(experts: Any) -> tuple[str, str]:
    """Names of the weights of all experts, in the order of their products."""
    return "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", "down_proj"


def adapted_experts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Modules of experts that have adapters, or had some, with what is adapted of them."""
    for module in model.modules():
        if (state := vars(module).get(STATE)) is not None:
            yield module, state


def router_path(path: str) -> str:
    """The path of the weight of a router, from that of its AdaptedLinear; any other path as it is."""
    return f"{path.removesuffix(ROUTED)}weight" if path.endswith(f".{ROUTED}") else path
