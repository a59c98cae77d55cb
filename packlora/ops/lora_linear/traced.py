"""A group of layers with one adapter in plain torch operations, for torch.compile to trace; autograd does the backward.

    y_j = x W_j' + s_j xd A_j' B_j' + bias_j                                                 LoRA, xd = drop(x)
    y_j = g_j (x W_j' + s_j x A_j' B_j') + bias_j                                            DoRA, g = m / norm
    y_j = x W_j' + (g_j - 1) (xd W_j') + g_j s_j xd A_j' B_j' + bias_j                       DoRA under dropout, as PEFT has it

A compiler fuses dropout, scales and biases into their neighbours by itself. Measured with a prototype on an H200 (bf16, 8192
tokens through four layers of an 8B model, ms a forward and backward; frozen 60.2): traced 66.9 LoRA, 72.8 DoRA; kernels behind
a registered operator 73.6 and 90.0; PEFT 68.6 LoRA. Eight layers of a 0.6B model as CUDA graphs (frozen 6.8): traced 9.9 and
10.9, a registered operator for the group 10.3 and 13.8 (benchmarks/LOG.md).

In 16 bits the base product accumulates onto the low-rank part, so that the sum is rounded once where the library adds before it
rounds. B is scaled where it is cast anyway: one rounding less than to scale S, and a kernel less for each layer and direction.

Shapes: T tokens, K inputs, N outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from packlora.ops.dropout.keys import dropout_factor, dropped
from packlora.ops.gpu import rounds_before_adding


class TracedLayer(NamedTuple):
    """Operands of one layer: weight [N, K] and bias [N] in x's dtype, A [r, K] and B [N, r] in any float dtype, scaling;
    magnitude [N] and norm [N], the row norms of W + s B A, for DoRA."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    A: torch.Tensor
    B: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None = None
    norm: torch.Tensor | None = None


def traced_group(
    x_TK: torch.Tensor, layers: Sequence[TracedLayer], keys_T2: torch.Tensor | None = None, salt: int = 0, p: float = 0.0
) -> list[torch.Tensor]:  # fmt: skip
    """y [T, N] of every layer in x's dtype, differentiable in x and all operands but the norms.

    Args:
        x_TK: tokens, all of one adapter.
        layers: those that read them.
        keys_T2, salt, p: dropout on the low-rank branch (ops.dropout.keys), one mask for all layers; where p is 0 no keys are
            needed.
    """
    xd_TK = x_TK
    if p:
        assert keys_T2 is not None
        xd_TK = (x_TK * dropout_factor(p)).masked_fill(dropped(keys_T2, salt, x_TK.shape[1], p), 0.0)
    factors = [layer.A.to(x_TK.dtype) for layer in layers]
    if len(layers) == 1:  # a compiler keeps the copy that joining one would be
        return [_up(x_TK, xd_TK, linear(xd_TK, factors[0]), layers[0], bool(p))]
    parts = linear(xd_TK, torch.cat(factors)).split([len(A_rK) for A_rK in factors], dim=1)
    return [_up(x_TK, xd_TK, S_Tr, layer, bool(p)) for layer, S_Tr in zip(layers, parts, strict=True)]


def _up(
    x_TK: torch.Tensor, xd_TK: torch.Tensor, S_Tr: torch.Tensor, layer: TracedLayer, dropping: bool
) -> torch.Tensor:
    low_TN = linear(S_Tr, (layer.B * layer.scaling).to(x_TK.dtype))
    if layer.magnitude is None:
        y_TN = _onto(low_TN, x_TK, layer.weight)
        return y_TN if layer.bias is None else y_TN + layer.bias
    assert layer.norm is not None
    g_N = layer.magnitude.to(layer.norm.dtype) / layer.norm  # never in 16 bits: g is near 1
    if dropping:
        y_TN = linear(x_TK, layer.weight) + (g_N - 1) * linear(xd_TK, layer.weight) + g_N * low_TN
    else:
        y_TN = g_N * _onto(low_TN, x_TK, layer.weight)
    return (y_TN if layer.bias is None else y_TN + layer.bias).to(x_TK.dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _rounds_first(device: torch.device) -> bool:
    return rounds_before_adding(device)


def _onto(low_TN: torch.Tensor, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """low + x W'. In wider dtypes a product rounds more when it accumulates onto something; where the library rounds before it
    adds, accumulating brings nothing, and a sum by itself can be fused with what reads it."""
    if x_TK.element_size() == 2 and not _rounds_first(x_TK.device):
        return torch.addmm(low_TN, x_TK, weight_NK.t())
    return linear(x_TK, weight_NK) + low_TN
