"""DoRA under dropout whose second base product is of what dropout changes, in FP8: groups with such weights, and what they must
give by the specification with operands that are rounded here by the definition of e4m3. Used on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from fp8_cases import e4m3, rounded_rows
from group_cases import GroupCase, _results, cast

from packlora.fp8.change import CodedBeside
from packlora.ops.dropout.keys import dropout_factor, dropped
from packlora.ops.lora_linear import reference
from packlora.ops.lora_linear.reference import ReferenceSegment

LEFT_OUT = 2.0**-9 / 3


def beside(case: GroupCase) -> GroupCase:
    """The case with codes beside its weights."""
    return replace(
        case, layers=tuple(replace(layer, frozen=CodedBeside(layer.frozen.dense())) for layer in case.layers)
    )


class _Second(torch.autograd.Function):
    """(g - 1) v W' for the change v of x by dropout; factors [t, K] are those of the change."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor, rate: float
    ) -> torch.Tensor:
        scales = torch.exp2(torch.ceil(torch.log2(weight.abs().amax(1) / 448)))
        codes = e4m3(weight / scales[:, None])
        u = rounded_rows(x.float() * factors.float()) @ (codes * scales[:, None]).T
        ctx.save_for_backward(g, scales, codes, factors, u)
        ctx.rate = rate
        return (g - 1) * u

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        g, scales, codes, factors, u = ctx.saved_tensors
        sized, less = d.float() * scales.float(), (g.float() - 1)
        rows = rounded_rows(sized * less)
        few = (sized * less).square().sum(1) * ctx.rate / (1 - ctx.rate) <= LEFT_OUT**2 * sized.square().sum(1)
        return factors * (rows.masked_fill(few[:, None], 0) @ codes), (d * u).sum(0), None, None, None


def specified(case: GroupCase, change: Callable[..., torch.Tensor] = _Second.apply) -> dict[str, torch.Tensor]:
    """What the case gives in float64, by reference.py without dropout on the base product and what is added to it."""
    own, leaves = cast(case, torch.float64)
    outputs = []
    for layer in own.layers:
        weight, segments = layer.frozen.dense(), []
        for segment in own.segments:
            low = layer.adapters.get(segment.adapter)
            if low is not None:
                segments.append(
                    ReferenceSegment(
                        segment.start, segment.stop, low.scaling, segment.dropout, low.A, low.B, low.magnitude, low.norm,
                        low.bias, False,
                    )
                )  # fmt: skip
        y = reference.lora_linear(own.x, weight, layer.bias, segments, own.keys, own.salt)
        for segment in own.segments:
            low = layer.adapters.get(segment.adapter)
            if low is None or low.magnitude is None or not segment.dropout or not segment.base_dropped:
                continue
            gone = dropped(own.keys[segment.rows], own.salt, own.x.shape[1], segment.dropout)
            factors = torch.where(gone, -1.0, dropout_factor(segment.dropout) - 1).double()
            rate = 1 - 1 / dropout_factor(segment.dropout)
            more = change(own.x[segment.rows], low.magnitude / low.norm, weight, factors, rate)
            y = torch.cat([y[: segment.start], y[segment.rows] + more, y[segment.stop :]])
        outputs.append(y)
    return _results(outputs, leaves, own.dy)
