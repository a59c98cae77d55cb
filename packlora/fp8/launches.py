"""Launches of the kernel that gives rows their codes of FP8."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton

from packlora.fp8.kernel import coded_rows_kernel
from packlora.ops import launcher
from packlora.ops.gpu import on_device

NUMBERS, WARP_NUMBERS, WARPS = 4096, 2048, 16
"""Numbers that a program has at a time, those of a row at least; numbers for a warp, and most warps."""
TURNS = 4
"""Times that a program has so many where there are factors, which it reads once."""
_LAUNCHES: dict[Hashable, launcher.CachedLaunch] = {}


def coded_rows(
    x_TK: torch.Tensor, factors_K: torch.Tensor | None, largest: float, least: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, K] and scales [T] of x * factors; see rows.rows_of."""
    T, K = x_TK.shape
    codes = torch.empty(T, K, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scales = torch.empty(T, dtype=torch.float32, device=x_TK.device)
    BK, turns = triton.next_power_of_2(K), 1 if factors_K is None else TURNS
    BM = max(1, NUMBERS // BK)
    args = (x_TK, factors_K, codes, scales, T, K, x_TK.stride(0))
    key = (x_TK.device, x_TK.dtype, T, K, x_TK.stride(0), factors_K is None)
    with on_device(x_TK.device):
        launcher.launch(
            coded_rows_kernel, (-(-T // (turns * BM)),), args, launcher.bounded(_LAUNCHES), key,
            HAS_FACTORS=factors_K is not None, LARGEST=largest, LEAST=least, TURNS=turns, BM=BM, BK=BK,
            num_warps=max(1, min(BM * BK // WARP_NUMBERS, WARPS)), num_stages=1,
        )  # fmt: skip
    return codes, scales
