"""Triton kernels of what dropout changes of DoRA's base product (change.py): rows in codes, and the products with their sums.

Shapes: T tokens of one segment, K inputs, N outputs. Of a product, X [T, P] are rows in codes, V [Q, P] a weight's codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from packlora.fp8.kernel import _store_codes
from packlora.ops.dropout.kernel import _kept, _keys
from packlora.ops.lora_linear.kernels.gemm import _base, _place_of_tile


@triton.jit
def _odds(threshold):
    """p / (1 - p) of a rate of dropout that is given as threshold."""
    return threshold.to(tl.float32) / (65536 - threshold).to(tl.float32)


@triton.jit(do_not_specialize=["T", "salt", "threshold"])
def changed_rows_kernel(
    x, keys, codes, scales, salt, threshold, T, K, x_stride, LARGEST: tl.constexpr, LEAST: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """codes [T, K] and scales float32 [T] of c drop(x) - x. Grid (blocks of BM rows). Rows are in registers as a whole."""
    rows, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BK)
    inside, rows_64 = rows < T, rows.to(tl.int64)[:, None]
    here = inside[:, None] & (cols < K)[None, :]
    key_0, key_1 = _keys(keys, rows, inside, salt)
    value = tl.load(x + rows_64 * x_stride + cols[None, :], mask=here, other=0.0).to(tl.float32)
    value *= tl.where(_kept(key_0, key_1, 0, threshold, BK), _odds(threshold), -1.0)
    most = tl.maximum(tl.max(tl.abs(value), 1), LEAST)
    tl.store(scales + rows, tl.div_rn(most, LARGEST), mask=inside)
    _store_codes(codes + rows_64 * K + cols[None, :], value, most, here, LARGEST)


@triton.jit(do_not_specialize=["T", "threshold"])
def scaled_rows_kernel(
    d, g, v_scales, codes, scales, threshold, T, N, d_stride, LEFT_OUT: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, TURNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """codes [T, N] and scales float32 [T] of (g - 1) d v_scales; the scale is 0 where that is left out, and codes are not
    written. g, v_scales: float32 [N]. Grid (blocks of TURNS BM rows)."""
    cols = tl.arange(0, BN)
    fits = cols < N
    sizes = tl.load(v_scales + cols, mask=fits, other=0.0)[None, :]
    less = tl.load(g + cols, mask=fits, other=1.0)[None, :] - 1
    first = tl.program_id(0) * TURNS * BM
    for start in range(first, tl.minimum(first + TURNS * BM, T), BM):
        rows = start + tl.arange(0, BM)
        inside, rows_64 = rows < T, rows.to(tl.int64)[:, None]
        here = inside[:, None] & fits[None, :]
        value = tl.load(d + rows_64 * d_stride + cols[None, :], mask=here, other=0.0).to(tl.float32) * sizes
        whole = tl.sum(value * value, 1)
        value *= less
        wanted = tl.sum(value * value, 1) * _odds(threshold) > whole * (LEFT_OUT * LEFT_OUT)
        most = tl.maximum(tl.max(tl.abs(value), 1), LEAST)
        tl.store(scales + rows, tl.where(wanted, tl.div_rn(most, LARGEST), 0.0), mask=inside)
        _store_codes(codes + rows_64 * N + cols[None, :], value, most, here & wanted[:, None], LARGEST)


@triton.jit
def _add(
    u, Y, Z, v_scales, g, keys, row, column, salt, threshold, T, Q, FORWARD: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add what change_kernel adds, of a tile that begins at a row and a column."""
    rows, cols = row + tl.arange(0, BM), column + tl.arange(0, BN)
    if FORWARD:
        u *= tl.load(v_scales + cols, mask=cols < Q, other=0.0)[None, :]
        if KEEP:
            z = Z.load([row, column])
            Z.store([row, column], (z.to(tl.float32) + u).to(z.dtype))
        u *= (tl.load(g + cols, mask=cols < Q, other=1.0) - 1)[None, :]
    else:
        key_0, key_1 = _keys(keys, rows, rows < T, salt)
        u *= tl.where(_kept(key_0, key_1, column, threshold, BN), _odds(threshold), -1.0)
    y = Y.load([row, column])
    Y.store([row, column], (y.to(tl.float32) + u).to(y.dtype))


@triton.jit(do_not_specialize=["T", "salt", "threshold"])
def change_kernel(
    X, V, Y, Z, x_scales, v_scales, g, keys, salt, threshold, T, P, Q,
    FORWARD: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """u = X V' by scales of rows x_scales [T]. FORWARD: u is also scaled by v_scales [Q]; Y += (g - 1) u and, with KEEP,
    Z += u. Else Y += c drop(u) - u. Y, Z: [T, Q]; they, X and V are tensor descriptors. Nothing is done for a tile of which no
    row has a scale over 0.

    PROGRAMS: a program takes every PROGRAMS-th tile; there may be fewer tiles."""
    num_m, num_n = tl.cdiv(T, BM), tl.cdiv(Q, BN)
    steps = tl.cdiv(P, BK)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=False):
        m, n = _place_of_tile(tile, num_m, num_n, GROUP)
        rows = m * BM + tl.arange(0, BM)
        own = tl.load(x_scales + rows, mask=rows < T, other=0.0)
        if tl.max(own, 0) > 0:
            u = _base(tl.zeros((BM, BN), dtype=tl.float32), X, V, m, n, steps, True, BM, BN, BK)
            u = tl.where((own > 0)[:, None], u * own[:, None], 0.0)
            left, right = tl.split(tl.permute(tl.reshape(u, (BM, 2, BN // 2)), (0, 2, 1)))
            _add(left, Y, Z, v_scales, g, keys, m * BM, n * BN, salt, threshold, T, Q, FORWARD, KEEP, BM, BN // 2)
            _add(
                right, Y, Z, v_scales, g, keys, m * BM, n * BN + BN // 2, salt, threshold, T, Q, FORWARD, KEEP, BM, BN // 2
            )  # fmt: skip
