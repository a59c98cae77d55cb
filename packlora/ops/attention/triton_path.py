"""Launches of the kernels of kernel.py. Nothing here waits for the device.

Shapes: q [H, T, D], k and v [h, T, D], table [2, 3, N] of SampleBlocks. Operands are read where they lie, where
that can be; results lie as [T, H, D], in which the projections read them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any

import torch
import triton

from packlora.ops import launcher
from packlora.ops.attention.blocks import BLOCK
from packlora.ops.attention.kernel import attention_forward_kernel, attention_keys_kernel, attention_queries_kernel
from packlora.ops.gpu import has_copy_engine, on_device

_LAUNCHES: dict[Hashable, launcher.CachedLaunch] = {}


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, scale: float, window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """y [T, H, D], and the logarithms in base 2 of the scores' sums, [H, T] in float32, for the backward."""
    q, k, v = (_dense(tensor) for tensor in (q, k, v))
    H, T, D = q.shape
    y_THD = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
    sums_HT = torch.empty(H, T, dtype=torch.float32, device=q.device)
    _launch(
        attention_forward_kernel, "forward", H, (q, k, v, y_THD.transpose(0, 1), sums_HT), (0, 1, 2, 3), table, len(k),
        scale, window, softcap,
    )  # fmt: skip
    return y_THD, sums_HT


def with_sinks(
    y_THD: torch.Tensor, sums_HT: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Correct the output and the log-sums of `forward` for attention sinks: each head's sum of exponentials gets one more
    score, sinks_H [H] (natural logarithm), whose value vector is zero."""
    whole_HT = torch.logaddexp2(sums_HT, sinks_H.float()[:, None] / math.log(2))
    share_TH1 = torch.exp2(sums_HT - whole_HT).T[..., None]
    return (y_THD * share_TH1).to(y_THD.dtype), whole_HT


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y_THD: torch.Tensor, sums_HT: torch.Tensor, table: torch.Tensor,
    dy_THD: torch.Tensor, scale: float, window: int | None, softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv, of the shapes of q, k and v."""
    q, k, v, dy = (_dense(tensor) for tensor in (q, k, v, dy_THD.transpose(0, 1)))
    y = y_THD.transpose(0, 1)
    dq, dk, dv = (
        torch.empty(tensor.shape[1], len(tensor), tensor.shape[2], dtype=q.dtype, device=q.device).transpose(0, 1)
        for tensor in (q, k, v)
    )
    products_HT = torch.empty_like(sums_HT)
    own = scale, window, softcap
    _launch(
        attention_queries_kernel, "queries", len(q), (q, k, v, y, dy, sums_HT, products_HT, dq), (0, 1, 2, 3, 4, 7), table,
        len(k), *own,
    )  # fmt: skip
    _launch(
        attention_keys_kernel, "keys", len(k), (q, k, v, dy, sums_HT, products_HT, dk, dv), (0, 1, 2, 3, 6, 7), table,
        len(k), *own,
    )  # fmt: skip
    return dq, dk, dv


def _launch(
    kernel: Any, name: str, heads: int, operands: tuple[torch.Tensor, ...], strided: tuple[int, ...], table: torch.Tensor,
    shared: int, scale: float, window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    """heads: of the grid. strided: the operands whose strides the kernel is told. shared: heads of keys."""
    q, N = operands[0], table.shape[2]
    H, T, D = q.shape
    PARTS, BM, BN, num_warps, num_stages = _sizes(name, D, has_copy_engine(q.device))
    strides = tuple(stride for at in strided for stride in operands[at].stride()[:2])
    aligned = functools.reduce(int.__or__, (tensor.data_ptr() for tensor in (*operands, table))) % 16
    key = (name, q.device, q.dtype, heads, H, T, D, N, strides, scale, window, softcap, aligned)
    with on_device(q.device):
        launcher.launch(
            kernel, (heads, PARTS * N), (*operands, table, N, T, *strides), launcher.bounded(_LAUNCHES), key,
            SCALE=scale, CAP=softcap or 0.0, WINDOW=window or 0, GROUP=H // shared, D=D,
            BLOCK_D=max(16, triton.next_power_of_2(D)), PARTS=PARTS, BM=BM, BN=BN, num_warps=num_warps,
            num_stages=num_stages,
        )  # fmt: skip


@functools.cache
def _sizes(name: str, D: int, large: bool) -> tuple[int, int, int, int, int]:
    """Programs of a block, BM, BN, warps and stages, from what an H200 was fastest with. large: a GPU with more than 200 KiB of
    shared memory for a program."""
    if D > 128:
        BM, BN = (64, 32) if name != "keys" else (32, 64) if large else (32, 32)
        num_warps, num_stages = 8, 2 if large else 1
    else:
        queries, keys = ((128, 32), (32, 64)) if D > 64 and large else ((64, 32), (64 if large else 32, 64))
        BM, BN = {"forward": (64, 64), "queries": queries, "keys": keys}[name]
        num_warps, num_stages = 8 if BM == 128 else 4, 3 if large else 2
    return BLOCK // (BN if name == "keys" else BM), BM, BN, num_warps, num_stages


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x [heads, T, D], or a copy where a row is not contiguous or rows are further apart than 32 bits count."""
    return x if x.stride(-1) == 1 and x.shape[1] * x.stride(1) < 2**31 else x.contiguous()
