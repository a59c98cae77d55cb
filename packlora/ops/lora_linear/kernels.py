"""Triton kernels around the two large products of a group of layers with low-rank adapters. layout.py says where things lie.

    down     S = dropout(x) A'                        x is read once for all adapters and layers; the mask stays in registers
    up       y0 = s S B' + bias                       y0 is what the base product x W' then accumulates onto
    grad     dS = s d B, dB = s d' S                  one read of d
    inputs   dx0 = dropout'(dS A), dA = dS' dropout(x)      one read of x; d W accumulates onto dx0

Each block of tokens belongs to one adapter (blocks never cross from one run into another), so what one adapter's tokens hold,
be it NaN, reaches no other adapter, and rows past the end of a run are masked, not padded. Sums over tokens are made in two
stages in a fixed order: no atomics, the same bits every time.

Shapes: T tokens, K inputs, N outputs, r padded rank of one layer, R padded rank over the layers of the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from packlora.ops.dropout import MIX_1, MIX_2, STRIDE

_STRIDE = tl.constexpr(STRIDE)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


@triton.jit
def _kept(keys, rows, inside, first_column, salt, threshold, BK: tl.constexpr):
    """Which elements of a tile survive, bool [rows, BK]; ops/dropout.py is the specification."""
    key_0 = tl.load(keys + 2 * rows, mask=inside, other=0).to(tl.uint32, bitcast=True)
    key_1 = tl.load(keys + 2 * rows + 1, mask=inside, other=0).to(tl.uint32, bitcast=True)
    pairs = (first_column // 2 + tl.arange(0, BK // 2)).to(tl.uint32)
    v = (pairs * _STRIDE)[None, :] + (key_0 ^ salt.to(tl.uint32))[:, None]
    v ^= v >> 16
    v = (v * _MIX_1) ^ key_1[:, None]
    v ^= v >> 15
    v *= _MIX_2
    v ^= (v >> 15) ^ 0x80008000
    limit = threshold.to(tl.uint32) << 16
    return tl.interleave((v << 16) >= limit, v >= limit)


@triton.jit(do_not_specialize=["salt"])
def down_kernel(
    x, A, S, keys, tiles, adapters, salt, K, x_stride, width,
    DROP: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (token blocks of BM, column blocks of BR)."""
    tile = tiles + 4 * tl.program_id(0)
    column = tl.program_id(1) * BR
    adapter, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if adapter >= 0:
        first, rank = tl.load(adapters + 2 * adapter), tl.load(adapters + 2 * adapter + 1)
        if column < rank:
            threshold = tl.load(tile + 3)
            rows = start + tl.arange(0, BM)
            inside = rows < stop
            ranks = column + tl.arange(0, BR)
            x_rows = x + rows.to(tl.int64)[:, None] * x_stride
            A_rows = A + (first + ranks).to(tl.int64)[:, None] * K
            acc = tl.zeros((BM, BR), dtype=tl.float32)
            for k in range(0, K, BK):
                cols = k + tl.arange(0, BK)
                x_tile = tl.load(x_rows + cols[None, :], mask=inside[:, None] & (cols < K)[None, :], other=0.0)
                A_tile = tl.load(A_rows + cols[None, :], mask=(ranks < rank)[:, None] & (cols < K)[None, :], other=0.0)
                if DROP:
                    kept = _kept(keys, rows, inside, k, salt, threshold, BK)
                    x_tile = tl.where(kept, x_tile, tl.zeros_like(x_tile))
                acc = tl.dot(x_tile, tl.trans(A_tile), acc, input_precision=PRECISION)
            acc *= 65536.0 / (65536 - threshold)
            at = S + rows.to(tl.int64)[:, None] * width + ranks[None, :]
            tl.store(at, acc.to(S.dtype.element_ty), mask=inside[:, None] & (ranks < rank)[None, :])


