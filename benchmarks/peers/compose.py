"""Scaling-DoRA's composition (arXiv 2603.22276) as an operator of its own, for comparison.

    delta = (g - 1) base + g (s lora)          base = x W', lora = S B', g = m / |W + s B A|; the layer gives base + delta

The paper composes two finished products in a pass of its own; this package's layers scale inside the product that ends them,
y = g (base + s S B'), and never hold lora or delta. Tier "eager" is made of torch's operations, "kernel" of one Triton kernel
each way. The product of s comes first, then that of g, then the base is added, as the paper asks.

Shapes: M tokens, N outputs; base, lora, d [M, N], g [N].
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch

from packlora.ops.first_order import first_order

Tier = Literal["eager", "kernel"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HAS_TRITON = importlib.util.find_spec("triton") is not None


def compose(
    base_MN: torch.Tensor, lora_MN: torch.Tensor, g_N: torch.Tensor, scaling: float, tier: Tier = "eager"
) -> torch.Tensor:
    """delta [M, N] in the dtype of base; gradients for base, lora and g.

    Args:
        base_MN, lora_MN: of one dtype.
        g_N: of any dtype. The kernels compute in float32 whatever it is; eager computes in the type that torch promotes
            to. A g in bfloat16 was rounded before 1 is taken from it: most of what it differs from 1 is lost then.
        tier: eager, or kernel: contiguous copies are made of what is not contiguous; deterministic.

    Raises:
        ValueError: shapes or dtypes do not fit, or the tier is not one of the two.
    """
    if base_MN.ndim != 2 or lora_MN.shape != base_MN.shape or g_N.shape != base_MN.shape[1:]:
        raise ValueError(
            f"base {tuple(base_MN.shape)}, lora {tuple(lora_MN.shape)} and g {tuple(g_N.shape)} must be [M, N], [M, N], [N]"
        )
    if base_MN.dtype != lora_MN.dtype:
        raise ValueError(f"base is {base_MN.dtype}, lora {lora_MN.dtype}; both must have one dtype")
    if tier == "eager":
        return (lora_MN * scaling * g_N + base_MN * (g_N - 1)).to(base_MN.dtype)
    if tier != "kernel":
        raise ValueError(f"tier {tier!r} is not one of eager, kernel")
    if base_MN.dtype not in DTYPES:
        raise ValueError(f"the kernel takes {', '.join(map(str, DTYPES))}, got {base_MN.dtype}")
    if not HAS_TRITON:
        raise ValueError("the kernel needs the triton package, which is not installed; tier eager does not")
    out: torch.Tensor = _Compose.apply(base_MN.contiguous(), lora_MN.contiguous(), g_N.contiguous(), scaling)
    return out


class _Compose(torch.autograd.Function):
    """Saved are the two products, no third tensor of their size."""

    @staticmethod
    def forward(
        ctx: Any, base_MN: torch.Tensor, lora_MN: torch.Tensor, g_N: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        from benchmarks.peers.compose_kernel import forward

        ctx.save_for_backward(base_MN, lora_MN, g_N)
        ctx.scaling = scaling
        return forward(base_MN, lora_MN, g_N, scaling)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from benchmarks.peers.compose_kernel import backward

        base_MN, lora_MN, g_N = ctx.saved_tensors
        d_base, d_lora, d_g = backward(
            gradients[0].contiguous(), base_MN, lora_MN, g_N, ctx.scaling, ctx.needs_input_grad[2]
        )
        return d_base, d_lora, None if d_g is None else d_g.to(g_N.dtype), None
