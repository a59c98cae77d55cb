"""The Triton kernels of triton_path.py: low-rank products by groups of consecutive rows, whose sizes the device alone knows.

A program finds its group in a table: of blocks of rows (group, first row, end), or of the groups' ends. Blocks and groups
without rows do nothing. Sums are made in float32.

Shapes: S rows, K features, r rank, G groups.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(index, rows, inside, INDEXED: tl.constexpr):
    """Rows of x that the rows sorted by expert were taken from."""
    if INDEXED:
        return tl.load(index + rows, mask=inside, other=0).to(tl.int64)
    else:
        return rows.to(tl.int64)


@triton.jit
def experts_blocks_kernel(ends, blocks, G, BM: tl.constexpr, BG: tl.constexpr):
    """The table of blocks of at most BM rows. Grid (blocks that there can be).

    Args:
        ends: of the groups' rows, int32 [G].
        blocks: int32 [., 3]; written. Those that are not there end where they begin.
        BG: G and what is missing to a power of two.
    """
    block, at = tl.program_id(0), tl.arange(0, BG)
    end = tl.load(ends + at, mask=at < G, other=0)
    start = tl.load(ends + at - 1, mask=(at > 0) & (at < G), other=0)
    counts = (end - start + BM - 1) // BM
    last = tl.cumsum(counts, 0)
    group = tl.sum((last <= block).to(tl.int32), 0)
    own = (at == group) & (at < G)
    first = tl.sum(tl.where(own, start + (block - last + counts) * BM, 0), 0)
    stop = tl.minimum(first + BM, tl.sum(tl.where(own, end, 0), 0))
    tl.store(blocks + 3 * block, tl.minimum(group, G - 1))
    tl.store(blocks + 3 * block + 1, first)
    tl.store(blocks + 3 * block + 2, stop)


@triton.jit
def experts_down_kernel(
    x, index, w, out, blocks, x_stride, K, r, INDEXED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out = x w_g' for every row of every group g. Grid (blocks of rows).

    Args:
        x: [., K]; x_stride from one row to the next.
        index: which row of x every sorted row is, [S]; unused where it is the row itself (not INDEXED).
        w: [G, r, K].
        out: [S, r]; written.
        blocks: int32 [., 3].
        BM, BK, BR: rows and features of a block, and r and what is missing to a power of two.
    """
    at = blocks + 3 * tl.program_id(0)
    group, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if first < end:
        rows, ranks, cols = first + tl.arange(0, BM), tl.arange(0, BR), tl.arange(0, BK)
        inside = rows < end
        x_at = x + _rows(index, rows, inside, INDEXED)[:, None] * x_stride + cols[None, :]
        w_at = w + group.to(tl.int64) * r * K + ranks[None, :] * K + cols[:, None]
        acc = tl.zeros((BM, BR), tl.float32)
        for k in range(0, K, BK):
            x_tile = tl.load(x_at + k, mask=inside[:, None] & (cols < K - k)[None, :], other=0.0)
            w_tile = tl.load(w_at + k, mask=(cols < K - k)[:, None] & (ranks < r)[None, :], other=0.0)
            acc = tl.dot(x_tile, w_tile, acc)
        out_at = out + rows.to(tl.int64)[:, None] * r + ranks[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (ranks < r)[None, :])


@triton.jit
def _low_rank_tiles(s, w, group, first, end, N, r, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr):
    """The tiles of s [S, r] and of w [G, r, N] whose product a program adds to its tile of [S, N]; the columns of that, its
    places, and which of these there are."""
    rows, ranks = first + tl.arange(0, BM), tl.arange(0, BR)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    s_at = s + rows.to(tl.int64)[:, None] * r + ranks[None, :]
    s_tile = tl.load(s_at, mask=(rows < end)[:, None] & (ranks < r)[None, :], other=0.0)
    w_at = w + group.to(tl.int64) * r * N + ranks[:, None] * N + cols[None, :]
    w_tile = tl.load(w_at, mask=(ranks < r)[:, None] & (cols < N)[None, :], other=0.0)
    inside = (rows < end)[:, None] & (cols < N)[None, :]
    return s_tile, w_tile, cols, rows.to(tl.int64)[:, None] * N + cols[None, :], inside


