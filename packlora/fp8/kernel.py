"""Triton kernel that gives rows their codes of FP8: one read, one write."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_codes(at, value, most, here, LARGEST: tl.constexpr):
    """Store codes of rows, whose largest numbers are `most`."""
    tl.store(at, (value * tl.div_rn(LARGEST, most)[:, None]).to(tl.float8e4nv), mask=here)


@triton.jit(do_not_specialize=["T"])
def coded_rows_kernel(
    x, factors, codes, scales, T, K, x_stride, HAS_FACTORS: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    TURNS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """codes [T, K] and scales float32 [T] of x * factors; x [T, K] with rows x_stride apart, factors float32 [K]. Grid (blocks
    of TURNS BM rows). Rows are in registers as a whole, BM at a time, and factors are read once for all turns of a program."""
    cols = tl.arange(0, BK)
    fits = cols < K
    if HAS_FACTORS:
        factor = tl.load(factors + cols, mask=fits, other=0.0)[None, :]
    first = tl.program_id(0) * TURNS * BM
    for start in range(first, tl.minimum(first + TURNS * BM, T), BM):
        rows = start + tl.arange(0, BM)
        inside, rows_64 = rows < T, rows.to(tl.int64)[:, None]
        here = inside[:, None] & fits[None, :]
        value = tl.load(x + rows_64 * x_stride + cols[None, :], mask=here, other=0.0).to(tl.float32)
        if HAS_FACTORS:
            value *= factor
        most = tl.maximum(tl.max(tl.abs(value), 1), LEAST)
        tl.store(scales + rows, tl.div_rn(most, LARGEST), mask=inside)
        _store_codes(codes + rows_64 * K + cols[None, :], value, most, here, LARGEST)
