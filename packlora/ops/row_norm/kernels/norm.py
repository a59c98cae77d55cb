"""Norms of the rows of W + s B A for many modules at once, from W in 16 bits.

    split    A float32 -> hi + lo in W's dtype, rows scaled by powers of two      once for all rows of W
    gram     G = A A', one triangle, by chunks of K
    fold     sums the chunks; what is left out of the other triangle is counted twice
    cross    sum_l B_jl (W A')_jl, by blocks of ranks and chunks of K             the one read of W
    tail     sum_l B_jl (B G)_jl, by blocks of ranks
    finish   w^2 = ||W||^2 + 2 s cross + s^2 tail; rows in which that cancels are computed anew, element by element
    direct   all rows of one module element by element, by itself

Everything after a product is linear in it, so a product never has to be whole anywhere: a program reduces its share to one
number a row, and `finish` adds the shares in their order. No atomics, the same bits every time.

Which module, rows, ranks and part of K a program has is in a table of items (row_norm/tables.py); where the module's operands
lie is in a table of problems (common.py). With GATED, programs of modules whose flag in `stale` is 0 do nothing.

Shapes: N outputs, K inputs, r rank, R rank padded to whole blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from packlora.ops.row_norm.kernels.common import WIDTH, is_stale, load_int, row_pointers, times_B

CANCELS = 0.25
"""Rows with w^2 under this part of ||W||^2 + ||s B A||^2 are computed anew; above it, cancellation costs two bits at most."""
_CANCELS = tl.constexpr(CANCELS)


@triton.jit
def split_kernel(
    problems, items, stale, A_like, split, inverses, GATED: tl.constexpr, ALIGNED: tl.constexpr, BK: tl.constexpr
):
    """hi and lo [R, Kp] of one row of A and its inverse scale; zeros past K and past r.

    The scale is a power of two that puts the row's largest element near 2^14: float16 then holds hi and lo without loss.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 2]: problem, row of A.
        stale: flag of each problem, read if GATED: 0 computes nothing.
        A_like: any tensor of A's dtype.
        split: hi, then lo, of every problem, in W's dtype; written.
        inverses: float32, one over the scale of every row; written.
        GATED: `stale` counts.
        ALIGNED: the address of A and K are multiples of 16.
        BK: columns at a time.
    """
    item = items + 2 * tl.program_id(0)
    problem, row = tl.load(item), tl.load(item + 1)
    if is_stale(stale, problem, GATED):
        own = problems + problem * WIDTH
        rank, R, Kp = load_int(own + 6), load_int(own + 11), tl.multiple_of(tl.load(own + 10), 16).to(tl.int32)
        A, K = tl.load(own + 4).to(tl.pointer_type(A_like.dtype.element_ty)), tl.load(own + 3)
        if ALIGNED:
            A, K = tl.multiple_of(A, 16), tl.multiple_of(K, 16)
        A += tl.minimum(row, rank - 1) * K
        K = K.to(tl.int32)
        most = tl.zeros((BK,), dtype=tl.float32)
        for k in range(0, K, BK):
            cols = k + tl.arange(0, BK)
            values = tl.load(A + cols, mask=(cols < K) & (row < rank), other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.abs(values))
        exponent = tl.max(most, 0).to(tl.int32, bitcast=True) >> 23
        scale = (tl.minimum(268 - exponent, 254) << 23).to(tl.float32, bitcast=True)
        tl.store(inverses + tl.load(own + 12) + row, 1.0 / scale)
        hi_at = split + tl.multiple_of(tl.load(own + 7), 16) + row.to(tl.int64) * Kp
        for k in range(0, Kp, BK):
            cols = k + tl.arange(0, BK)
            values = tl.load(A + cols, mask=(cols < K) & (row < rank), other=0.0).to(tl.float32) * scale
            hi = values.to(split.dtype.element_ty)
            lo = (values - hi.to(tl.float32)).to(split.dtype.element_ty)
            tl.store(hi_at + cols, hi, mask=cols < Kp)
            tl.store(hi_at + R.to(tl.int64) * Kp + cols, lo, mask=cols < Kp)


@triton.jit
def gram_kernel(
    problems, items, stale, A_like, parts, PRECISION: tl.constexpr, GATED: tl.constexpr, ALIGNED: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One block of G = A A' over one chunk of K.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 6]: problem, first row, first column (not before the row), first k, end of k, number of the chunk.
        stale: flag of each problem, read if GATED: 0 computes nothing.
        A_like: any tensor of A's dtype.
        parts: float32, [R, R] for each chunk of each problem; the block is written.
        PRECISION: of the product of float32: tf32x3; else ieee.
        GATED: `stale` counts.
        ALIGNED: the address of A and K are multiples of 16.
        BR, BK: rows and columns of the block, and k at a time.
    """
    item = items + 6 * tl.program_id(0)
    problem = tl.load(item)
    row, col = tl.multiple_of(tl.load(item + 1), BR), tl.multiple_of(tl.load(item + 2), BR)
    if is_stale(stale, problem, GATED):
        own = problems + problem * WIDTH
        rank, R = load_int(own + 6), tl.multiple_of(tl.load(own + 11), 16).to(tl.int32)
        rows, cols = row + tl.arange(0, BR), col + tl.arange(0, BR)
        first, end = tl.multiple_of(tl.load(item + 3), BK), tl.load(item + 4)
        A = tl.load(own + 4).to(tl.pointer_type(A_like.dtype.element_ty))
        stride = tl.load(own + 3)
        if ALIGNED:
            A, stride, end = tl.multiple_of(A, 16), tl.multiple_of(stride, 16), tl.multiple_of(end, 16)
        left = row_pointers(A, rows, rows < rank, stride)
        right = row_pointers(A, cols, cols < rank, stride)
        acc = tl.zeros((BR, BR), dtype=tl.float32)
        for k in range(first, end, BK):
            at = k + tl.arange(0, BK)
            one = tl.load(left + at[None, :], mask=(rows < rank)[:, None] & (at < end)[None, :], other=0.0)
            two = tl.load(right + at[None, :], mask=(cols < rank)[:, None] & (at < end)[None, :], other=0.0)
            acc += tl.dot(one, tl.trans(two), input_precision=PRECISION)
        out = parts + tl.multiple_of(tl.load(own + 9), 16) + tl.load(item + 5) * R * R
        tl.store(out + rows[:, None] * R + cols[None, :], acc)