@triton.jit
def experts_add_kernel(
    y, s, w, blocks, N, r, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """y += s w_g for every row of every group g, rounded once. Grid (blocks of rows, blocks of columns).

    Args:
        y: [S, N]; changed.
        s: [S, r].
        w: [G, r, N].
        blocks: int32 [., 3].
        BM, BN, BR: rows and columns of a block, and r and what is missing to a power of two.
    """
    at = blocks + 3 * tl.program_id(0)
    group, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if first < end:
        s_tile, w_tile, _, at_tile, inside = _low_rank_tiles(s, w, group, first, end, N, r, BM, BN, BR)
        y_tile = tl.load(y + at_tile, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + at_tile, tl.dot(s_tile, w_tile, y_tile).to(y.dtype.element_ty), mask=inside)


@triton.jit
def experts_add_scaled_kernel(
    y, base, s, w, more, z, blocks, N, r, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """y += more_g base + (1 + more_g) s w_g for every row of every group g, rounded once, and z = base + s w_g where it is to
    KEEP. Grid (blocks of rows, blocks of columns).

    Args:
        y: [S, N]; changed.
        base: [S, N]; may be y.
        s, w, blocks, BM, BN, BR: as in experts_add_kernel.
        more: float32 [G, N].
        z: [S, N]; written.
    """
    at = blocks + 3 * tl.program_id(0)
    group, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if first < end:
        s_tile, w_tile, cols, at_tile, inside = _low_rank_tiles(s, w, group, first, end, N, r, BM, BN, BR)
        more_row = tl.load(more + group.to(tl.int64) * N + cols, mask=cols < N, other=0.0)[None, :]
        base_tile = tl.load(base + at_tile, mask=inside, other=0.0).to(tl.float32)
        y_tile = tl.load(y + at_tile, mask=inside, other=0.0).to(tl.float32)
        low = tl.dot(s_tile, w_tile)
        y_tile += more_row * base_tile + (1 + more_row) * low
        tl.store(y + at_tile, y_tile.to(y.dtype.element_ty), mask=inside)
        if KEEP:
            tl.store(z + at_tile, (base_tile + low).to(z.dtype.element_ty), mask=inside)


@triton.jit
def experts_sums_kernel(
    s, x, index, out, ends, x_stride, K, r, INDEXED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out_g = the sum over the rows of group g of s' x. Grid (groups, blocks of features).

    Args:
        s: [S, r].
        x, x_stride, index: as in experts_down_kernel.
        out: float32 [G, r, K]; written, zeros for a group without rows.
        ends: of the groups' rows, int32 [G].
        BM, BK, BR: rows and features of a block, and r and what is missing to a power of two.
    """
    group = tl.program_id(0)
    first, end = tl.load(ends + group - 1, mask=group > 0, other=0), tl.load(ends + group)
    ranks, cols = tl.arange(0, BR), tl.program_id(1) * BK + tl.arange(0, BK)
    acc = tl.zeros((BR, BK), tl.float32)
    for m in range(first, end, BM):
        rows = m + tl.arange(0, BM)
        inside = rows < end
        s_at = s + rows.to(tl.int64)[None, :] * r + ranks[:, None]
        s_tile = tl.load(s_at, mask=inside[None, :] & (ranks < r)[:, None], other=0.0)
        x_at = x + _rows(index, rows, inside, INDEXED)[:, None] * x_stride + cols[None, :]
        x_tile = tl.load(x_at, mask=inside[:, None] & (cols < K)[None, :], other=0.0)
        acc = tl.dot(s_tile, x_tile, acc)
    out_at = out + group.to(tl.int64) * r * K + ranks[:, None] * K + cols[None, :]
    tl.store(out_at, acc, mask=(ranks < r)[:, None] & (cols < K)[None, :])
