"""Rows that the products of what dropout changes take, in codes of FP8 (change.py).

Shapes: t tokens, K inputs, N outputs.
"""

from __future__ import annotations

import torch

from packlora.fp8.rows import Rows, plain_rows_of
from packlora.ops.dropout.keys import LANE, dropout_threshold, dropped
from packlora.ops.gpu import runs_triton
from packlora.ops.lora_linear.changes import Mask

LEFT_OUT = 2.0**-9 / 3
"""Share of d W below which u is left out: a third of the most that bfloat16 rounds a number by."""


def changed_rows_of(x_tK: torch.Tensor, mask: Mask) -> Rows:
    """Codes of c drop(x) - x. x: contiguous rows of any float dtype."""
    if _by_kernel(x_tK):
        from packlora.fp8.change_launches import changed_rows

        return changed_rows(x_tK, mask)
    return plain_rows_of(x_tK.float() * factors_of(mask, x_tK.shape[1]))


def scaled_rows_of(d_tN: torch.Tensor, g_N: torch.Tensor, scales_N: torch.Tensor, mask: Mask) -> Rows:
    """Codes of (g - 1) d times W's scales. A token's scale is 0 where the change by dropout of what they stand for would be
    under LEFT_OUT of d W, by sums of squares of d times W's scales; its codes are then not to be read."""
    if _by_kernel(d_tN):
        from packlora.fp8.change_launches import scaled_rows

        return scaled_rows(d_tN, g_N, scales_N, mask, LEFT_OUT)
    all_tN, less_N = d_tN.float() * scales_N, g_N.float() - 1
    rows = plain_rows_of(all_tN * less_N)
    whole_t, part_t = all_tN.square().sum(1), (all_tN * less_N).square().sum(1)
    return Rows(rows.codes, torch.where(part_t * odds(mask.rate) > LEFT_OUT**2 * whole_t, rows.scales, 0.0))


def factors_of(mask: Mask, num_features: int) -> torch.Tensor:
    """Factors by which dropout changes tokens, float32 [t, num_features]: -1 of what is dropped, else c - 1."""
    gone = dropped(mask.keys_t2, mask.salt, num_features, mask.rate)
    return torch.full(gone.shape, odds(mask.rate), device=gone.device).masked_fill_(gone, -1.0)


def odds(rate: float) -> float:
    """p / (1 - p), of the rate as masks have it: c - 1, and the square of the size of the change over that of x."""
    threshold = dropout_threshold(rate)
    return threshold / (LANE - threshold)


def _by_kernel(x: torch.Tensor) -> bool:
    return x.is_cuda and x.element_size() == 2 and runs_triton(x.device)
