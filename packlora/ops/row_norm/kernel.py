"""Triton kernels of row_norm.py: norms of the rows of W + s B A for many modules at once, from W in 16 bits.

    split    A float32 -> hi + lo in W's dtype, rows scaled by powers of two      once for all rows of W
    gram     G = A A', one triangle, by chunks of K
    fold     sums the chunks; what is left out of the other triangle is counted twice
    cross    sum_l B_jl (W A')_jl, by blocks of ranks and chunks of K             the one read of W
    tail     sum_l B_jl (B G)_jl, by blocks of ranks
    finish   w^2 = ||W||^2 + 2 s cross + s^2 tail; rows in which that cancels are computed anew, element by element

Everything after a product is linear in it, so a product never has to be whole anywhere: a program reduces its share to one
number a row, and `finish` adds the shares in their order. No atomics, the same bits every time.

Which module, rows, ranks and part of K a program has is in a table of items; where the module's operands lie is in a table of
problems (columns: Batch in row_norm_batch.py). With GATED, programs of modules whose flag in `stale` is 0 do nothing.

What is read from a table says nothing of its alignment, and without that every element is loaded by itself: so it is said where
it is loaded. First ranks are multiples of their block; places in split, inverses, gram and G, R and Kp multiples of 16
(row_norm_batch.make_items).

Shapes: N outputs, K inputs, r rank, R rank padded to whole blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

WIDTH = 16
"""Columns of the table of problems."""
_WIDTH = tl.constexpr(WIDTH)
CANCELS = 0.25
"""Rows with w^2 under this part of ||W||^2 + ||s B A||^2 are computed anew; above it, cancellation costs two bits at most."""
_CANCELS = tl.constexpr(CANCELS)


@triton.jit
def _runs(stale, problem, GATED: tl.constexpr):
    if GATED:
        return tl.load(stale + problem) != 0
    else:
        return True


@triton.jit
def _int(at):
    return tl.load(at).to(tl.int32)


@triton.jit
def _rows_of(start, rows, inside, stride):
    """Pointers [rows, 1] into a matrix. What is known of start and stride must be said where they are loaded: a hint on an
    argument of a function, or on what one returns, is lost."""
    return start + tl.where(inside, rows, 0).to(tl.int64)[:, None] * stride


@triton.jit
def split_kernel(
    problems, items, stale, A_like, split, inverses, GATED: tl.constexpr, ALIGNED: tl.constexpr, BK: tl.constexpr
):
    """hi and lo [R, Kp] of one row of A and its inverse scale; zeros past K and past r. Items: problem, row.

    The scale is a power of two that puts the row's largest element near 2^14: float16 then holds hi and lo without loss.
    """
    item = items + 2 * tl.program_id(0)
    problem, row = tl.load(item), tl.load(item + 1)
    if _runs(stale, problem, GATED):
        own = problems + problem * _WIDTH
        rank, R, Kp = _int(own + 6), _int(own + 11), tl.multiple_of(tl.load(own + 10), 16).to(tl.int32)
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
    """One block of G over one chunk of K. Items: problem, first row, first column (not before the row), k, end, chunk."""
    item = items + 6 * tl.program_id(0)
    problem = tl.load(item)
    row, col = tl.multiple_of(tl.load(item + 1), BR), tl.multiple_of(tl.load(item + 2), BR)
    if _runs(stale, problem, GATED):
        own = problems + problem * _WIDTH
        rank, R = _int(own + 6), tl.multiple_of(tl.load(own + 11), 16).to(tl.int32)
        rows, cols = row + tl.arange(0, BR), col + tl.arange(0, BR)
        first, end = tl.multiple_of(tl.load(item + 3), BK), tl.load(item + 4)
        A = tl.load(own + 4).to(tl.pointer_type(A_like.dtype.element_ty))
        stride = tl.load(own + 3)
        if ALIGNED:
            A, stride, end = tl.multiple_of(A, 16), tl.multiple_of(stride, 16), tl.multiple_of(end, 16)
        left = _rows_of(A, rows, rows < rank, stride)
        right = _rows_of(A, cols, cols < rank, stride)
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
    """The block's sum over the chunks: twice above the diagonal, once on it, 0 below. Items: problem, row, column, chunks."""
    item = items + 4 * tl.program_id(0)
    problem = tl.load(item)
    if _runs(stale, problem, GATED):
        own = problems + problem * _WIDTH
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
def _reduced(acc, B, scales, inside, ranks, rank, SPLIT: tl.constexpr):
    B_tile = tl.load(B + ranks[None, :], mask=inside[:, None] & (ranks < rank)[None, :], other=0.0).to(tl.float32)
    if SPLIT:
        B_tile *= tl.load(scales + ranks)[None, :]
    return tl.sum(acc * B_tile, 1)