@triton.jit
def fold_kernel(problems, items, stale, parts, G, GATED: tl.constexpr, BR: tl.constexpr):
    """A block of G: the sum over its chunks, twice above the diagonal, once on it, 0 below.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 4]: problem, first row, first column, chunks.
        stale: flag of each problem, read if GATED: 0 computes nothing.
        parts: what gram_kernel wrote.
        G: float32 [R, R] of each problem; the block is written.
        GATED: `stale` counts.
        BR: rows and columns of the block.
    """
    item = items + 4 * tl.program_id(0)
    problem = tl.load(item)
    if is_stale(stale, problem, GATED):
        own = problems + problem * WIDTH
        R = tl.multiple_of(tl.load(own + 11), 16).to(tl.int32)
        rows = tl.load(item + 1) + tl.arange(0, BR)
        cols = tl.multiple_of(tl.load(item + 2), BR) + tl.arange(0, BR)
        at = rows[:, None] * R + cols[None, :]
        acc = tl.zeros((BR, BR), dtype=tl.float32)
        chunk = parts + tl.multiple_of(tl.load(own + 9), 16)
        for _ in range(tl.load(item + 3)):
            acc += tl.load(chunk + at)
            chunk += R * R
        times = tl.where(rows[:, None] < cols[None, :], 2.0, tl.where(rows[:, None] == cols[None, :], 1.0, 0.0))
        tl.store(G + tl.multiple_of(tl.load(own + 13), 16) + at, acc * times)


