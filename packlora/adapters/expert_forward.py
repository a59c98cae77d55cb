"""The forward of a module of experts around products that a caller makes; how its weights lie: expert_layout.py.

Shapes: T tokens, k experts a token, S rows sorted by expert, T k of a registry's, D width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from packlora.adapters.expert_layout import is_scaled, weight_names
from packlora.ops.lora_experts.types import ExpertWeight


def frozen_at(experts: Any, name: str) -> ExpertWeight:
    """One weight of all experts as the operator takes it."""
    if is_scaled(experts):
        return ExpertWeight(getattr(experts, name), None, True)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return ExpertWeight(getattr(experts, name), bias, bool(experts.is_transposed))


def sorted_outputs(
    experts: Any, x: torch.Tensor, product: Callable[[torch.Tensor, str, bool], torch.Tensor]
) -> torch.Tensor:
    """Compute what experts give, without the routers' weights, by sorted rows [S, D].

    Args:
        x: hidden states [T, D].
        product: of what is given to a weight, the weight's name, and whether what is given is of tokens, [T, K], and not of
            sorted rows, [S, K]; gives [S, N].
    """
    first, last = weight_names(experts)
    inner = product(x, first, True)
    if is_scaled(experts):
        gate, up = inner.chunk(2, dim=-1)
        return product(experts.act_fn(gate) * up, last, False)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    y_SD = product(inner, last, False)
    # not in every transformers that is supported
    return experts.post_expert_norm(y_SD) if getattr(experts, "has_post_expert_norm", False) else y_SD


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows of the input of a module of SCALED that a router sends to its experts, in the order of the experts.

    x: [S, D]. expert, token: of each, [S].
    """

    x: torch.Tensor
    expert: torch.Tensor
    token: torch.Tensor

    @staticmethod
    def of(hidden_states: torch.Tensor, experts: int) -> ScaledRows:
        """hidden_states: [E T, D]. How many rows there are the host learns from the device."""
        x_ETD = hidden_states.view(experts, -1, hidden_states.shape[-1])
        expert, token = x_ETD.detach().ne(0).any(-1).nonzero(as_tuple=True)
        return ScaledRows(x_ETD[expert, token], expert, token)

    def back(self, y_SD: torch.Tensor, like: torch.Tensor, experts: int) -> torch.Tensor:
        """Put what experts give for these rows in their places, zeros elsewhere, [E T, D]. like: what the module was given."""
        place = self.expert * (len(like) // experts) + self.token
        return y_SD.new_zeros(like.shape).index_copy(0, place, y_SD)