@triton.jit
def cross_kernel(
    problems, items, stale, W_like, A_like, B_like, inverses, parts,
    SPLIT: tl.constexpr, PROMOTE: tl.constexpr, GATED: tl.constexpr, ALIGNED: tl.constexpr, ALIGNED_B: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """sum_l B_jl (W A')_jl over a block of ranks and a chunk of K. Items: problem, first row, first rank, k, end, slot.

    SPLIT: A is hi + lo in A_like, the buffer of split_kernel; else A_like only says A's dtype. PROMOTE: the sum over K is
    rounded to nearest once a step in a second accumulator; tensor cores cut their sums off, which biases long ones.
    """
    item = items + 6 * tl.program_id(0)
    problem = tl.load(item)
    if _runs(stale, problem, GATED):
        own = problems + problem * _WIDTH
        N, R, rank = _int(own + 2), _int(own + 11), tl.load(own + 6).to(tl.int32)
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
        W = _rows_of(W, rows, inside, W_stride)
        hi = _rows_of(hi_start, ranks, has, A_stride)
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
        B = _rows_of(B, rows, inside, rank)
        scales = inverses + tl.multiple_of(tl.load(own + 12), 16)
        if BM * BR > 128 * 128:  # all of B beside all of the sums would not fit the registers
            halves = tl.permute(tl.reshape(acc, (BM, 2, BR // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            half = first_rank + tl.arange(0, BR // 2)
            total = _reduced(left, B, scales, inside, half, rank, SPLIT)
            total += _reduced(right, B, scales, inside, half + BR // 2, rank, SPLIT)
        else:
            total = _reduced(acc, B, scales, inside, ranks, rank, SPLIT)
        out = parts + tl.load(own + 14) + tl.load(item + 5).to(tl.int64) * N
        tl.store(out + rows, total, mask=inside)


@triton.jit
def tail_kernel(
    problems, items, stale, B_like, G, parts,
    GATED: tl.constexpr, ALIGNED_B: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """sum_l B_jl (B G)_jl over a block of l. Items: problem, first row, first l, slot."""
    item = items + 4 * tl.program_id(0)
    problem = tl.load(item)
    if _runs(stale, problem, GATED):
        own = problems + problem * _WIDTH
        N, rank = _int(own + 2), tl.load(own + 6).to(tl.int32)
        R = tl.multiple_of(tl.load(own + 11), 16).to(tl.int32)
        rows, col = tl.load(item + 1) + tl.arange(0, BM), tl.multiple_of(tl.load(item + 2), BR)
        cols = col + tl.arange(0, BR)
        inside = rows < N
        B = tl.load(own + 5).to(tl.pointer_type(B_like.dtype.element_ty))
        if ALIGNED_B:
            B, rank = tl.multiple_of(B, 16), tl.multiple_of(rank, 16)
        B = _rows_of(B, rows, inside, rank)
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
def _slots_summed(slots, first, last, N, rows, inside, SLOTS: tl.constexpr, BM: tl.constexpr):
    """SLOTS of them at a time: one after the other would wait for memory each time."""
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
    """The norms of a block of rows. Items: problem, first row, slots of cross, slots in all.

    GATED: norms of modules that are not stale come from `kept`, those of the others go there too.
    """
    item = items + 4 * tl.program_id(0)
    problem, row = tl.load(item), tl.load(item + 1)
    own = problems + problem * _WIDTH
    N = _int(own + 2)
    rows = row + tl.arange(0, BM)
    inside = rows < N
    at = tl.load(own + 8) + rows
    if _runs(stale, problem, GATED):
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
            K, rank = _int(own + 3), _int(own + 6)
            W = _rows_of(tl.load(own).to(tl.pointer_type(W_like.dtype.element_ty)), rows, inside, tl.load(own + 1))
            B = _rows_of(tl.load(own + 5).to(tl.pointer_type(B_like.dtype.element_ty)), rows, inside, rank)
            A = tl.load(own + 4).to(tl.pointer_type(A_like.dtype.element_ty))
            total = tl.zeros((BM,), dtype=tl.float32)
            for k in range(0, K, BK):
                cols = k + tl.arange(0, BK)
                acc = tl.zeros((BM, BK), dtype=tl.float32)
                for l in range(0, rank, BR):  # noqa: E741
                    ranks = l + tl.arange(0, BR)
                    B_tile = tl.load(B + ranks[None, :], mask=inside[:, None] & (ranks < rank)[None, :], other=0.0)
                    A_at = A + ranks.to(tl.int64)[:, None] * K + cols[None, :]
                    A_tile = tl.load(A_at, mask=(ranks < rank)[:, None] & (cols < K)[None, :], other=0.0)
                    acc = tl.dot(B_tile.to(tl.float32), A_tile.to(tl.float32), acc, input_precision="ieee")
                W_tile = tl.load(W + cols[None, :], mask=inside[:, None] & (cols < K)[None, :], other=0.0)
                merged = W_tile.to(tl.float32) + s * acc
                total += tl.sum(merged * merged, 1)
            w2 = tl.where(cancels, total, w2)
        norm = tl.maximum(tl.sqrt_rn(w2), EPS, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + at, norm, mask=inside)
        if GATED:
            tl.store(kept + at, norm, mask=inside)
    elif GATED:
        tl.store(out + at, tl.load(kept + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def _squares(W_rows, inside, K, BM: tl.constexpr, BK: tl.constexpr):
    acc = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, K, BK):
        cols = k + tl.arange(0, BK)
        tile = tl.load(W_rows + cols[None, :], mask=inside[:, None] & (cols < K)[None, :], other=0.0).to(tl.float32)
        acc += tile * tile
    return tl.sum(acc, 1)


@triton.jit
def square_kernel(W, out, N, K, stride, BM: tl.constexpr, BK: tl.constexpr):
    """||W||^2 by rows. Grid (blocks of rows)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < N
    tl.store(out + rows, _squares(_rows_of(W, rows, inside, stride), inside, K, BM, BK), mask=inside)


@triton.jit
def squares_kernel(
    problems, items, stale, W_like, ALIGNED: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """||W||^2 of modules whose flag has bit 1, into their own base_N. Items of finish_kernel, SPAN rows each."""
    item = items + 4 * tl.program_id(0)
    problem = tl.load(item)
    if (tl.load(stale + problem) & 2) != 0:
        own = problems + problem * _WIDTH
        N, K, stride = _int(own + 2), tl.load(own + 3).to(tl.int32), tl.load(own + 1)
        W = tl.load(own).to(tl.pointer_type(W_like.dtype.element_ty))
        out = tl.load(own + 15).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            W, K, stride = tl.multiple_of(W, 16), tl.multiple_of(K, 16), tl.multiple_of(stride, 16)
        for first in range(0, SPAN, BM):
            rows = tl.load(item + 1) + first + tl.arange(0, BM)
            inside = rows < N
            squares = _squares(_rows_of(W, rows, inside, stride), inside, K, BM, BK)
            tl.store(out + rows, squares, mask=inside)


# --- has anything changed? ---------------------------------------------------------------------------------------------


@triton.jit
def _mixed(v):
    v ^= v >> 16
    v *= 0x85EBCA6B
    v ^= v >> 13
    v *= 0xC2B2AE35
    return v ^ (v >> 16)


@triton.jit
def _bits(values):
    if values.dtype.primitive_bitwidth == 32:
        return values.to(tl.uint32, bitcast=True)
    else:
        return values.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def fingerprint_kernel(
    problems, items, W_like, A_like, B_like, parts, ALIGNED: tl.constexpr, ALIGNED_B: tl.constexpr, BLOCK: tl.constexpr
):
    """Two sums of 32-bit numbers over the bits of a piece of A (kind 0), B (1), or 8 elements of each of some rows of W (2).

    Every element is mixed with its place, so that values which trade places count. Items: problem, kind, first element.
    """
    item = items + 3 * tl.program_id(0)
    problem, kind, first = tl.load(item), tl.load(item + 1), tl.multiple_of(tl.load(item + 2), BLOCK)
    own = problems + problem * _WIDTH
    N, K, rank = tl.load(own + 2), tl.load(own + 3), tl.load(own + 6)
    at = first.to(tl.int64) + tl.arange(0, BLOCK)
    if kind == 0:
        A, count = tl.load(own + 4).to(tl.pointer_type(A_like.dtype.element_ty)), rank * K
        if ALIGNED:
            A, count = tl.multiple_of(A, 16), tl.multiple_of(count, 16)
        word = _bits(tl.load(A + at, mask=at < count, other=0.0))
    elif kind == 1:
        B, count = tl.load(own + 5).to(tl.pointer_type(B_like.dtype.element_ty)), N * rank
        if ALIGNED_B:
            B, count = tl.multiple_of(B, 16), tl.multiple_of(count, 16)
        word = _bits(tl.load(B + at, mask=at < count, other=0.0))
    else:
        row = at // 8
        col = ((row * 40503) % tl.maximum(K // 8, 1)) * 8 + at % 8
        W = tl.load(own).to(tl.pointer_type(W_like.dtype.element_ty))
        word = _bits(tl.load(W + row * tl.load(own + 1) + col, mask=(row < N) & (col < K), other=0.0))
    seed = at.to(tl.uint32) * 0x9E3779B1 + kind.to(tl.uint32) * 0x7F4A7C15
    one = _mixed(_mixed(word ^ seed) + seed)
    two = _mixed(_mixed(word + 0x165667B1) ^ (seed * 0x27D4EB2F))
    out = parts + 2 * tl.program_id(0)
    tl.store(out, tl.sum(one.to(tl.int64), 0))
    tl.store(out + 1, tl.sum(two.to(tl.int64), 0))


@triton.jit
def _summed(parts, first, last, BLOCK: tl.constexpr):
    one = tl.zeros((BLOCK,), dtype=tl.int64)
    two = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        one += tl.load(parts + 2 * at, mask=at < last, other=0)
        two += tl.load(parts + 2 * at + 1, mask=at < last, other=0)
    return tl.sum(one, 0), tl.sum(two, 0)


@triton.jit
def compare_kernel(ranges, parts, seen, stale, BLOCK: tl.constexpr):
    """stale[p]: 0 where the sums over the problem's items are those in seen [P, 5], which is brought up to date; else bit 0,
    and bit 1 as well where those of W are others.

    ranges [P, 3]: items of A and B, then of W. The last number of `seen` is 1 where the others mean anything.
    """
    problem = tl.program_id(0)
    own, bounds = seen + 5 * problem, ranges + 3 * problem
    first, middle, last = tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2)
    one, two = _summed(parts, first, middle, BLOCK)
    three, four = _summed(parts, middle, last, BLOCK)
    never = tl.load(own + 4) != 1
    low_rank = (tl.load(own) != one) | (tl.load(own + 1) != two) | never
    frozen = (tl.load(own + 2) != three) | (tl.load(own + 3) != four) | never
    tl.store(stale + problem, (low_rank | frozen).to(tl.int32) + 2 * frozen.to(tl.int32))
    tl.store(own, one)
    tl.store(own + 1, two)
    tl.store(own + 2, three)
    tl.store(own + 3, four)
    tl.store(own + 4, 1)
