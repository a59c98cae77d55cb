"""Rows in FP8: codes of e4m3 and one scale a row, so that codes * scale is the row.

The largest number of a row gets the largest code. A row with a number that is not finite is NaN as a whole, and no other row
is: tokens of a job that has failed reach no other job's.

Shapes: T rows, K columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from packlora.ops.gpu import runs_triton

CODE = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest code."""
LEAST = 1e-30
"""Least maximum of a row that is scaled up to the largest code; below it numbers become smaller codes, and zeros stay."""


class Rows(NamedTuple):
    """codes [T, K] of e4m3; scales float32 [T]."""

    codes: torch.Tensor
    scales: torch.Tensor

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The rows [T, K] that the codes stand for."""
        wide = torch.promote_types(dtype, torch.float32)
        return self.codes.to(wide).mul_(self.scales.to(wide)[:, None]).to(dtype)


def rows_of(x_TK: torch.Tensor, factors_K: torch.Tensor | None = None) -> Rows:
    """The codes of x * factors. x: of any float dtype, with contiguous rows; factors: None for ones."""
    if x_TK.is_cuda and x_TK.element_size() == 2 and runs_triton(x_TK.device):
        from packlora.fp8.launches import coded_rows

        return Rows(*coded_rows(x_TK, factors_K, LARGEST, LEAST))
    return plain_rows_of(x_TK, factors_K)


def plain_rows_of(x_TK: torch.Tensor, factors_K: torch.Tensor | None = None) -> Rows:
    """The same by torch."""
    wide = x_TK.float() if factors_K is None else x_TK.float() * factors_K.float()
    most_T = wide.abs().amax(1).clamp_min(LEAST)
    largest_T = torch.full_like(most_T, LARGEST)  # torch divides by a number, and a number, by its inverse
    return Rows((wide * (largest_T / most_T)[:, None]).to(CODE), most_T / largest_T)


def scales_of(weight_NK: torch.Tensor) -> torch.Tensor:
    """Scale of each row of a weight, float32 [N]: the least power of two by which its numbers become codes. Powers of two round
    nothing where gradients are multiplied by them, and cost codes of e4m3 no digit."""
    mantissa_N, exponent_N = torch.frexp(weight_NK.abs().amax(1).float() / LARGEST)
    exponent_N = exponent_N - (mantissa_N == 0.5).to(exponent_N.dtype)
    return torch.ldexp(torch.ones_like(mantissa_N), exponent_N)


def coded(weight_NK: torch.Tensor) -> Rows:
    """A weight of floats in codes. Raises ValueError where a number is not finite."""
    if not bool(torch.isfinite(weight_NK).all()):
        raise ValueError("a weight has numbers that are not finite")
    scales_N = scales_of(weight_NK)
    return Rows((weight_NK.float() / scales_N[:, None]).to(CODE), scales_N)
