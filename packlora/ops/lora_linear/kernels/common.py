"""Shared code of the operator's kernels: compensated sums, table look-ups, and the second stage of sums over tokens.

What is read from a table says nothing of its alignment, and without that every element is loaded by itself: so it is said where
it is loaded. All places and ranks in tables.GroupTables are multiples of 16.

An adapter is its place among those of the group (layout.Layout.numbers); -1 is none. Arguments go by the same names in all
kernels; T tokens, K inputs, N outputs:

    x, d                [T, K], [T, N]      tokens, and the gradient of a layer's output; *_stride: from one row to the next
    A                   [rows, K]           the A's of all adapters, stacked (layout.Layout)
    B                   [flat]              the B's of one layer, one block [N, rank] after the other
    S, dS               [T, width]          S = s c (drop(x) A') and its gradient
    y, z, e             [T, N]              output, the product that g scales, and g d
    kept                [T, N]              z, or y where the backward reads that
    dx                  [T, K]              gradient of x: its low-rank part
    g, w, bias          [adapters + 1, N]   scales, norms and biases by adapter; row base_row is for tokens without one
    *_parts, sums       float32             what one program makes; another kernel adds them up in order
    scales              float32 [rows]      the scaling of every row of A
    scalings            float32 [adapters]  the scaling of every adapter on one layer
    keys                int32 [T, 2]        dropout keys of the tokens; salt: of the group
    tiles, chunks       int32 [., 4]        adapter, start, stop, dropout threshold of blocks of tokens (tables.SegmentTables):
                                            those of one program, and those that a program walks over
    ranges              int32 [adapters, 2] first and last row of `chunks` that may be an adapter's
    adapters            int32 [adapters, 2] first row in A and padded rank (tables.GroupTables.rows)
    places              int32 [adapters, 4] column in S, offset in B and padded rank on one layer (tables.GroupTables.places)
    width, part_width   columns of S, and of one layer's parts
    single_*            what the tables would say where SINGLE: one adapter owns all tokens
    SINGLE, DROP, ...   compile-time: what a program has to do; BM, BN, BK, BR: its block of tokens, N, K and ranks
    ASM                 two elements are dropped at a time, by instructions that Hopper has
    TMA                 x, d and kept are tensor descriptors
    PRECISION           of float32 products
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add_dot(a, b, acc, lost, PRECISION: tl.constexpr):
    """acc + a b, and what rounding lost of it. In float32 the sum over the blocks is compensated (Kahan): one program sums
    more terms in a row than the library's products do. In 16 bits the accumulator is wide enough as it is.
    """
    if a.dtype == tl.float32:
        part = tl.dot(a, b, input_precision=PRECISION) - lost
        larger = acc + part
        return larger, (larger - acc) - part
    else:
        return tl.dot(a, b, acc), lost


@triton.jit
def _block_of(blocks, index, size, T, threshold, SINGLE: tl.constexpr):
    """Adapter (0 where SINGLE), start, stop and dropout threshold of a block of tokens; see tables.SegmentTables."""
    if SINGLE:
        return index * 0, index * size, tl.minimum((index + 1) * size, T), threshold
    else:
        at = blocks + 4 * index
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _rows_of(adapters, adapter, first, rank, SINGLE: tl.constexpr):
    """First row in the stacked A, and padded rank; see tables.GroupTables.rows."""
    if SINGLE:
        return first, rank
    else:
        at = adapters + 2 * adapter
        return tl.multiple_of(tl.load(at), 16), tl.multiple_of(tl.load(at + 1), 16)


@triton.jit
def _place_of(places, adapter, column, offset, rank, SINGLE: tl.constexpr):
    """Column in S, offset in the flat B, and padded rank; see tables.GroupTables.places."""
    if SINGLE:
        return column, offset, rank
    else:
        at = places + 4 * adapter
        return (
            tl.multiple_of(tl.load(at), 16), tl.multiple_of(tl.load(at + 1), 16), tl.multiple_of(tl.load(at + 2), 16),
        )  # fmt: skip


@triton.jit
def _inside(rows, stop, TAIL: tl.constexpr):
    """Mask of the rows before `stop`. Outside the TAIL of a segment it is all true, which the compiler knows."""
    if TAIL:
        return rows < stop
    else:
        return tl.full(rows.shape, 1, tl.int1)


@triton.jit(do_not_specialize=["num_chunks"])
def sum_rows_kernel(
    parts, out, chunks, ranges, rows, g, w, K, width, num_chunks, single_first,
    SINGLE: tl.constexpr, MAGNITUDE: tl.constexpr, OF_Y: tl.constexpr, CHUNKS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [rows, K] = sum of `parts` over the chunks of the row's adapter. `rows` int32 [rows, 2]: adapter, row in a part.
    Grid (blocks of K, rows). ranges: int32 [adapters, 2], first and last chunk that may be an adapter's. SINGLE: the rows are
    those of one adapter that has all chunks, from single_first on.

    MAGNITUDE: row 0 of a part is of d z and becomes the gradient of the magnitude, over w; OF_Y: it is of d y, and goes over
    g w, 0 where that is 0. g, w: float32 [adapters + 1, K].
    """
    row = tl.program_id(1)
    cols = tl.program_id(0) * BK + tl.arange(0, BK)
    acc = tl.zeros((CHUNKS, BK), dtype=tl.float32)
    adapter, own, start_chunk, last = row, row, 0, num_chunks
    if SINGLE:
        row += single_first
    else:
        adapter, own = tl.load(rows + 2 * row), tl.load(rows + 2 * row + 1)
        start_chunk, last = tl.load(ranges + 2 * adapter), tl.load(ranges + 2 * adapter + 1)
    for first in range(start_chunk, last, CHUNKS):
        some = first + tl.arange(0, CHUNKS)
        mine = some < last
        if SINGLE == 0:
            mine = tl.load(chunks + 4 * some, mask=mine, other=-1) == adapter
        at = parts + (some * width + own).to(tl.int64)[:, None] * K + cols[None, :]
        acc += tl.load(at, mask=mine[:, None] & (cols < K)[None, :], other=0.0)
    total = tl.sum(acc, 0)
    if MAGNITUDE:
        at_adapter = adapter.to(tl.int64) * K + cols
        over = tl.load(w + at_adapter, mask=cols < K, other=1.0)
        if OF_Y:
            over *= tl.load(g + at_adapter, mask=cols < K, other=1.0)
        total = tl.where(own == 0, tl.where(over == 0, 0.0, tl.div_rn(total, over)), total)
    tl.store(out + row.to(tl.int64) * K + cols, total.to(out.dtype.element_ty), mask=cols < K)
