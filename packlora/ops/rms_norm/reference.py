"""Specification of an RMS norm; the operator is tested against this file.

Shapes: x [..., D], weight [D].
"""

from __future__ import annotations

import torch

KINDS = ((0.0, "llama"), (0.0, "gemma"), (1.0, "gemma"))
"""Number added to the weight, and place of the rounding: llama rounds the normalised value to x's dtype before it meets the
weight, gemma rounds once, their product. In transformers the first is most models' (LlamaRMSNorm), the last Gemma's."""


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float, rounding: str) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) by row, in float32 at least (Zhang & Sennrich 2019).

    Args:
        x: [..., D].
        weight_D: in x's dtype.
        offset, rounding: one of KINDS.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounding == "llama":
        return (weight_D + offset) * normed.to(x.dtype)
    return (normed * (weight_D.to(wide.dtype) + offset)).to(x.dtype)