@triton.jit
def up_kernel(
    S, B, bias, y, tiles, places, scalings, N, width,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (column blocks of BN, token blocks of BM). Writes every row: 0 or the bias where no adapter is."""
    tile = tiles + 4 * tl.program_id(1)
    adapter, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    rows = start + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    inside, fits = rows < stop, cols < N
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if adapter >= 0:
        place = places + 4 * adapter
        column, offset, rank = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        for r in range(0, rank, BR):
            ranks = r + tl.arange(0, BR)
            has = ranks < rank
            S_at = S + rows.to(tl.int64)[:, None] * width + (column + ranks)[None, :]
            S_tile = tl.load(S_at, mask=inside[:, None] & has[None, :], other=0.0)
            B_at = B + offset + cols.to(tl.int64)[:, None] * rank + ranks[None, :]
            B_tile = tl.load(B_at, mask=fits[:, None] & has[None, :], other=0.0)
            acc = tl.dot(S_tile, tl.trans(B_tile), acc, input_precision=PRECISION)
        acc *= tl.load(scalings + adapter)
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=fits, other=0.0).to(tl.float32)[None, :]
    y_at = y + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=inside[:, None] & fits[None, :])


@triton.jit
def grad_kernel(
    d, S, B, dS_parts, dB_parts, bands, places, scalings, T, N, d_stride, width, part_width, span,
    NEED_DB: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (spans of columns, token bands of BM, rank blocks of BR).

    dS_parts [spans, T, width] float32: the span's share of dS; dB_parts [bands, N, part_width] float32: the band's of dB.
    """
    span_index, band_index, column_0 = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BR
    band = bands + 4 * band_index
    adapter, start, stop = tl.load(band), tl.load(band + 1), tl.load(band + 2)
    if adapter >= 0:
        place = places + 4 * adapter
        column, offset, rank = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        if column_0 < rank:
            scaling = tl.load(scalings + adapter)
            rows = start + tl.arange(0, BM)
            inside = rows < stop
            ranks = column_0 + tl.arange(0, BR)
            has = ranks < rank
            rows_64 = rows.to(tl.int64)[:, None]
            S_at = S + rows_64 * width + (column + ranks)[None, :]
            S_tile = tl.load(S_at, mask=inside[:, None] & has[None, :], other=0.0)
            acc = tl.zeros((BM, BR), dtype=tl.float32)
            for n in range(span_index * span, tl.minimum(N, (span_index + 1) * span), BN):
                cols = n + tl.arange(0, BN)
                fits = cols < N
                d_tile = tl.load(d + rows_64 * d_stride + cols[None, :], mask=inside[:, None] & fits[None, :], other=0.0)
                B_at = B + offset + cols.to(tl.int64)[:, None] * rank + ranks[None, :]
                B_tile = tl.load(B_at, mask=fits[:, None] & has[None, :], other=0.0)
                acc = tl.dot(d_tile, B_tile, acc, input_precision=PRECISION)
                if NEED_DB:
                    part = tl.dot(tl.trans(d_tile), S_tile, input_precision=PRECISION) * scaling
                    part_at = dB_parts + (band_index.to(tl.int64) * N + cols[:, None]) * part_width + ranks[None, :]
                    tl.store(part_at, part, mask=fits[:, None] & has[None, :])
            at = dS_parts + (span_index.to(tl.int64) * T + rows_64) * width + (column + ranks)[None, :]
            tl.store(at, acc * scaling, mask=inside[:, None] & has[None, :])


@triton.jit
def sum_spans_kernel(parts, dS, size, spans, BLOCK: tl.constexpr):
    """dS = sum of dS_parts over the spans, in order. Columns that nothing wrote are summed too and never read."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(spans):
        acc += tl.load(parts + at, mask=at < size, other=0.0)
        parts += size
    tl.store(dS + at, acc.to(dS.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["salt"])
def inputs_kernel(
    x, dS, A, dx, dA_parts, keys, bands, adapters, salt, K, x_stride, width,
    DROP: tl.constexpr, NEED_DX: tl.constexpr, NEED_DA: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (column blocks of BK, token bands, rank blocks of BR; one rank block where dx is needed).

    dA_parts [bands, width, K] float32. dx is written in every row: 0 where no adapter is.
    """
    cols = tl.program_id(0) * BK + tl.arange(0, BK)
    band_index, column = tl.program_id(1), tl.program_id(2) * BR
    band = bands + 4 * band_index
    adapter, start, stop, threshold = tl.load(band), tl.load(band + 1), tl.load(band + 2), tl.load(band + 3)
    fits = cols < K
    first, rank = 0, 0
    if adapter >= 0:
        first, rank = tl.load(adapters + 2 * adapter), tl.load(adapters + 2 * adapter + 1)
    scale = 65536.0 / (65536 - threshold)
    ranks = column + tl.arange(0, BR)
    has = ranks < rank
    if column < rank or NEED_DX:
        A_at = A + (first + ranks).to(tl.int64)[:, None] * K + cols[None, :]
        A_tile = tl.load(A_at, mask=has[:, None] & fits[None, :], other=0.0)
        acc = tl.zeros((BR, BK), dtype=tl.float32)
        for t in range(start, stop, BM):
            rows = t + tl.arange(0, BM)
            inside = rows < stop
            rows_64 = rows.to(tl.int64)[:, None]
            dS_at = dS + rows_64 * width + ranks[None, :]
            dS_tile = tl.load(dS_at, mask=inside[:, None] & has[None, :], other=0.0)
            if DROP:
                kept = _kept(keys, rows, inside, tl.program_id(0) * BK, salt, threshold, BK)
            if NEED_DA:
                x_at = x + rows_64 * x_stride + cols[None, :]
                x_tile = tl.load(x_at, mask=inside[:, None] & fits[None, :], other=0.0)
                if DROP:
                    x_tile = tl.where(kept, x_tile, tl.zeros_like(x_tile))
                acc = tl.dot(tl.trans(dS_tile), x_tile, acc, input_precision=PRECISION)
            if NEED_DX:
                low = tl.dot(dS_tile, A_tile, input_precision=PRECISION)
                if NEED_DA == 0:  # wider than one rank block: the others are added up here
                    for r in range(BR, rank, BR):
                        more = r + tl.arange(0, BR)
                        dS_more = tl.load(
                            dS + rows_64 * width + more[None, :], mask=inside[:, None] & (more < rank)[None, :], other=0.0
                        )
                        A_more = tl.load(
                            A + (first + more).to(tl.int64)[:, None] * K + cols[None, :],
                            mask=(more < rank)[:, None] & fits[None, :], other=0.0,
                        )  # fmt: skip
                        low = tl.dot(dS_more, A_more, low, input_precision=PRECISION)
                low *= scale
                if DROP:
                    low = tl.where(kept, low, 0.0)
                dx_at = dx + rows_64 * K + cols[None, :]
                tl.store(dx_at, low.to(dx.dtype.element_ty), mask=inside[:, None] & fits[None, :])
        if NEED_DA:
            part_at = dA_parts + (band_index.to(tl.int64) * width + ranks[:, None]) * K + cols[None, :]
            tl.store(part_at, acc * scale, mask=has[:, None] & fits[None, :])


@triton.jit
def sum_rows_kernel(parts, out, bands, num_bands, rows, K, width, BK: tl.constexpr):
    """dA [rows, K] = sum of dA_parts over the bands of the row's adapter, in order. `rows` int32 [rows, 2]: adapter, row."""
    row = tl.program_id(1)
    adapter, own = tl.load(rows + 2 * row), tl.load(rows + 2 * row + 1)
    cols = tl.program_id(0) * BK + tl.arange(0, BK)
    acc = tl.zeros((BK,), dtype=tl.float32)
    for band in range(num_bands):
        if tl.load(bands + 4 * band) == adapter:
            acc += tl.load(parts + (band * width + own).to(tl.int64) * K + cols, mask=cols < K, other=0.0)
    tl.store(out + row.to(tl.int64) * K + cols, acc.to(out.dtype.element_ty), mask=cols < K)


@triton.jit
def sum_blocks_kernel(parts, out, bands, num_bands, places, N, part_width, BN: tl.constexpr, BR: tl.constexpr):
    """dB of one layer, flat as B is: sum of dB_parts over the adapter's bands, in order. Grid (blocks of N, adapters)."""
    adapter = tl.program_id(1)
    offset, rank = tl.load(places + 4 * adapter + 1), tl.load(places + 4 * adapter + 2)
    cols = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    for r in range(0, rank, BR):
        ranks = r + tl.arange(0, BR)
        mask = (cols < N)[:, None] & (ranks < rank)[None, :]
        acc = tl.zeros((BN, BR), dtype=tl.float32)
        at = parts + cols[:, None] * part_width + ranks[None, :]
        for band in range(num_bands):
            if tl.load(bands + 4 * band) == adapter:
                acc += tl.load(at, mask=mask, other=0.0)
            at += N * part_width
        tl.store(out + offset + cols[:, None] * rank + ranks[None, :], acc.to(out.dtype.element_ty), mask=mask)