@triton.jit
def cross_kernel(
    problems, items, stale, W_like, A_like, B_like, inverses, parts,
    SPLIT: tl.constexpr, PROMOTE: tl.constexpr, GATED: tl.constexpr, ALIGNED: tl.constexpr, ALIGNED_B: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """sum_l B_jl (W A')_jl over a block of ranks and a chunk of K.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 6]: problem, first row, first rank, first k, end of k, slot in `parts`.
        stale: flag of each problem, read if GATED: 0 computes nothing.
        W_like, B_like: any tensors of their dtypes.
        A_like: with SPLIT the buffer of split_kernel, hi and lo of A; else any tensor of A's dtype.
        inverses: of split_kernel; read with SPLIT.
        parts: float32 [slots, N] of each problem; the rows of a slot are written.
        SPLIT: A is the sum of hi and lo.
        PROMOTE: the sum over K is rounded to nearest once a step in a second accumulator; tensor cores cut their sums off,
            which biases long ones.
        GATED: `stale` counts.
        ALIGNED: addresses of W and A, W's stride and K are multiples of 16.
        ALIGNED_B: the address of B and the rank are multiples of 16.
        BM, BR, BK: rows and ranks of the block, k at a time.
    """
    item = items + 6 * tl.program_id(0)
    problem = tl.load(item)
    if is_stale(stale, problem, GATED):
        own = problems + problem * WIDTH
        N, R, rank = load_int(own + 2), load_int(own + 11), tl.load(own + 6).to(tl.int32)
        rows = tl.load(item + 1) + tl.arange(0, BM)
        first_rank = tl.multiple_of(tl.load(item + 2), BR)
        ranks = first_rank + tl.arange(0, BR)
        first, end = tl.multiple_of(tl.load(item + 3), BK), tl.load(item + 4)
        inside, has = rows < N, ranks < rank
        W, W_stride = tl.load(own).to(tl.pointer_type(W_like.dtype.element_ty)), tl.load(own + 1)
        if SPLIT:
            hi_start, A_stride = A_like + tl.multiple_of(tl.load(own + 7), 16), tl.multiple_of(tl.load(own + 10), 16)
        else:
            hi_start, A_stride = tl.load(own + 4).to(tl.pointer_type(A_like.dtype.element_ty)), tl.load(own + 3)
        if ALIGNED:
            W, W_stride, end = tl.multiple_of(W, 16), tl.multiple_of(W_stride, 16), tl.multiple_of(end, 16)
            if not SPLIT:
                hi_start, A_stride = tl.multiple_of(hi_start, 16), tl.multiple_of(A_stride, 16)
        W = row_pointers(W, rows, inside, W_stride)
        hi = row_pointers(hi_start, ranks, has, A_stride)
        lo = hi + tl.multiple_of(R * A_stride, 16)
        acc = tl.zeros((BM, BR), dtype=tl.float32)
        for k in range(first, end, BK):
            cols = k + tl.arange(0, BK)
            fits = (cols < end)[None, :]
            W_tile = tl.load(W + cols[None, :], mask=inside[:, None] & fits, other=0.0)
            A_tile = tl.load(hi + cols[None, :], mask=has[:, None] & fits, other=0.0)
            if PROMOTE:
                part = tl.dot(W_tile, tl.trans(A_tile))
                if SPLIT:
                    lo_tile = tl.load(lo + cols[None, :], mask=has[:, None] & fits, other=0.0)
                    part = tl.dot(W_tile, tl.trans(lo_tile), part)
                acc += part
            else:
                acc = tl.dot(W_tile, tl.trans(A_tile), acc)
                if SPLIT:
                    lo_tile = tl.load(lo + cols[None, :], mask=has[:, None] & fits, other=0.0)
                    acc = tl.dot(W_tile, tl.trans(lo_tile), acc)
        B = tl.load(own + 5).to(tl.pointer_type(B_like.dtype.element_ty))
        if ALIGNED_B:
            B, rank = tl.multiple_of(B, 16), tl.multiple_of(rank, 16)
        B = row_pointers(B, rows, inside, rank)
        scales = inverses + tl.multiple_of(tl.load(own + 12), 16)
        if BM * BR > 128 * 128:  # all of B beside all of the sums would not fit the registers
            halves = tl.permute(tl.reshape(acc, (BM, 2, BR // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            half = first_rank + tl.arange(0, BR // 2)
            total = times_B(left, B, scales, inside, half, rank, SPLIT)
            total += times_B(right, B, scales, inside, half + BR // 2, rank, SPLIT)
        else:
            total = times_B(acc, B, scales, inside, ranks, rank, SPLIT)
        out = parts + tl.load(own + 14) + tl.load(item + 5).to(tl.int64) * N
        tl.store(out + rows, total, mask=inside)


@triton.jit
def tail_kernel(
    problems, items, stale, B_like, G, parts,
    GATED: tl.constexpr, ALIGNED_B: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """sum_l B_jl (B G)_jl over a block of l.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 4]: problem, first row, first l, slot in `parts`.
        stale: flag of each problem, read if GATED: 0 computes nothing.
        B_like: any tensor of B's dtype.
        G: of fold_kernel.
        parts: float32 [slots, N] of each problem; the rows of a slot are written.
        GATED: `stale` counts.
        ALIGNED_B: the address of B and the rank are multiples of 16.
        BM, BR: rows and l of the block.
    """
    item = items + 4 * tl.program_id(0)
    problem = tl.load(item)
    if is_stale(stale, problem, GATED):
        own = problems + problem * WIDTH
        N, rank = load_int(own + 2), tl.load(own + 6).to(tl.int32)
        R = tl.multiple_of(tl.load(own + 11), 16).to(tl.int32)
        rows, col = tl.load(item + 1) + tl.arange(0, BM), tl.multiple_of(tl.load(item + 2), BR)
        cols = col + tl.arange(0, BR)
        inside = rows < N
        B = tl.load(own + 5).to(tl.pointer_type(B_like.dtype.element_ty))
        if ALIGNED_B:
            B, rank = tl.multiple_of(B, 16), tl.multiple_of(rank, 16)
        B = row_pointers(B, rows, inside, rank)
        G_own = G + tl.multiple_of(tl.load(own + 13), 16) + cols[None, :]
        acc = tl.zeros((BM, BR), dtype=tl.float32)
        for m in range(0, col + BR, BR):
            ranks = m + tl.arange(0, BR)
            B_tile = tl.load(B + ranks[None, :], mask=inside[:, None] & (ranks < rank)[None, :], other=0.0)
            G_tile = tl.load(G_own + ranks[:, None] * R)
            acc += tl.dot(B_tile.to(tl.float32), G_tile, input_precision="tf32x3")
        B_tile = tl.load(B + cols[None, :], mask=inside[:, None] & (cols < rank)[None, :], other=0.0)
        out = parts + tl.load(own + 14) + tl.load(item + 3).to(tl.int64) * N
        tl.store(out + rows, tl.sum(acc * B_tile.to(tl.float32), 1), mask=inside)


@triton.jit
def _plus_low_rank(
    merged, A, B, s, first, rank, cols, inside, fits, K, PRECISION: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """merged + s B A over a block of ranks. Added outside of the tensor cores, which would cut long sums off."""
    ranks = first + tl.arange(0, BR)
    has = ranks < rank
    B_tile = tl.load(B + ranks[None, :], mask=inside[:, None] & has[None, :], other=0.0)
    A_at = A + ranks.to(tl.int64)[:, None] * K + cols[None, :]
    A_tile = tl.load(A_at, mask=has[:, None] & fits, other=0.0)
    if PRECISION == "tf32x3" and B_tile.dtype == A_tile.dtype and B_tile.dtype.primitive_bitwidth == 16:
        return merged + s * tl.dot(B_tile, A_tile)  # products of 16 bits are exact
    return merged + s * tl.dot(B_tile.to(tl.float32), A_tile.to(tl.float32), input_precision=PRECISION)


@triton.jit
def _merged_squares(
    W, A, B, s, inside, first_k, end_k, K, rank, PRECISION: tl.constexpr, BLOCKS: tl.constexpr, BM: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """||W + s B A||^2 by row over some of K, element by element. W, B: pointers [rows, 1]. BLOCKS: of ranks, or 0 where that is
    not known; the loop over K is pipelined where it is."""
    total = tl.zeros((BM,), dtype=tl.float32)
    for k in range(first_k, end_k, BK):
        cols = k + tl.arange(0, BK)
        fits = (cols < end_k)[None, :]
        merged = tl.load(W + cols[None, :], mask=inside[:, None] & fits, other=0.0).to(tl.float32)
        if BLOCKS > 0:
            for block in tl.static_range(BLOCKS):
                merged = _plus_low_rank(merged, A, B, s, block * BR, rank, cols, inside, fits, K, PRECISION, BR)
        else:
            for first in range(0, rank, BR):
                merged = _plus_low_rank(merged, A, B, s, first, rank, cols, inside, fits, K, PRECISION, BR)
        total += tl.sum(merged * merged, 1)
    return total


@triton.jit
def direct_kernel(
    W, A, B, out, N, K, rank, W_stride, s, chunk,
    BLOCKS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """||W + s B A||^2 of a block of rows of one module over a chunk of K, without tables. Grid (blocks of rows, chunks).

    Args:
        W: [N, K], its rows W_stride apart; read once.
        A, B: [rank, K] and [N, rank], contiguous, of any types.
        out: float32 [chunks, N]; written.
        N, K, rank, W_stride: sizes, in elements.
        s: float, the scaling; a compiler passes it in 64 bits.
        chunk: columns of a chunk, a multiple of BK.
        BLOCKS: of ranks, or 0 for any number.
        BM, BR, BK: rows of the block; ranks and k at a time.
    """
    s = tl.full((), s, tl.float32)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < N
    W_rows, B_rows = row_pointers(W, rows, inside, W_stride), row_pointers(B, rows, inside, rank)
    first = tl.program_id(1) * chunk
    end = tl.minimum(first + chunk, K)
    w2 = _merged_squares(W_rows, A, B_rows, s, inside, first, end, K, rank, "tf32x3", BLOCKS, BM, BR, BK)
    tl.store(out + tl.program_id(1).to(tl.int64) * N + rows, w2, mask=inside)


@triton.jit
def _slots_summed(slots, first, last, N, rows, inside, SLOTS: tl.constexpr, BM: tl.constexpr):
    """Sum of the slots, SLOTS of them at a time: one after the other would wait for memory each time."""
    acc = tl.zeros((SLOTS, BM), dtype=tl.float32)
    for start in range(first, last, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        at = slots + slot.to(tl.int64)[:, None] * N + rows[None, :]
        acc += tl.load(at, mask=(slot < last)[:, None] & inside[None, :], other=0.0)
    return tl.sum(acc, 0)


@triton.jit
def finish_kernel(
    problems, items, stale, W_like, A_like, B_like, parts, scalings, kept, out,
    EPS: tl.constexpr, GATED: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The norms of a block of rows.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 4]: problem, first row, slots of cross, slots in all.
        stale: flag of each problem, read if GATED: 0 computes nothing.
        W_like, A_like, B_like: any tensors of their dtypes.
        parts: what cross_kernel and tail_kernel wrote.
        scalings: float32, s of each problem.
        kept: float32, norms of all problems; with GATED those of problems that are not stale are read, those of the others
            written.
        out: float32, norms of all problems; written.
        EPS: the smallest norm.
        GATED: `stale` counts.
        SLOTS: slots read at a time.
        BM, BR, BK: rows of the block; ranks and k at a time where sums cancel.
    """
    item = items + 4 * tl.program_id(0)
    problem, row = tl.load(item), tl.load(item + 1)
    own = problems + problem * WIDTH
    N = load_int(own + 2)
    rows = row + tl.arange(0, BM)
    inside = rows < N
    at = tl.load(own + 8) + rows
    if is_stale(stale, problem, GATED):
        first, last = tl.load(item + 2), tl.load(item + 3)
        slots = parts + tl.load(own + 14)
        cross = _slots_summed(slots, 0, first, N, rows, inside, SLOTS, BM)
        square = _slots_summed(slots, first, last, N, rows, inside, SLOTS, BM)
        s = tl.load(scalings + problem)
        base = tl.load(own + 15).to(tl.pointer_type(tl.float32))
        frozen, low = tl.load(base + rows, mask=inside, other=0.0), s * s * square
        w2 = frozen + 2 * s * cross + low
        cancels = w2 < (frozen + low) * _CANCELS
        if tl.max(cancels.to(tl.int32), 0) > 0:
            K, rank = load_int(own + 3), load_int(own + 6)
            W = row_pointers(tl.load(own).to(tl.pointer_type(W_like.dtype.element_ty)), rows, inside, tl.load(own + 1))
            B = row_pointers(tl.load(own + 5).to(tl.pointer_type(B_like.dtype.element_ty)), rows, inside, rank)
            A = tl.load(own + 4).to(tl.pointer_type(A_like.dtype.element_ty))
            total = _merged_squares(W, A, B, s, inside, 0, K, K, rank, "ieee", 0, BM, BR, BK)
            w2 = tl.where(cancels, total, w2)
        norm = tl.maximum(tl.sqrt_rn(w2), EPS, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + at, norm, mask=inside)
        if GATED:
            tl.store(kept + at, norm, mask=inside)
    elif GATED:
        tl.store(out + at, tl.load(kept + at, mask=inside, other=0.0), mask=inside)
