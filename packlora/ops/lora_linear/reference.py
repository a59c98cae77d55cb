"""Specification of a linear layer with adapters; every backend is tested against this file.

Shapes: T tokens, K inputs, N outputs, r rank.

For the tokens of a segment, with s the scaling, xd = dropout(x):

    LoRA   y = x W' + s (xd A') B' + bias
    DoRA   y = x W' + (g - 1) * (xd W') + g * s (xd A') B' + bias,      g = m / ||W + s B A||_row,  the norm a constant

which is g * (x W' + s (x A') B') + bias where nothing is dropped. The base product of dropped inputs in DoRA is PEFT's
semantics (peft.tuners.lora.dora); without `base_dropped` it is that of x, g * (x W' + s (xd A') B') + bias. A row of
W + s B A that is zero has g finite, so y = bias there, never NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from packlora.ops.dropout import dropout


@dataclass(frozen=True, slots=True)
class ReferenceSegment:
    """A run of consecutive tokens that belong to one adapter. Tokens in no segment see only the base layer.

    Any of the operands may be absent: no A and B is a layer where only the bias is trained; no magnitude is plain LoRA.
    """

    start: int
    stop: int
    scaling: float = 1.0
    dropout: float = 0.0
    A: torch.Tensor | None = None
    """[r, K]"""
    B: torch.Tensor | None = None
    """[N, r]"""
    magnitude: torch.Tensor | None = None
    """[N], DoRA's m."""
    norm: torch.Tensor | None = None
    """[N], ||W + s B A|| by row, see ops.row_norm; needed with magnitude."""
    bias: torch.Tensor | None = None
    """[N], replaces the base layer's bias for these tokens."""
    base_dropped: bool = True
    """DoRA under dropout: the base product that g scales is that of the dropped x (PEFT), else that of x."""


def lora_linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    segments: Sequence[ReferenceSegment],
    keys_T2: torch.Tensor | None = None,
    salt: int = 0,
) -> torch.Tensor:
    """The operator, differentiable by autograd in x and in the operands of the segments. Slow; for any dtype.

    Args:
        x_TK: packed tokens.
        weight_NK, bias_N: the frozen layer.
        segments: disjoint runs of tokens, in any order.
        keys_T2: dropout keys of the tokens (ops.dropout.token_keys); needed where a segment has dropout.
        salt: of the layer (ops.dropout.layer_salt).
    """
    base_TN = x_TK @ weight_NK.T
    parts: list[torch.Tensor] = []
    end = 0
    for seg in sorted(segments, key=lambda seg: seg.start):
        parts.append(_plus(base_TN[end : seg.start], bias_N))
        parts.append(_segment(x_TK, base_TN, weight_NK, bias_N, seg, keys_T2, salt))
        end = seg.stop
    parts.append(_plus(base_TN[end:], bias_N))
    return torch.cat([part.to(x_TK.dtype) for part in parts])


def _plus(y_TN: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    return y_TN if bias_N is None else y_TN + bias_N


def _segment(
    x_TK: torch.Tensor,
    base_TN: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    seg: ReferenceSegment,
    keys_T2: torch.Tensor | None,
    salt: int,
) -> torch.Tensor:
    x_tK, y_tN = x_TK[seg.start : seg.stop], base_TN[seg.start : seg.stop]
    if seg.A is not None and seg.B is not None:
        xd_tK, dropped_tN = x_tK, y_tN
        if seg.dropout:
            assert keys_T2 is not None
            xd_tK = dropout(x_tK, keys_T2[seg.start : seg.stop], salt, seg.dropout)
            if seg.base_dropped:
                dropped_tN = xd_tK @ weight_NK.T
        low_rank_tN = seg.scaling * (xd_tK @ seg.A.T) @ seg.B.T
        if seg.magnitude is None:
            y_tN = y_tN + low_rank_tN
        else:
            assert seg.norm is not None
            g_N = seg.magnitude / seg.norm
            y_tN = y_tN + (g_N - 1) * dropped_tN + g_N * low_rank_tN
    return _plus(y_tN, seg.bias if seg.bias is not None else bias_N)
