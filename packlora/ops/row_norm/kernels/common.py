"""Shared code of the row norm's kernels: the table of problems, and how its columns are read.

Columns of a problem's row, int64:

     0  address of W             1  stride of W            2  N                       3  K
     4  address of A             5  address of B           6  r                       7  its place in `split`
     8  its place in `out`       9  its place in `gram`   10  Kp, K padded           11  R, r padded to whole blocks
    12  its place in `inverses` 13  its place in `G`      14  its place in `parts`   15  address of base_N

Places are in elements. What is read from a table says nothing of its alignment, and without that every element is loaded by
itself: so it is said where it is loaded. First ranks are multiples of their block; places in split, inverses, gram and G, R and
Kp multiples of 16 (tables.make_items).
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = 16
"""Number of columns of the table of problems."""
WIDTH = tl.constexpr(COLUMNS)


@triton.jit
def is_stale(stale, problem, GATED: tl.constexpr):
    """Whether the problem is computed: always, or with GATED where its flag in `stale` is not 0."""
    if GATED:
        return tl.load(stale + problem) != 0
    else:
        return True


@triton.jit
def load_int(at):
    """A number of a table, as int32."""
    return tl.load(at).to(tl.int32)


@triton.jit
def row_pointers(start, rows, inside, stride):
    """Pointers [rows, 1] into a matrix. What is known of start and stride must be said where they are loaded: a hint on an
    argument of a function, or on what one returns, is lost."""
    return start + tl.where(inside, rows, 0).to(tl.int64)[:, None] * stride


@triton.jit
def times_B(acc, B, scales, inside, ranks, rank, SPLIT: tl.constexpr):
    """Sums over a block of ranks of acc [rows, ranks] * B, by row; with SPLIT, times the ranks' inverse scales."""
    B_tile = tl.load(B + ranks[None, :], mask=inside[:, None] & (ranks < rank)[None, :], other=0.0).to(tl.float32)
    if SPLIT:
        B_tile *= tl.load(scales + ranks)[None, :]
    return tl.sum(acc * B_tile, 1)
