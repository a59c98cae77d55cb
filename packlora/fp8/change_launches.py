"""Launches of the kernels of what dropout changes of DoRA's base product; see change_kernels.py."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton

from packlora.fp8.change_kernels import change_kernel, changed_rows_kernel, scaled_rows_kernel
from packlora.fp8.launches import NUMBERS, TURNS
from packlora.fp8.rows import CODE, LARGEST, LEAST, Rows
from packlora.ops import launcher
from packlora.ops.dropout.keys import dropout_threshold, signed
from packlora.ops.gpu import on_device, processors
from packlora.ops.launcher import Descriptor
from packlora.ops.lora_linear.changes import Mask

WARP_NUMBERS, WARPS = 1024, 16
"""Numbers of a row for a warp, and most warps."""
BM, BN, BYTES = 128, 256, 128
"""Rows and columns of a product's tiles, and bytes of the columns that are read at a time."""
STAGES = 3
_LAUNCHES: dict[Hashable, launcher.CachedLaunch] = {}


def changed_rows(x_tK: torch.Tensor, mask: Mask) -> Rows:
    """See change_rows.changed_rows_of."""
    T, K = x_tK.shape
    rows, (block, columns, warps) = _room(x_tK), _cut(K)
    args = (x_tK, mask.keys_t2, *rows, *_numbers(mask), T, K, x_tK.stride(0))
    _launch(
        changed_rows_kernel, (-(-T // block),), args, (T, K, x_tK.stride(0)), LARGEST=LARGEST, LEAST=LEAST, BM=block,
        BK=columns, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return rows


def scaled_rows(d_tN: torch.Tensor, g_N: torch.Tensor, scales_N: torch.Tensor, mask: Mask, left_out: float) -> Rows:
    """See change_rows.scaled_rows_of."""
    T, N = d_tN.shape
    rows, (block, columns, warps) = _room(d_tN), _cut(N)
    args = (d_tN, g_N, scales_N, *rows, dropout_threshold(mask.rate), T, N, d_tN.stride(0))
    _launch(
        scaled_rows_kernel, (-(-T // (TURNS * block)),), args, (T, N, d_tN.stride(0)), LEFT_OUT=left_out, LARGEST=LARGEST,
        LEAST=LEAST, TURNS=TURNS, BM=block, BN=columns, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return rows


def add_change(
    rows: Rows, codes_NK: torch.Tensor, scales_N: torch.Tensor, g_N: torch.Tensor, y_tN: torch.Tensor,
    z_tN: torch.Tensor | None,
) -> None:  # fmt: skip
    """y += (g - 1) u and z += u, for the product u of rows with a weight's codes and scales."""
    _product(rows, codes_NK, y_tN, z_tN, (scales_N, g_N, None, 0, 0), FORWARD=True, KEEP=z_tN is not None)


def add_change_t(rows: Rows, codes_KN: torch.Tensor, mask: Mask, dx_tK: torch.Tensor) -> None:
    """dx += c drop(u) - u, for the product u of rows with a weight's codes."""
    _product(rows, codes_KN, dx_tK, None, (None, None, mask.keys_t2, *_numbers(mask)), FORWARD=False, KEEP=False)


def _product(
    rows: Rows, codes_QP: torch.Tensor, y_TQ: torch.Tensor, z_TQ: torch.Tensor | None, more: tuple[Any, ...],
    **constants: bool,
) -> None:  # fmt: skip
    (T, P), Q = rows.codes.shape, codes_QP.shape[0]
    programs = processors(codes_QP.device)
    X, V, Y = Descriptor(rows.codes, [BM, BYTES]), Descriptor(codes_QP, [BN, BYTES]), Descriptor(y_TQ, [BM, BN // 2])
    args = X, V, Y, None if z_TQ is None else Descriptor(z_TQ, [BM, BN // 2]), rows.scales, *more, T, P, Q
    _launch(
        change_kernel, (min(programs, -(-T // BM) * -(-Q // BN)),), args, (T, P, Q),
        **constants, BM=BM, BN=BN, BK=BYTES, GROUP=8, PROGRAMS=programs, num_warps=8, num_stages=STAGES,
    )  # fmt: skip


def _launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], sizes: tuple[int, ...], **constants: Any
) -> None:
    """sizes: numbers that decide the grid, and what the kernel is compiled for."""
    tensors = [getattr(arg, "base", arg) for arg in args]
    kinds = [(own.dtype, own.data_ptr() % 16 == 0) if isinstance(own, torch.Tensor) else own is None for own in tensors]
    with on_device(tensors[0].device):
        key = kernel.__name__, tensors[0].device, *sizes, *kinds
        launcher.launch(kernel, grid, args, launcher.bounded(_LAUNCHES), key, **constants)


def _numbers(mask: Mask) -> tuple[int, int]:
    """Salt and threshold as kernels take them."""
    return signed(mask.salt), dropout_threshold(mask.rate)


def _room(x: torch.Tensor) -> Rows:
    return Rows(
        torch.empty(x.shape, dtype=CODE, device=x.device), torch.empty(len(x), dtype=torch.float32, device=x.device)
    )


def _cut(columns: int) -> tuple[int, int, int]:
    """Rows and columns that a program has at a time, and its warps."""
    BK = triton.next_power_of_2(columns)
    rows = max(1, NUMBERS // BK)
    return rows, BK, max(1, min(rows * BK // WARP_NUMBERS, WARPS))
