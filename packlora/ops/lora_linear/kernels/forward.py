"""Triton kernels of the forward of a group of layers with low-rank adapters, around the base product, and what all kernels
share. layout.py says where things lie; gradient_kernels.py has those of the backward.

    down     S = s c (drop(x) A')                     x is read once for all adapters and layers; the mask stays in registers
    up       y0 = S B' + bias                         y0 is what the base product x W' then accumulates onto
             y = g (x W' + S B') + bias               or: the base product is there, one pass over it
    compose  y = g z + bias                           segment: the same for one segment, and its variants under dropout

drop() puts dropped elements to 0 and does not scale; the scaling s and the survivors' factor c = 1 / (1 - p) are in S and dS,
multiplied in while they are float32, and nowhere else.

Each block of tokens belongs to one adapter (blocks never cross from one segment into another), so what one adapter's tokens hold,
be it NaN, reaches no other adapter, and rows past the end of a segment are masked, not padded. Where one segment has all tokens
(ALONE), blocks, places and ranks come as arguments: a table would have to be read before anything else can start.

What is read from a table says nothing of its alignment, and without that every element is loaded by itself: so it is said where
it is loaded. All places and ranks in layout.GroupTables are multiples of 16.

Shapes: T tokens, K inputs, N outputs, r padded rank of one layer, R padded rank over the layers of the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from packlora.ops.dropout.kernel import _drop, _keys
from packlora.ops.lora_linear.kernels.common import _add_dot, _block_of, _rows_of


@triton.jit
def _down(
    x, A, S, scales, keys, first, rank, column, start, stop, threshold, salt, K, x_stride, width,
    DROP: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    rows = start + tl.arange(0, BM)
    inside = rows < stop
    ranks = column + tl.arange(0, BR)
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    A_rows = A + (first + ranks).to(tl.int64)[:, None] * K
    acc = tl.zeros((BM, BR), dtype=tl.float32)
    lost = tl.zeros((BM, BR), dtype=tl.float32)
    if DROP:
        key_0, key_1 = _keys(keys, rows, inside, salt)
    for k in range(0, K, BK):
        cols = k + tl.arange(0, BK)
        x_tile = tl.load(x_rows + cols[None, :], mask=inside[:, None] & (cols < K)[None, :], other=0.0)
        A_tile = tl.load(A_rows + cols[None, :], mask=(ranks < rank)[:, None] & (cols < K)[None, :], other=0.0)
        if DROP:
            x_tile = _drop(x_tile, key_0, key_1, k, threshold, BK, ASM)
        acc, lost = _add_dot(x_tile, tl.trans(A_tile), acc, lost, PRECISION)
    factor = tl.load(scales + first + ranks, mask=ranks < rank, other=0.0)
    acc *= (factor * (65536.0 / (65536 - threshold)))[None, :]
    at = S + rows.to(tl.int64)[:, None] * width + ranks[None, :]
    tl.store(at, acc.to(S.dtype.element_ty), mask=inside[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["salt"])
def down_kernel(
    x, A, S, scales, keys, tiles, adapters, salt, K, x_stride, width, T, alone_threshold, alone_first, alone_rank,
    ALONE: tl.constexpr, DROP: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """Grid (token blocks of BM, column blocks of BR)."""
    column = tl.program_id(1) * BR
    adapter, start, stop, threshold = _block_of(tiles, tl.program_id(0), BM, T, alone_threshold, ALONE)
    if adapter >= 0:
        first, rank = _rows_of(adapters, adapter, alone_first, alone_rank, ALONE)
        left = rank - column
        if left > 0:
            if BR == 16 or left > BR // 2:
                _down(x, A, S, scales, keys, first, rank, column, start, stop, threshold, salt, K, x_stride, width,
                      DROP, ASM, PRECISION, BM, BK, BR)  # fmt: skip
            elif BR == 32 or left <= 16:
                _down(x, A, S, scales, keys, first, rank, column, start, stop, threshold, salt, K, x_stride, width,
                      DROP, ASM, PRECISION, BM, BK, 16)  # fmt: skip
            else:
                _down(x, A, S, scales, keys, first, rank, column, start, stop, threshold, salt, K, x_stride, width,
                      DROP, ASM, PRECISION, BM, BK, 32)  # fmt: skip


@triton.jit
def _up(
    S, B, bias, g, z, y, column, offset, rank, start, stop, row, N, width, first, last,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr, COMPOSED: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    rows = start + tl.arange(0, BM)
    inside = rows < stop
    ranks = tl.arange(0, BR)
    S_rows = S + rows.to(tl.int64)[:, None] * width + (column + ranks)[None, :]
    S_tile = tl.load(S_rows, mask=inside[:, None] & (ranks < rank)[None, :], other=0.0)
    y_rows = rows.to(tl.int64)[:, None] * N
    for n in range(first, last, BN):
        cols = n + tl.arange(0, BN)
        fits = cols < N
        here = inside[:, None] & fits[None, :]
        if EPILOGUE:
            base = tl.load(z + y_rows + cols[None, :], mask=here, other=0.0)
        B_at = B + offset + cols[:, None] * rank + ranks[None, :]
        B_tile = tl.load(B_at, mask=fits[:, None] & (ranks < rank)[None, :], other=0.0)
        acc = tl.dot(S_tile, tl.trans(B_tile), input_precision=PRECISION)
        lost = tl.zeros((BM, BN), dtype=tl.float32)
        for r in range(BR, rank, BR):
            more = r + ranks
            S_more = tl.load(S_rows + r, mask=inside[:, None] & (more < rank)[None, :], other=0.0)
            B_more = tl.load(B_at + r, mask=fits[:, None] & (more < rank)[None, :], other=0.0)
            acc, lost = _add_dot(S_more, tl.trans(B_more), acc, lost, PRECISION)
        if EPILOGUE:
            acc += base.to(tl.float32)
        if KEEP:
            tl.store(z + y_rows + cols[None, :], acc.to(z.dtype.element_ty), mask=here)
        if COMPOSED:
            acc *= tl.load(g + row.to(tl.int64) * N + cols, mask=fits, other=0.0)[None, :]
        if HAS_BIAS:
            acc += tl.load(bias + row.to(tl.int64) * N + cols, mask=fits, other=0.0).to(tl.float32)[None, :]
        tl.store(y + y_rows + cols[None, :], acc.to(y.dtype.element_ty), mask=here)


@triton.jit
def up_kernel(
    S, B, bias, g, z, y, tiles, places, base_row, N, width, span,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr, COMPOSED: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (spans of columns, token blocks of BM). Writes every row: 0, base or bias where no adapter is.

    EPILOGUE: z [T, N] holds the base product. COMPOSED: g and bias float32 [adapters + 1, N], the last row for tokens without
    an adapter; else bias [N]. KEEP: z is written, the product that g scales. y may be z where it is not kept.
    """
    tile = tiles + 4 * tl.program_id(1)
    adapter, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    column, offset, rank = 0, 0, 0
    if adapter >= 0:
        place = places + 4 * adapter
        column, offset = tl.multiple_of(tl.load(place), 16), tl.multiple_of(tl.load(place + 1), 16)
        rank = tl.multiple_of(tl.load(place + 2), 16)
    row = adapter * 0
    if COMPOSED:
        row = tl.where(adapter >= 0, adapter, base_row)
    first = tl.program_id(0) * span
    last = tl.minimum(N, first + span)
    if BR == 16 or rank > BR // 2:
        _up(S, B, bias, g, z, y, column, offset, rank, start, stop, row, N, width, first, last, HAS_BIAS, EPILOGUE, COMPOSED,
            KEEP, PRECISION, BM, BN, BR)  # fmt: skip
    elif BR == 32 or rank <= 16:
        _up(S, B, bias, g, z, y, column, offset, rank, start, stop, row, N, width, first, last, HAS_BIAS, EPILOGUE, COMPOSED,
            KEEP, PRECISION, BM, BN, 16)  # fmt: skip
    else:
        _up(S, B, bias, g, z, y, column, offset, rank, start, stop, row, N, width, first, last, HAS_BIAS, EPILOGUE, COMPOSED,
            KEEP, PRECISION, BM, BN, 32)  # fmt: skip


