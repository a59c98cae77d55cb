"""torch's products as the steps use them: into given buffers, in given dtypes, of dropped tokens; sums are rounded once."""

from __future__ import annotations

import torch

from packlora.ops.dropout import masked
from packlora.ops.lora_linear.call import Call
from packlora.ops.lora_linear.types import Segment


def drop(call: Call, tokens: torch.Tensor, keys_T2: torch.Tensor | None, segment: Segment) -> torch.Tensor:
    """Rows of a segment with dropped elements 0."""
    if not segment.dropout:
        return tokens
    assert keys_T2 is not None
    return masked(tokens, keys_T2[segment.rows], call.salt, segment.dropout)


def sum_mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """out = a b, or out += a b; out may be float32 where a and b have 16 bits (CUDA)."""
    if out.dtype == a.dtype:
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif add:
        out += torch.mm(a, b, out_dtype=out.dtype)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def write_mm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """out = scale a b, written and not read."""
    if scale == 1.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=0, alpha=scale, out=out)
