"""DoRA's output where no kernel of the operator makes it: embeddings and convolutions, of jobs and of PEFT's own layers.

    y = g * (base(x) + s low(x)) + bias                                   g = m / norm
    y = base(x) + bias + (g - 1) * base(drop(x)) + g * s low(drop(x))     with dropout, as PEFT has it

base is the layer's product without its bias, low that of A and then B. g is never in the activations' dtype: it is near 1, and
bfloat16 has nothing between 1 and 1.0078. `compose` is one operation of autograd that keeps base, low and g; `added` is of
plain operations.

Shapes: N outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from packlora.ops.first_order import first_order


def factor(magnitude: torch.Tensor, norm_N: torch.Tensor) -> torch.Tensor:
    """g [N], in the norm's dtype. magnitude: of N elements."""
    return magnitude.flatten().to(norm_N.dtype) / norm_N.detach()


def added(y: torch.Tensor, share: torch.Tensor, low: torch.Tensor, g: torch.Tensor, s: float) -> torch.Tensor:
    """y + (g - 1) * share + g * s low. y: the layer's output. share: the part of it that is scaled, of what is dropped."""
    return y + (g - 1) * share + g * s * low


def compose(
    base: torch.Tensor, low: torch.Tensor, offset: torch.Tensor | None, g: torch.Tensor, s: float, less_one: bool
) -> torch.Tensor:
    """offset + g * (base + s low), or with (g - 1) for base's g where less_one; offset may be None or a bias. In g's dtype, and
    given in base's."""
    y: torch.Tensor = _Compose.apply(base, low, offset, g, s, less_one)
    return y


class _Compose(torch.autograd.Function):
    """See compose."""

    @staticmethod
    def forward(
        ctx: Any,
        base: torch.Tensor,
        low: torch.Tensor,
        offset: torch.Tensor | None,
        g: torch.Tensor,
        s: float,
        less_one: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(base, low, g)
        ctx.s, ctx.less_one, ctx.offset = s, less_one, None if offset is None else (offset.shape, offset.dtype)
        share = g - 1 if less_one else g
        y = base * share if offset is None else torch.addcmul(offset, base, share)
        return y.addcmul_(low, g * s).to(base.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d,) = grads
        base, low, g = ctx.saved_tensors
        need_base, need_low, need_offset, need_g = ctx.needs_input_grad[:4]
        d_base = (d * (g - 1 if ctx.less_one else g)).to(base.dtype) if need_base else None
        d_low = (d * (g * ctx.s)).to(low.dtype) if need_low else None
        d_offset = d_g = None
        if need_offset:
            shape, dtype = ctx.offset
            d_offset = d if shape == d.shape else d.to(g.dtype).sum_to_size(shape).to(dtype)
        if need_g:
            z = torch.add(base.to(g.dtype), low, alpha=ctx.s)
            d_g = z.mul_(d).sum_to_size(g.shape)
        return d_base, d_low, d_offset, d_g, None, None
