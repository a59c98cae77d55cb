"""Weighted sum of the outputs of a token's experts, as one autograd node: its rows only change places, so the gradient of each
is looked up, where autograd would add up what goes to an index.

    y_t = sum over the choices j of w_tj z_tj        dz_tj = w_tj dy_t        dw_tj = sum of dy_t * z_tj

Shapes: T tokens, k experts a token, S rows sorted by expert, D width.
"""

from __future__ import annotations

from typing import Any

import torch

from packlora.ops.first_order import first_order
from packlora.ops.lora_experts.routing import Routing


def weighted_sums(z_SD: torch.Tensor, weights_Tk: torch.Tensor, routing: Routing, dtype: torch.dtype) -> torch.Tensor:
    """y [T, D]; products and sums are made in the wider dtype of rows and weights."""
    out: torch.Tensor = WeightedSums.apply(z_SD, weights_Tk, routing, dtype)
    return out


class WeightedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z_SD: torch.Tensor, weights_Tk: torch.Tensor, routing: Routing, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.routing = routing
        ctx.save_for_backward(z_SD, weights_Tk)
        return routing.sum_to_tokens(z_SD * _by_row(weights_Tk, routing)).to(dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, d_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        z_SD, weights_Tk = ctx.saved_tensors
        routing: Routing = ctx.routing
        dz = dw = None
        d_SD = routing.rows_of(d_TD.to(torch.promote_types(z_SD.dtype, weights_Tk.dtype)))
        if ctx.needs_input_grad[1]:
            dw_S1 = (d_SD * z_SD).sum(1, keepdim=True).to(weights_Tk.dtype)
            dw = routing.of_places(dw_S1).view(weights_Tk.shape)
        if ctx.needs_input_grad[0]:
            dz = (d_SD * _by_row(weights_Tk, routing)).to(z_SD.dtype)
        return dz, dw, None, None


def _by_row(weights_Tk: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[S, 1]"""
    return weights_Tk.reshape(-1, 1)[routing.order]
