"""DoRA's output where no kernel of the operator makes it: embeddings and convolutions, of jobs and of PEFT's own layers.

    y = g * (base(x) + s low(x)) + bias                                   g = m / norm
    y = base(x) + bias + (g - 1) * base(drop(x)) + g * s low(drop(x))     with dropout, as PEFT has it

base is the layer's product without its bias, low that of A and then B. g is never in the activations' dtype: it is near 1, and
bfloat16 has nothing between 1 and 1.0078.

Shapes: N outputs.
"""

from __future__ import annotations

import torch


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
    y = base * (g - 1 if less_one else g) + low * (g * s)
    return (y if offset is None else y + offset).to(base.dtype)