@triton.jit
def ratio_kernel(magnitude, norm, g, w, N, BN: tl.constexpr):
    """g = magnitude / norm and w = norm, float32 [N]. Grid (blocks of N)."""
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = cols < N
    own = tl.load(norm + cols, mask=fits, other=1.0).to(tl.float32)
    tl.store(w + cols, own, mask=fits)
    tl.store(g + cols, tl.div_rn(tl.load(magnitude + cols, mask=fits, other=0.0).to(tl.float32), own), mask=fits)


@triton.jit
def compose_kernel(z, y, g, bias, tiles, base_row, N, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """y = g z + bias; y may be z. g, bias: float32 [adapters + 1, N]. Grid (blocks of N, token blocks of 4 BM)."""
    tile = tiles + 4 * tl.program_id(1)
    adapter, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    row = tl.where(adapter >= 0, adapter, base_row).to(tl.int64)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = cols < N
    factor = tl.load(g + row * N + cols, mask=fits, other=0.0)[None, :]
    if HAS_BIAS:
        plus = tl.load(bias + row * N + cols, mask=fits, other=0.0)[None, :]
    for t in range(start, stop, BM):
        rows = t + tl.arange(0, BM)
        here = (rows < stop)[:, None] & fits[None, :]
        at = rows.to(tl.int64)[:, None] * N + cols[None, :]
        value = tl.load(z + at, mask=here, other=0.0).to(tl.float32) * factor
        if HAS_BIAS:
            value += plus
        tl.store(y + at, value.to(y.dtype.element_ty), mask=here)


@triton.jit
def rows_kernel(
    z, y, g, bias, T, N, minus, ADD: tl.constexpr, HAS_G: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """y = (g - minus) z + bias, or y += that, over the rows [T, N] of one segment; g, bias float32 [N]. Grid (blocks of N, T)."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = cols < N
    here = (rows < T)[:, None] & fits[None, :]
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    value = tl.load(z + at, mask=here, other=0.0).to(tl.float32)
    if HAS_G:
        value *= (tl.load(g + cols, mask=fits, other=0.0) - minus)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + cols, mask=fits, other=0.0)[None, :]
    if ADD:
        value += tl.load(y + at, mask=here, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=here)
