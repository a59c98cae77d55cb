"""A group of layers with one adapter in plain torch operations, for torch.compile to trace; autograd does the backward.

    y_j = x W_j' + s_j xd A_j' B_j' + bias_j                                                 LoRA, xd = drop(x)
    y_j = g_j (x W_j' + s_j x A_j' B_j') + bias_j                                            DoRA, g = m / norm
    y_j = x W_j' + (g_j - 1) (xd W_j') + g_j s_j xd A_j' B_j' + bias_j                       DoRA under dropout, as PEFT has it

A compiler fuses dropout, scales and biases into their neighbours by itself. Measured with a prototype on an H200 (bf16, 8192
tokens through four layers of an 8B model, ms a forward and backward; frozen 60.2): traced 66.9 LoRA, 72.8 DoRA; kernels behind
a registered operator 73.6 and 90.0; PEFT 68.6 LoRA. Eight layers of a 0.6B model as CUDA graphs (frozen 6.8): traced 9.9 and
10.9, a registered operator for the group 10.3 and 13.8 (benchmarks/LOG.md).

In 16 bits the base product accumulates onto the low-rank part where the library adds before it rounds, so that the sum is
rounded once. Elsewhere x keeps its shape: Inductor turns a sum of two products [T, N] into a copy and an addmm, and fuses a sum
of their views with what reads it. Dropout is torch's, which Inductor fuses too; masks of ops.dropout are views of words of
another width, which it writes to memory. A is scaled where it is joined or cast anyway, and what is scaled
is S: the gradient of B needs no scale, and the gradients of siblings' A one for all.

Shapes: T tokens, K inputs, N outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import dropout, linear

from packlora.ops.gpu import rounds_before_adding


@dataclass(slots=True)
class TracedLayer:
    """Operands of one layer: weight [N, K] and bias [N] in x's dtype, A [r, K] and B [N, r] in any float dtype, scaling;
    magnitude [N] and norm [N], the row norms of W + s B A, for DoRA."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    A: torch.Tensor
    B: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None = None
    norm: torch.Tensor | None = None


def traced_group(x: torch.Tensor, layers: Sequence[TracedLayer], p: float = 0.0) -> list[torch.Tensor]:
    """y [..., N] of every layer in x's dtype, differentiable in x and all operands but the norms.

    Args:
        x: [..., K], all tokens of one adapter.
        layers: those that read them.
        p: rate of dropout on the low-rank branch, torch's own; one mask for all layers.
    """
    xd = dropout(x, p) if p else x
    S = linear(xd, _joined(layers, x.dtype))
    parts = S.split([len(layer.A) for layer in layers], dim=-1) if len(layers) > 1 else [S]
    return [_up(x, xd, part, layer, bool(p)) for layer, part in zip(layers, parts, strict=True)]


def _joined(layers: Sequence[TracedLayer], dtype: torch.dtype) -> torch.Tensor:
    """s A of all layers, [R, K]; with one scaling for all their gradients are one product and one scale."""
    scaling, factors = layers[0].scaling, [layer.A for layer in layers]
    if any(layer.scaling != scaling for layer in layers):
        return torch.cat([layer.A * layer.scaling for layer in layers]).to(dtype)
    A_RK = torch.cat(factors) if len(factors) > 1 else factors[0]  # a compiler keeps the copy that joining one would be
    return (A_RK * scaling).to(dtype)


def _up(x: torch.Tensor, xd: torch.Tensor, S: torch.Tensor, layer: TracedLayer, dropping: bool) -> torch.Tensor:
    low = linear(S, layer.B.to(x.dtype))
    if layer.magnitude is None:
        y = _onto(low, x, layer.weight)
        return y if layer.bias is None else y + layer.bias
    assert layer.norm is not None
    g_N = layer.magnitude.to(layer.norm.dtype) / layer.norm  # never in 16 bits: g is near 1
    if dropping:
        y = linear(x, layer.weight) + (g_N - 1) * linear(xd, layer.weight) + g_N * low
    else:
        y = g_N * _onto(low, x, layer.weight)
    return (y if layer.bias is None else y + layer.bias).to(x.dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _rounds_first(device: torch.device) -> bool:
    return rounds_before_adding(device)


def _onto(low: torch.Tensor, x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """low + x W', rounded once where the library can; else both parts are rounded too. In wider dtypes a product that
    accumulates rounds more."""
    if x.element_size() != 2 or _rounds_first(x.device):
        return linear(x, weight_NK) + low
    N, K = weight_NK.shape
    return torch.addmm(low.reshape(-1, N), x.reshape(-1, K), weight_NK.t()).view(low.shape)
