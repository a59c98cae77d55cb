"""Kernels that square and add up the rows of weights."""

from __future__ import annotations

import triton
import triton.language as tl

from packlora.ops.row_norm.kernels.common import WIDTH, load_int, row_pointers


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
    """||W||^2 by rows. Grid (blocks of rows).

    Args:
        W: [N, K].
        out: float32 [N], written.
        N, K: rows and columns.
        stride: elements from one row of W to the next.
        BM, BK: rows of the block, columns at a time.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < N
    tl.store(out + rows, _squares(row_pointers(W, rows, inside, stride), inside, K, BM, BK), mask=inside)


@triton.jit
def squares_kernel(
    problems, items, stale, W_like, ALIGNED: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """||W||^2 of problems whose flag has bit 1, into their own base_N.

    Args:
        problems: table of problems, see common.py.
        items: [programs, 4], those of finish_kernel: problem, first row.
        stale: flag of each problem.
        W_like: any tensor of W's dtype.
        ALIGNED: the address of W, its stride and K are multiples of 16.
        SPAN: rows of an item.
        BM, BK: rows and columns at a time.
    """
    item = items + 4 * tl.program_id(0)
    problem = tl.load(item)
    if (tl.load(stale + problem) & 2) != 0:
        own = problems + problem * WIDTH
        N, K, stride = load_int(own + 2), tl.load(own + 3).to(tl.int32), tl.load(own + 1)
        W = tl.load(own).to(tl.pointer_type(W_like.dtype.element_ty))
        out = tl.load(own + 15).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            W, K, stride = tl.multiple_of(W, 16), tl.multiple_of(K, 16), tl.multiple_of(stride, 16)
        for first in range(0, SPAN, BM):
            rows = tl.load(item + 1) + first + tl.arange(0, BM)
            inside = rows < N
            squares = _squares(row_pointers(W, rows, inside, stride), inside, K, BM, BK)
            tl.store(out + rows, squares, mask=inside)
