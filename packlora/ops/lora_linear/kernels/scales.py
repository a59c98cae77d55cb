"""The Triton kernel of layers with scales in the backward, and its launches: e = g d, sums of d z and d. See forward.py, whose
words hold here too; backward_outputs.py makes e and the sums in its own pass where one block of ranks covers a layer's.

Shapes: T tokens, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from packlora.ops import launcher
from packlora.ops.lora_linear.call import Call, Scales
from packlora.ops.lora_linear.kernels import sizes
from packlora.ops.lora_linear.kernels.common import sum_rows_kernel


@triton.jit
def _sum_rows(tile, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Sum of a float32 tile over its rows; in PARTS first, where its error counts (float32 operands)."""
    if PARTS == 1:
        return tl.sum(tile, 0)
    else:
        return tl.sum(tl.sum(tl.reshape(tile, (PARTS, BM // PARTS, BN)), 1), 0)


@triton.jit(do_not_specialize=["base_row"])
def scale_kernel(
    d, kept, e, sums, g, chunks, base_row, N, d_stride,
    NEED_DZ: tl.constexpr, NEED_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """e = g d, and sums float32 [chunks, 2, N]: of d times what was kept, and of d. Grid (blocks of N, token chunks)."""
    chunk = chunks + 4 * tl.program_id(1)
    adapter, start, stop = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    row = tl.where(adapter >= 0, adapter, base_row).to(tl.int64)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = cols < N
    factor = tl.load(g + row * N + cols, mask=fits, other=0.0)[None, :]
    dz = tl.zeros((BM, BN), dtype=tl.float32)
    d_sum = tl.zeros((BM, BN), dtype=tl.float32)
    for t in tl.range(start, stop, BM, num_stages=STAGES):
        rows = t + tl.arange(0, BM)
        here = (rows < stop)[:, None] & fits[None, :]
        rows_64 = rows.to(tl.int64)[:, None]
        value = tl.load(d + rows_64 * d_stride + cols[None, :], mask=here, other=0.0).to(tl.float32)
        if NEED_DZ:
            dz += value * tl.load(kept + rows_64 * N + cols[None, :], mask=here, other=0.0).to(tl.float32)
        if NEED_D:
            d_sum += value
        tl.store(e + rows_64 * N + cols[None, :], (value * factor).to(e.dtype.element_ty), mask=here)
    at = sums + tl.program_id(1).to(tl.int64) * 2 * N + cols
    PARTS: tl.constexpr = 8 if d.dtype.element_ty == tl.float32 else 1
    if NEED_DZ:
        tl.store(at, _sum_rows(dz, PARTS, BM, BN), mask=fits)
    if NEED_D:
        tl.store(at + N, _sum_rows(d_sum, PARTS, BM, BN), mask=fits)


# --- launches ------------------------------------------------------------------------------------------------------------


class Scaling(NamedTuple):
    """Inputs of one layer that has scales: the output kept for the backward (y in place of z where `of_y`), and whether the
    gradient of the magnitude and the sum of d are needed."""

    scales: Scales
    kept: torch.Tensor | None
    need_dm: bool
    need_d: bool
    of_y: bool


def scale(
    call: Call, d: torch.Tensor, index: int, own: Scaling
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """e = g d [T, N], and sums over the tokens as `sum_tokens` gives them, where some are needed. d: contiguous [..., N]."""
    segments, scales, N, device = call.segment_tables, own.scales, call.layout.sizes[index], call.device
    assert segments is not None
    size = segments.config
    chunk = size.scale_chunk
    num_chunks, needed = segments.counts[chunk], own.need_dm or own.need_d
    e_TN = torch.empty(call.T, N, dtype=d.dtype, device=device)
    parts = torch.empty((num_chunks, 2, N) if needed else (1,), device=device)
    args = (d, own.kept, e_TN, parts, scales.g, segments.blocks[chunk], scales.adapters, N, N)
    key = ("scale", d.dtype, N, own.kept is None, own.need_dm, own.need_d)
    if not launcher.launched(segments.launches, key, args):
        launcher.launch(
            scale_kernel, (sizes.cdiv(N, size.scale_n), num_chunks), args, segments.launches, key,
            NEED_DZ=own.need_dm, NEED_D=own.need_d, BM=size.scale_m, BN=size.scale_n, STAGES=size.scale_stages,
            num_warps=size.scale_warps, num_stages=2,
        )  # fmt: skip
    return e_TN, sum_tokens(call, parts, index, own, chunk) if needed else None


def sum_tokens(call: Call, parts: torch.Tensor, index: int, own: Scaling, chunk: int) -> torch.Tensor:
    """Sums over tokens by adapter in the parameters' dtype, [2 adapters, N]: the gradient of the magnitude, from the sum of d
    times the kept output, and the sum of d. Sums that are not needed hold arbitrary values; where only one adapter's magnitude
    is needed, the result is [N]. parts: sums of chunks [chunks, 2, N]."""
    scales, N, segments = own.scales, call.layout.sizes[index], call.segment_tables
    assert segments is not None
    rows = 1 if scales.adapters == 1 and not own.need_d else 2 * scales.adapters
    out = torch.empty(N if rows == 1 else (rows, N), dtype=call.wide, device=call.device)
    args = (
        parts, out, segments.blocks[chunk], segments.ranges[chunk], scales.sum_rows, scales.g, scales.w, N, 2, 0, 0
    )  # fmt: skip
    key = ("sum_tokens", N, chunk, own.of_y, call.wide, rows)
    if not launcher.launched(segments.launches, key, args):
        launcher.launch(
            sum_rows_kernel, (sizes.cdiv(N, 128), rows), args, segments.launches, key,
            SINGLE=False, MAGNITUDE=True, OF_Y=own.of_y, CHUNKS=32, BK=128, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out
