"""Convolutions: what a low-rank adapter of one is, as PEFT has it, for jobs and for PEFT's own layers.

    y = W * x + b + s B * (A * x)        A [r, C, kernel] strides and pads as W does, B [N, r / groups, 1] sees one place

DoRA's norm is over a filter's channels and kernel. With groups, A is not grouped, and the norm is of W + s P where P is the
product of B, read as [N / groups, r], and A [r, groups K], read in the shape of W. That is not the norm of what the layer
multiplies with; it is kept, since PEFT trains magnitudes with it.

Shapes: n rows of the input, C input channels, N output channels, r rank, K = C / groups times the kernel's elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

CONVOLVE: dict[type, Callable[..., torch.Tensor]] = {
    nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d,
}  # fmt: skip
"""Functions that compute each kind of layer that can be adapted."""

Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def convolve(x: torch.Tensor, like: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x with a weight in the place of that of a layer."""
    y: torch.Tensor = CONVOLVE[type(like)](x, weight, bias, like.stride, like.padding, like.dilation, like.groups)
    return y


def low_rank(x: torch.Tensor, base: Any, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """B * (A * x), without the scaling."""
    convolved = CONVOLVE[type(base)]
    return convolved(convolved(x, A, None, base.stride, base.padding), B, groups=base.groups)


def shapes(base: Any, r: int, use_dora: bool, train_bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of what is trained, as PEFT has it."""
    N, places = base.out_channels, (1,) * len(base.kernel_size)
    made = {"A": (r, base.in_channels, *base.kernel_size), "B": (N, r // base.groups, *places)}
    if use_dora:
        made["filter_magnitude"] = 1, N, *places
    return made | ({"bias": (N,)} if train_bias else {})


def problems(base: Any, A: torch.Tensor, B: torch.Tensor) -> list[Problem]:
    """W [N, K], A [r, K] and B [N, r] whose rows' norms DoRA wants, as views; of each group, where there are groups."""
    W_NK, A, groups = base.weight.detach().flatten(1), A.detach().flatten(1), base.groups
    B_nr = B.detach().view(-1, len(A))
    return [(W_NK[n::groups], A_rK, B_nr) for n, A_rK in enumerate(A.split(W_NK.shape[1], 1))]


def whole(norms: list[torch.Tensor]) -> torch.Tensor:
    """[N] from the norms of the problems."""
    return norms[0] if len(norms) == 1 else torch.stack(norms, 1).flatten()


def column(vector_N: torch.Tensor, base: Any) -> torch.Tensor:
    """[N] in the shape that multiplies an output."""
    return vector_N.view(-1, *[1] * len(base.kernel_size))


def why_unfit(base: Any, r: int) -> str | None:
    """Why PEFT's adapter of a convolution does not compute what the layer does, or cannot be."""
    if base.padding_mode != "zeros":
        return f"pads with {base.padding_mode}, an adapter with zeros"
    if any(step != 1 for step in base.dilation):
        return f"has dilation {tuple(base.dilation)}, an adapter has none"
    if r % base.groups:
        return f"has {base.groups} groups, by which its rank {r} does not divide"
    return None
