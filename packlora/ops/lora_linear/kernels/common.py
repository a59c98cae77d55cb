"""What the kernels of the operator share: sums that keep their digits, and what a program reads of the tables.

What is read from a table says nothing of its alignment, and without that every element is loaded by itself: so it is said where
it is loaded. All places and ranks in tables.GroupTables are multiples of 16.
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
def _block_of(blocks, index, size, T, threshold, ALONE: tl.constexpr):
    """Adapter (0 where ALONE), start, stop and dropout threshold of a block of tokens; see layout.SegmentTables."""
    if ALONE:
        return index * 0, index * size, tl.minimum((index + 1) * size, T), threshold
    else:
        at = blocks + 4 * index
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _rows_of(adapters, adapter, first, rank, ALONE: tl.constexpr):
    """First row in the stacked A, and padded rank; see layout.GroupTables.rows."""
    if ALONE:
        return first, rank
    else:
        at = adapters + 2 * adapter
        return tl.multiple_of(tl.load(at), 16), tl.multiple_of(tl.load(at + 1), 16)


@triton.jit
def _place_of(places, adapter, column, offset, rank, ALONE: tl.constexpr):
    """Column in S, offset in the flat B, and padded rank; see layout.GroupTables.places."""
    if ALONE:
        return column, offset, rank
    else:
        at = places + 4 * adapter
        return (
            tl.multiple_of(tl.load(at), 16), tl.multiple_of(tl.load(at + 1), 16), tl.multiple_of(tl.load(at + 2), 16),
        )  # fmt: skip
