"""The kernels of norm.py for ranks over 64, where A A' and B G are a large part of the work.

    cross    as cross_kernel, with Hopper's copy engine; one module a launch, programs that stay and take block after block
    gram     G = A A' from the halves of A that the cross product reads as well, on 16-bit tensor cores
    fold     sums the chunks, and cuts G in two numbers of 11 bits (TF32)
    tail     sum_l B_jl (B G)_jl: B is cut in registers, three products of TF32, two where B has 16 bits

Of G the blocks on and above the diagonal are computed. What is left out of the other triangle is counted twice: fold writes the
transpose of a triangle, [column, row], so that both operands of the tail's products lie along the sum.

Shapes: N outputs, K inputs, r rank, R rank padded to whole blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from packlora.ops.row_norm.kernels.common import WIDTH, is_stale, load_int, row_pointers, times_B


@triton.jit(do_not_specialize=["problem", "blocks", "chunks", "total"])
def wide_cross_kernel(
    problems, problem, stale, W, hi, lo, B_like, inverses, parts, blocks, chunks, total, steps: tl.constexpr,
    SPLIT: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Compute cross_kernel for one problem, into the same slots. B's address and the rank are multiples of 16.

    Args:
        problems: table of problems, see common.py.
        problem: its number.
        stale: flag of each problem, read if GATED: 0 computes nothing.
        W: descriptor of W [N, K].
        hi, lo: descriptors of the halves of A; without SPLIT hi is A, and lo is not read.
        B_like: any tensor of B's dtype.
        inverses: of split_kernel; read with SPLIT.
        parts: float32 [slots, N] of each problem; written.
        blocks, chunks: of ranks, and of K, `steps` of BK each.
        total: blocks of rows, times both. Neighbours in this order share rows of W.
        steps: of K in a chunk.
        SPLIT: A is the sum of hi and lo.
        GATED: `stale` counts.
        BM, BR, BK: rows and ranks of a block, k at a time.
        PROGRAMS: of the grid; each takes every PROGRAMS-th block.
        FLATTEN: whether the loop over blocks and that over K become one.
    """
    if is_stale(stale, problem, GATED):
        own = problems + problem * WIDTH
        N, rank = load_int(own + 2), tl.load(own + 6).to(tl.int32)
        B_start = tl.multiple_of(tl.load(own + 5).to(tl.pointer_type(B_like.dtype.element_ty)), 16)
        rank = tl.multiple_of(rank, 16)
        scales, slots = inverses + tl.multiple_of(tl.load(own + 12), 16), parts + tl.load(own + 14)
        for item in tl.range(tl.program_id(0), total, PROGRAMS, flatten=FLATTEN):
            number, chunk = item % blocks, (item // blocks) % chunks
            row = item // (blocks * chunks) * BM
            acc = tl.zeros((BM, BR), dtype=tl.float32)
            for step in range(steps):
                k = (chunk * steps + step) * BK
                W_tile = W.load([row, k])
                acc = tl.dot(W_tile, hi.load([number * BR, k]).T, acc)
                if SPLIT:
                    acc = tl.dot(W_tile, lo.load([number * BR, k]).T, acc)
            rows = row + tl.arange(0, BM)
            inside = rows < N
            B = row_pointers(B_start, rows, inside, rank)
            halves = tl.permute(tl.reshape(acc, (BM, 2, BR // 2)), (0, 2, 1))
            left, right = tl.split(halves)  # all of B beside all of the sums would not fit the registers
            half = number * BR + tl.arange(0, BR // 2)
            sums = times_B(left, B, scales, inside, half, rank, SPLIT)
            sums += times_B(right, B, scales, inside, half + BR // 2, rank, SPLIT)
            tl.store(slots + (number * chunks + chunk).to(tl.int64) * N + rows, sums, mask=inside)


@triton.jit
def wide_gram_kernel(
    problems, items, stale, A_like, inverses, parts,
    SPLIT: tl.constexpr, GATED: tl.constexpr, ALIGNED: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One block of G over one chunk of K.

    With SPLIT all four products count, since lo need not average out. They are added up from the smallest on, and rounded to
    nearest in a second accumulator once a step.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 6]: problem, first row, first column (not before the row), first k, end of k, place of the block.
        stale: flag of each problem, read if GATED: 0 computes nothing.
        A_like: with SPLIT the buffer of split_kernel; else any tensor of A's dtype.
        inverses: of split_kernel; read with SPLIT.
        parts: float32 [BR, BR] for each chunk of each block; written.
        SPLIT: A is the sum of hi and lo.
        GATED: `stale` counts.
        ALIGNED: the address of A and K are multiples of 16.
        BR, BK: rows and columns of the block, k at a time.
    """
    item = items + 6 * tl.program_id(0)
    problem = tl.load(item)
    if is_stale(stale, problem, GATED):
        own = problems + problem * WIDTH
        rank, R = load_int(own + 6), load_int(own + 11)
        rows = tl.multiple_of(tl.load(item + 1), BR) + tl.arange(0, BR)
        cols = tl.multiple_of(tl.load(item + 2), BR) + tl.arange(0, BR)
        first, end = tl.multiple_of(tl.load(item + 3), BK), tl.load(item + 4)
        if SPLIT:
            start, stride = A_like + tl.multiple_of(tl.load(own + 7), 16), tl.multiple_of(tl.load(own + 10), 16)
        else:
            start, stride = tl.load(own + 4).to(tl.pointer_type(A_like.dtype.element_ty)), tl.load(own + 3)
        if ALIGNED:
            end = tl.multiple_of(end, 16)
            if not SPLIT:
                start, stride = tl.multiple_of(start, 16), tl.multiple_of(stride, 16)
        left, right = row_pointers(start, rows, rows < rank, stride), row_pointers(start, cols, cols < rank, stride)
        to_lo = tl.multiple_of(R * stride, 16)
        acc = tl.zeros((BR, BR), dtype=tl.float32)
        for k in range(first, end, BK):
            at = (k + tl.arange(0, BK))[None, :]
            in_left, in_right = (rows < rank)[:, None] & (at < end), (cols < rank)[:, None] & (at < end)
            one = tl.load(left + at, mask=in_left, other=0.0)
            two = tl.trans(tl.load(right + at, mask=in_right, other=0.0))
            if SPLIT:
                one_lo = tl.load(left + to_lo + at, mask=in_left, other=0.0)
                two_lo = tl.trans(tl.load(right + to_lo + at, mask=in_right, other=0.0))
                part = tl.dot(one_lo, two_lo)
                part = tl.dot(one_lo, two, part)
                part = tl.dot(one, two_lo, part)
                part = tl.dot(one, two, part)
            else:
                part = tl.dot(one, two)
            acc += part
        if SPLIT:
            scales = inverses + tl.multiple_of(tl.load(own + 12), 16)
            acc = acc * tl.load(scales + rows)[:, None] * tl.load(scales + cols)[None, :]
        out = parts + tl.multiple_of(tl.load(own + 9), 16) + tl.load(item + 5) * (BR * BR)
        within = tl.arange(0, BR)
        tl.store(out + within[:, None] * BR + within[None, :], acc)


@triton.jit
def _high(values):
    """The 11 leading bits, what TF32 reads of a float32."""
    return (values.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def wide_fold_kernel(problems, items, stale, parts, G, GATED: tl.constexpr, BLOCK: tl.constexpr, BR: tl.constexpr):
    """A piece of a block of G: the sum over the chunks, twice above the diagonal, once on it, 0 below.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 5]: problem, first row, first column, chunks, place of the block's first chunk.
        stale: flag of each problem, read if GATED: 0 computes nothing.
        parts: what wide_gram_kernel wrote.
        G: float32, hi [R, R] and then lo of each problem; the piece is written.
        GATED: `stale` counts.
        BLOCK: rows and columns of a block of G.
        BR: rows and columns of the piece.
    """
    item = items + 5 * tl.program_id(0)
    problem = tl.load(item)
    if is_stale(stale, problem, GATED):
        own = problems + problem * WIDTH
        R = tl.multiple_of(tl.load(own + 11), 16).to(tl.int32)
        rows = tl.multiple_of(tl.load(item + 1), BR) + tl.arange(0, BR)
        cols = tl.multiple_of(tl.load(item + 2), BR) + tl.arange(0, BR)
        acc = tl.zeros((BR, BR), dtype=tl.float32)
        at = (rows % BLOCK)[:, None] * BLOCK + (cols % BLOCK)[None, :]
        chunk = parts + tl.multiple_of(tl.load(own + 9), 16) + tl.load(item + 4) * (BLOCK * BLOCK)
        for _ in range(tl.load(item + 3)):
            acc += tl.load(chunk + at)
            chunk += BLOCK * BLOCK
        acc *= tl.where(rows[:, None] < cols[None, :], 2.0, tl.where(rows[:, None] == cols[None, :], 1.0, 0.0))
        acc = tl.trans(acc)
        hi = _high(acc)
        out = G + tl.multiple_of(tl.load(own + 13), 16) + cols[:, None] * R + rows[None, :]
        tl.store(out, hi)
        tl.store(out + R * R, acc - hi)


@triton.jit
def wide_tail_kernel(
    problems, items, stale, B_like, G, parts,
    GATED: tl.constexpr, ALIGNED_B: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """sum_l B_jl (B G)_jl over a block of l.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 4]: problem, first row, first l, slot in `parts`.
        stale: flag of each problem, read if GATED: 0 computes nothing.
        B_like: any tensor of B's dtype.
        G: of wide_fold_kernel.
        parts: float32 [slots, N] of each problem; the rows of a slot are written.
        GATED: `stale` counts.
        ALIGNED_B: the address of B and the rank are multiples of 16.
        BM, BR, BK: rows and l of the block, ranks at a time.
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
        G_hi = G + tl.multiple_of(tl.load(own + 13), 16) + cols[:, None] * R
        G_lo = G_hi + R * R
        acc = tl.zeros((BM, BR), dtype=tl.float32)
        for m in range(0, col + BR, BK):
            ranks = (m + tl.arange(0, BK))[None, :]
            B_tile = tl.load(B + ranks, mask=inside[:, None] & (ranks < rank), other=0.0).to(tl.float32)
            G_tile = tl.trans(tl.load(G_hi + ranks))
            if B_like.dtype.element_ty.primitive_bitwidth == 32:
                hi = _high(B_tile)
                part = tl.dot(B_tile - hi, G_tile, input_precision="tf32")
                part = tl.dot(hi, tl.trans(tl.load(G_lo + ranks)), part, input_precision="tf32")
            else:  # 11 bits hold it
                hi = B_tile
                part = tl.dot(hi, tl.trans(tl.load(G_lo + ranks)), input_precision="tf32")
            acc += tl.dot(hi, G_tile, part, input_precision="tf32")
        B_tile = tl.load(B + cols[None, :], mask=inside[:, None] & (cols < rank)[None, :], other=0.0)
        out = parts + tl.load(own + 14) + tl.load(item + 3).to(tl.int64) * N
        tl.store(out + rows, tl.sum(acc * B_tile.to(tl.float32), 1), mask=inside)
