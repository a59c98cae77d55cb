"""The Triton kernels of triton_path.py: causal softmax attention inside packed samples, and its gradients.

A program takes one block of one head (queries in the forward and for dq, keys for dk and dv) and goes over the other side in
tiles of its own sample alone: rows beyond the sample's end are read as 0, so nothing of another sample, not even a NaN, comes
near. Scores are in base 2. The probabilities of the backward are made again from the scores' logarithmic sums. Each result has
one program that writes it, which adds in one order: the same operands give the same bits.

Shapes: T tokens, D features of a head, H heads of queries, h of keys, N blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-3.0e38)
"""Below every score, and finite: where a row sees nothing of a tile yet, scores of -inf less this are still -inf."""


@triton.jit
def _block(table, N, PART: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """First token of a program's part of its block, and the first and the end of its sample."""
    number = tl.program_id(1)
    table += PART * 3 * N + number // PARTS
    return tl.load(table) + (number % PARTS) * SIZE, tl.load(table + N), tl.load(table + 2 * N)


@triton.jit
def _tile(x, head, first, stride_h, stride_t, rows, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [len(rows), BLOCK_D] of a head; 0 outside. rows: from `first` on."""
    cols = tl.arange(0, BLOCK_D)
    at = x + head.to(tl.int64) * stride_h + first.to(tl.int64) * stride_t
    at += rows[:, None] * stride_t + cols[None, :]  # the same in each turn of a loop, if rows are
    if D == BLOCK_D:
        return tl.load(at, mask=inside[:, None], other=0.0)
    return tl.load(at, mask=inside[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def _put(x, tile, head, first, stride_h, stride_t, rows, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)
    at = x + head.to(tl.int64) * stride_h + first.to(tl.int64) * stride_t
    at += rows[:, None] * stride_t + cols[None, :]
    tl.store(at, tile.to(x.dtype.element_ty), mask=inside[:, None] & (cols < D)[None, :])


@triton.jit
def _scores(products, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Scores to be multiplied with a kernel's UNIT, and what their gradient is multiplied with because of the cap."""
    if CAP > 0:
        half = tl.exp2(products * (2 * SCALE / CAP * LOG2E))
        bent = 1 - 2 / (half + 1)  # tanh
        return bent, 1 - bent * bent
    return products, products


@triton.jit
def _seen(queries, keys, WINDOW: tl.constexpr):
    seen = queries >= keys
    if WINDOW > 0:
        seen &= queries - keys < WINDOW
    return seen


@triton.jit
def _whole(query, key, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    """Whether each of BM queries from `query` on sees each of BN keys from `key` on: then nothing has to be compared."""
    whole = query >= key + BN - 1
    if WINDOW > 0:
        whole &= query + BM - 1 - key < WINDOW
    return whole


@triton.jit(do_not_specialize=["N", "T"])
def attention_forward_kernel(
    q, k, v, y, sums, table, N, T, q_h, q_t, k_h, k_t, v_h, v_t, y_h, y_t, SCALE: tl.constexpr, CAP: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y = softmax(SCALE q k') v inside samples. Grid (H, PARTS N).

    Args:
        q: [H, T, D].
        k, v: [H / GROUP, T, D].
        y: [H, T, D]; written.
        sums: [H, T], logarithms in base 2 of the sums of exp(scores); written.
        table: [2, 3, N], of SampleBlocks.
        N, T: blocks, tokens.
        q_h, q_t and so on: elements from one head, or token, to the next.
        SCALE, CAP, WINDOW: see packed_attention; 0 for no cap or window.
        GROUP: heads of queries to one of keys.
        D, BLOCK_D: features, and what is missing to a power of two.
        PARTS: programs of a block.
        BM, BN: tokens of a program, and of a tile.
    """
    head = tl.program_id(0)
    begin, first, end = _block(table, N, 0, PARTS, BM)
    if begin >= end:
        return
    rows = tl.arange(0, BM)
    tile = tl.arange(0, BN)
    queries = begin - first + rows  # in the sample
    inside = begin + rows < end
    q_tile = _tile(q, head, begin, q_h, q_t, rows, inside, D, BLOCK_D)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(begin - first - WINDOW + 1, 0) // BN * BN
    high = tl.minimum(begin + BM, end) - first
    UNIT: tl.constexpr = (CAP if CAP > 0 else SCALE) * LOG2E
    most = tl.full([BM], LEAST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, BLOCK_D], tl.float32)
    for n in range(low, high, BN):
        keys = n + tile
        there = keys < high
        k_tile = _tile(k, head // GROUP, first + n, k_h, k_t, tile, there, D, BLOCK_D)
        scores, _ = _scores(tl.dot(q_tile, tl.trans(k_tile)), SCALE, CAP)
        if not _whole(begin - first, n, BM, BN, WINDOW):
            scores = tl.where(_seen(queries[:, None], keys[None, :], WINDOW), scores, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1) * UNIT)
        weights = tl.exp2(scores * UNIT - new[:, None])
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = _tile(v, head // GROUP, first + n, v_h, v_t, tile, there, D, BLOCK_D)
        out = tl.dot(weights.to(v_tile.dtype), v_tile, out * shrink[:, None])
        most = new
    _put(y, out / total[:, None], head, begin, y_h, y_t, rows, inside, D, BLOCK_D)
    tl.store(sums + head.to(tl.int64) * T + begin + rows, most + tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=["N", "T"])
def attention_queries_kernel(
    q, k, v, y, dy, sums, products, dq, table, N, T, q_h, q_t, k_h, k_t, v_h, v_t, y_h, y_t, dy_h, dy_t, dq_h, dq_t,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq, and products = sum(y dy) by row, which the other kernel reads. Grid (H, PARTS N).

    Args:
        y, dy: [H, T, D].
        sums: of the forward.
        products: [H, T]; written.
        dq: [H, T, D]; written.
        others: as attention_forward_kernel.
    """
    head = tl.program_id(0)
    begin, first, end = _block(table, N, 0, PARTS, BM)
    if begin >= end:
        return
    rows = tl.arange(0, BM)
    tile = tl.arange(0, BN)
    queries = begin - first + rows
    inside = begin + rows < end
    q_tile = _tile(q, head, begin, q_h, q_t, rows, inside, D, BLOCK_D)
    dy_tile = _tile(dy, head, begin, dy_h, dy_t, rows, inside, D, BLOCK_D)
    y_tile = _tile(y, head, begin, y_h, y_t, rows, inside, D, BLOCK_D)
    mean = tl.sum(y_tile.to(tl.float32) * dy_tile.to(tl.float32), 1)
    at = head.to(tl.int64) * T + begin + rows
    tl.store(products + at, mean, mask=inside)
    sum_tile = tl.load(sums + at, mask=inside, other=0.0)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(begin - first - WINDOW + 1, 0) // BN * BN
    high = tl.minimum(begin + BM, end) - first
    UNIT: tl.constexpr = (CAP if CAP > 0 else SCALE) * LOG2E
    d_tile = tl.zeros([BM, BLOCK_D], tl.float32)
    for n in range(low, high, BN):
        keys = n + tile
        there = keys < high
        # from the sample's first token on, and all tiles compared: 128 registers, two programs at a time
        k_tile = _tile(k, head // GROUP, first, k_h, k_t, keys, there, D, BLOCK_D)
        v_tile = _tile(v, head // GROUP, first, v_h, v_t, keys, there, D, BLOCK_D)
        scores, slope = _scores(tl.dot(q_tile, tl.trans(k_tile)), SCALE, CAP)
        weights = tl.exp2(scores * UNIT - sum_tile[:, None])
        weights = tl.where(_seen(queries[:, None], keys[None, :], WINDOW), weights, 0.0)
        d_scores = weights * (tl.dot(dy_tile, tl.trans(v_tile)) - mean[:, None])
        if CAP > 0:
            d_scores *= slope
        d_tile = tl.dot(d_scores.to(k_tile.dtype), k_tile, d_tile)
    _put(dq, d_tile * SCALE, head, begin, dq_h, dq_t, rows, inside, D, BLOCK_D)


@triton.jit(do_not_specialize=["N", "T"])
def attention_keys_kernel(
    q, k, v, dy, sums, products, dk, dv, table, N, T, q_h, q_t, k_h, k_t, v_h, v_t, dy_h, dy_t, dk_h, dk_t, dv_h, dv_t,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv, summed over the heads of queries that share them. Grid (h, PARTS N).

    Args:
        dy: [H, T, D].
        sums, products: of the other kernels.
        dk, dv: [h, T, D]; written.
        BN, BM: tokens of a program, and of a tile.
        others: as attention_forward_kernel.
    """
    own = tl.program_id(0)
    begin, _, end = _block(table, N, 1, PARTS, BN)
    if begin >= end:
        return
    rows = tl.arange(0, BN)
    tile = tl.arange(0, BM)
    inside = begin + rows < end
    k_tile = _tile(k, own, begin, k_h, k_t, rows, inside, D, BLOCK_D)
    v_tile = _tile(v, own, begin, v_h, v_t, rows, inside, D, BLOCK_D)
    high = end - begin
    if WINDOW > 0:
        high = tl.minimum(high, BN + WINDOW - 1)
    UNIT: tl.constexpr = (CAP if CAP > 0 else SCALE) * LOG2E
    dk_tile = tl.zeros([BN, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BN, BLOCK_D], tl.float32)
    head, m = own * GROUP, 0
    for _ in range(GROUP * tl.cdiv(high, BM)):  # one loop over heads and tiles: the next loads are always on their way
        queries = m + tile  # from `begin` on, as the keys' rows
        there = queries < end - begin
        q_tile = _tile(q, head, begin + m, q_h, q_t, tile, there, D, BLOCK_D)
        dy_tile = _tile(dy, head, begin + m, dy_h, dy_t, tile, there, D, BLOCK_D)
        at = head.to(tl.int64) * T + begin + m
        sum_tile = tl.load(sums + at + tile, mask=there, other=0.0)
        mean = tl.load(products + at + tile, mask=there, other=0.0)
        scores, slope = _scores(tl.dot(k_tile, tl.trans(q_tile)), SCALE, CAP)
        d_weights = tl.dot(v_tile, tl.trans(dy_tile))  # here, so that the weights are made beside it
        weights = tl.exp2(scores * UNIT - sum_tile[None, :])
        weights = tl.where(_seen(queries[None, :], rows[:, None], WINDOW), weights, 0.0)
        dv_tile = tl.dot(weights.to(dy_tile.dtype), dy_tile, dv_tile)
        d_scores = weights * (d_weights - mean[None, :])
        if CAP > 0:
            d_scores *= slope
        dk_tile = tl.dot(d_scores.to(q_tile.dtype), q_tile, dk_tile)
        m += BM
        head += (m >= high).to(tl.int32)  # behind an `if` the loads would not be pipelined
        m = tl.where(m >= high, 0, m)
    _put(dk, dk_tile * SCALE, own, begin, dk_h, dk_t, rows, inside, D, BLOCK_D)
    _put(dv, dv_tile, own, begin, dv_h, dv_t, rows, inside, D, BLOCK_D)
