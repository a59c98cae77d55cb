"""Triton kernels of the forward of a group of layers with low-rank adapters, around the base product, and what all kernels
share. layout.py says where things lie; gradient_kernels.py has those of the backward.

    down     S = s c (drop(x) A')                     x is read once for all adapters and layers; the mask stays in registers
    up       y0 = S B' + bias                         y0 is what the base product x W' then accumulates onto
             y = g (x W' + S B') + bias               or: the base product is there, one pass over it
    compose  y = g z + bias                           run: the same for one run, and its variants under dropout

drop() puts dropped elements to 0 and does not scale; the scaling s and the survivors' factor c = 1 / (1 - p) are in S and dS,
multiplied in while they are float32, and nowhere else.

Each block of tokens belongs to one adapter (blocks never cross from one run into another), so what one adapter's tokens hold,
be it NaN, reaches no other adapter, and rows past the end of a run are masked, not padded. Where one run has all tokens
(ALONE), blocks, places and ranks come as arguments: a table would have to be read before anything else can start.

What is read from a table says nothing of its alignment, and without that every element is loaded by itself: so it is said where
it is loaded. All places and ranks in layout.GroupTables are multiples of 16.

Shapes: T tokens, K inputs, N outputs, r padded rank of one layer, R padded rank over the layers of the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from packlora.ops.dropout import MIX_1, MIX_2, STRIDE

_STRIDE = tl.constexpr(STRIDE)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


# One hash serves two neighbouring features, 16 bits each. $in: the pair's counter times STRIDE plus the token's first key,
# the second key, the rate's limit less one in both halves, and all ones where nothing is dropped.
_HASH = """
{{
.reg .b32 v, t;
shr.u32 t, {v}, 16;
xor.b32 v, {v}, t;
mul.lo.u32 v, v, 0x{MIX_1:x};
xor.b32 v, v, {key};
shr.u32 t, v, 15;
xor.b32 v, v, t;
mul.lo.u32 v, v, 0x{MIX_2:x};
shr.u32 t, v, 15;
xor.b32 v, v, t;
xor.b32 v, v, 0x80008000;
max.u16x2 v, v, {limit};
sub.u32 v, v, {limit};
mov.b32 t, 0x00010001;
min.u16x2 v, v, t;
mul.lo.u32 v, v, 0xffff;
or.b32 v, v, {all};
{use}
}}
"""
_ONE = tl.constexpr(
    _HASH.format(v="$2", key="$4", limit="$6", all="$8", use="and.b32 $0, $1, v;", MIX_1=MIX_1, MIX_2=MIX_2)
)
_TWO = tl.constexpr(
    _HASH.format(
        v="$4", key="$6", limit="$8", all="$10", use="and.b32 $0, $2, v;\nand.b32 $1, $3, v;", MIX_1=MIX_1, MIX_2=MIX_2
    )
)


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
def _keys(keys, rows, inside, salt):
    """Both key words of tokens, the first with the salt in it."""
    pairs = tl.load(keys + 2 * rows[:, None] + tl.arange(0, 2)[None, :], mask=inside[:, None], other=0)
    key_0, key_1 = tl.split(pairs.to(tl.uint32, bitcast=True))
    return key_0 ^ salt.to(tl.uint32), key_1


@triton.jit
def _kept(key_0, key_1, first_column, threshold, BK: tl.constexpr):
    """Which elements of a tile survive, bool [rows, BK]; ops/dropout.py is the specification."""
    pairs = (first_column // 2 + tl.arange(0, BK // 2)).to(tl.uint32)
    v = (pairs * _STRIDE)[None, :] + key_0[:, None]
    v ^= v >> 16
    v = (v * _MIX_1) ^ key_1[:, None]
    v ^= v >> 15
    v *= _MIX_2
    v ^= (v >> 15) ^ 0x80008000
    limit = threshold.to(tl.uint32) << 16
    return tl.interleave((v << 16) >= limit, v >= limit)


@triton.jit
def _limits(threshold):
    """The operands of _HASH that say the rate."""
    limit = tl.maximum(threshold, 1) - 1
    return limit * 0x10001, tl.where(threshold == 0, -1, 0)


@triton.jit
def _drop(x, key_0, key_1, first_column, threshold, BK: tl.constexpr, ASM: tl.constexpr):
    """x [rows, BK] with dropped elements 0, unscaled. ASM (16-bit x, sm_90): two elements at a time in packed registers."""
    if ASM:
        cols = first_column + tl.arange(0, BK)
        counter = (cols // 2).to(tl.uint32) * _STRIDE
        limit, every = _limits(threshold)
        return tl.inline_asm_elementwise(
            _ONE, "=r,r,r,r,r,r,r,r,r,r",
            [x, key_0[:, None] + counter[None, :], key_1[:, None], limit, every],
            dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.where(_kept(key_0, key_1, first_column, threshold, BK), x, tl.zeros_like(x))


@triton.jit
def _drop_two(x, y, key_0, key_1, first_column, threshold, BK: tl.constexpr, ASM: tl.constexpr):
    """_drop of two tensors with the same mask."""
    if ASM:
        cols = first_column + tl.arange(0, BK)
        counter = (cols // 2).to(tl.uint32) * _STRIDE
        limit, every = _limits(threshold)
        return tl.inline_asm_elementwise(
            _TWO, "=r,=r,r,r,r,r,r,r,r,r,r,r",
            [x, y, key_0[:, None] + counter[None, :], key_1[:, None], limit, every],
            dtype=(x.dtype, y.dtype), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        kept = _kept(key_0, key_1, first_column, threshold, BK)
        return tl.where(kept, x, tl.zeros_like(x)), tl.where(kept, y, tl.zeros_like(y))


@triton.jit(do_not_specialize=["salt"])
def masked_kernel(
    x,
    y,
    keys,
    salt,
    threshold,
    T,
    K,
    x_stride,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """y = drop(x), or scaled as torch's dropout scales it: the product is rounded to the dtype. Grid (blocks of K, of T)."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BK + tl.arange(0, BK)
    inside = rows < T
    mask = inside[:, None] & (cols < K)[None, :]
    x_tile = tl.load(x + rows.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    if SCALED:
        x_tile = (x_tile.to(tl.float32) * (65536.0 / (65536 - threshold))).to(y.dtype.element_ty)
    key_0, key_1 = _keys(keys, rows, inside, salt)
    x_tile = _drop(x_tile, key_0, key_1, tl.program_id(0) * BK, threshold, BK, ASM)
    tl.store(y + rows.to(tl.int64)[:, None] * K + cols[None, :], x_tile, mask=mask)


@triton.jit
def _block_of(blocks, index, size, T, threshold, ALONE: tl.constexpr):
    """Adapter (0 where ALONE), start, stop and dropout threshold of a block of tokens; see layout.RunTables."""
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
def _down(
    x, A, S, scales, keys, first, rank, column, start, stop, threshold, salt, K, x_stride, width,
    DROP: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    rows = start + tl.arange(0, BM)
    inside = rows < stop
    ranks = column + tl.arange(0, BR)
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    A_rows = A + (first + ranks).to(tl.int64)[:, None] * K
    acc = tl.zeros((BM, BR), dtype=tl.float32)
    lost = tl.zeros((BM, BR), dtype=tl.float32)
    if DROP:
        key_0, key_1 = _keys(keys, rows, inside, salt)
    for k in range(0, K, BK):
        cols = k + tl.arange(0, BK)
        x_tile = tl.load(x_rows + cols[None, :], mask=inside[:, None] & (cols < K)[None, :], other=0.0)
        A_tile = tl.load(A_rows + cols[None, :], mask=(ranks < rank)[:, None] & (cols < K)[None, :], other=0.0)
        if DROP:
            x_tile = _drop(x_tile, key_0, key_1, k, threshold, BK, ASM)
        acc, lost = _add_dot(x_tile, tl.trans(A_tile), acc, lost, PRECISION)
    factor = tl.load(scales + first + ranks, mask=ranks < rank, other=0.0)
    acc *= (factor * (65536.0 / (65536 - threshold)))[None, :]
    at = S + rows.to(tl.int64)[:, None] * width + ranks[None, :]
    tl.store(at, acc.to(S.dtype.element_ty), mask=inside[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["salt"])
def down_kernel(
    x, A, S, scales, keys, tiles, adapters, salt, K, x_stride, width, T, alone_threshold, alone_first, alone_rank,
    ALONE: tl.constexpr, DROP: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """Grid (token blocks of BM, column blocks of BR)."""
    column = tl.program_id(1) * BR
    adapter, start, stop, threshold = _block_of(tiles, tl.program_id(0), BM, T, alone_threshold, ALONE)
    if adapter >= 0:
        first, rank = _rows_of(adapters, adapter, alone_first, alone_rank, ALONE)
        left = rank - column
        if left > 0:
            if BR == 16 or left > BR // 2:
                _down(x, A, S, scales, keys, first, rank, column, start, stop, threshold, salt, K, x_stride, width,
                      DROP, ASM, PRECISION, BM, BK, BR)  # fmt: skip
            elif BR == 32 or left <= 16:
                _down(x, A, S, scales, keys, first, rank, column, start, stop, threshold, salt, K, x_stride, width,
                      DROP, ASM, PRECISION, BM, BK, 16)  # fmt: skip
            else:
                _down(x, A, S, scales, keys, first, rank, column, start, stop, threshold, salt, K, x_stride, width,
                      DROP, ASM, PRECISION, BM, BK, 32)  # fmt: skip


@triton.jit
def _up(
    S, B, bias, g, z, y, column, offset, rank, start, stop, row, N, width, first, last,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr, COMPOSED: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    rows = start + tl.arange(0, BM)
    inside = rows < stop
    ranks = tl.arange(0, BR)
    S_rows = S + rows.to(tl.int64)[:, None] * width + (column + ranks)[None, :]
    S_tile = tl.load(S_rows, mask=inside[:, None] & (ranks < rank)[None, :], other=0.0)
    y_rows = rows.to(tl.int64)[:, None] * N
    for n in range(first, last, BN):
        cols = n + tl.arange(0, BN)
        fits = cols < N
        here = inside[:, None] & fits[None, :]
        if EPILOGUE:
            base = tl.load(z + y_rows + cols[None, :], mask=here, other=0.0)
        B_at = B + offset + cols[:, None] * rank + ranks[None, :]
        B_tile = tl.load(B_at, mask=fits[:, None] & (ranks < rank)[None, :], other=0.0)
        acc = tl.dot(S_tile, tl.trans(B_tile), input_precision=PRECISION)
        lost = tl.zeros((BM, BN), dtype=tl.float32)
        for r in range(BR, rank, BR):
            more = r + ranks
            S_more = tl.load(S_rows + r, mask=inside[:, None] & (more < rank)[None, :], other=0.0)
            B_more = tl.load(B_at + r, mask=fits[:, None] & (more < rank)[None, :], other=0.0)
            acc, lost = _add_dot(S_more, tl.trans(B_more), acc, lost, PRECISION)
        if EPILOGUE:
            acc += base.to(tl.float32)
        if KEEP:
            tl.store(z + y_rows + cols[None, :], acc.to(z.dtype.element_ty), mask=here)
        if COMPOSED:
            acc *= tl.load(g + row.to(tl.int64) * N + cols, mask=fits, other=0.0)[None, :]
        if HAS_BIAS:
            acc += tl.load(bias + row.to(tl.int64) * N + cols, mask=fits, other=0.0).to(tl.float32)[None, :]
        tl.store(y + y_rows + cols[None, :], acc.to(y.dtype.element_ty), mask=here)


@triton.jit
def up_kernel(
    S, B, bias, g, z, y, tiles, places, base_row, N, width, span,
    HAS_BIAS: tl.constexpr, EPILOGUE: tl.constexpr, COMPOSED: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (spans of columns, token blocks of BM). Writes every row: 0, base or bias where no adapter is.

    EPILOGUE: z [T, N] holds the base product. COMPOSED: g and bias float32 [adapters + 1, N], the last row for tokens without
    an adapter; else bias [N]. KEEP: z is written, the product that g scales. y may be z where it is not kept.
    """
    tile = tiles + 4 * tl.program_id(1)
    adapter, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    column, offset, rank = 0, 0, 0
    if adapter >= 0:
        place = places + 4 * adapter
        column, offset = tl.multiple_of(tl.load(place), 16), tl.multiple_of(tl.load(place + 1), 16)
        rank = tl.multiple_of(tl.load(place + 2), 16)
    row = adapter * 0
    if COMPOSED:
        row = tl.where(adapter >= 0, adapter, base_row)
    first = tl.program_id(0) * span
    last = tl.minimum(N, first + span)
    if BR == 16 or rank > BR // 2:
        _up(S, B, bias, g, z, y, column, offset, rank, start, stop, row, N, width, first, last, HAS_BIAS, EPILOGUE, COMPOSED,
            KEEP, PRECISION, BM, BN, BR)  # fmt: skip
    elif BR == 32 or rank <= 16:
        _up(S, B, bias, g, z, y, column, offset, rank, start, stop, row, N, width, first, last, HAS_BIAS, EPILOGUE, COMPOSED,
            KEEP, PRECISION, BM, BN, 16)  # fmt: skip
    else:
        _up(S, B, bias, g, z, y, column, offset, rank, start, stop, row, N, width, first, last, HAS_BIAS, EPILOGUE, COMPOSED,
            KEEP, PRECISION, BM, BN, 32)  # fmt: skip


@triton.jit
def ratio_kernel(magnitude, norm, g, w, N, BN: tl.constexpr):
    """g = magnitude / norm and w = norm, float32 [N]. Grid (blocks of N)."""
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = cols < N
    own = tl.load(norm + cols, mask=fits, other=1.0).to(tl.float32)
    tl.store(w + cols, own, mask=fits)
    tl.store(g + cols, tl.div_rn(tl.load(magnitude + cols, mask=fits, other=0.0).to(tl.float32), own), mask=fits)


@triton.jit
def compose_kernel(z, y, g, bias, tiles, base_row, N, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """y = g z + bias; y may be z. g, bias: float32 [adapters + 1, N]. Grid (blocks of N, token blocks of 4 BM)."""
    tile = tiles + 4 * tl.program_id(1)
    adapter, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    row = tl.where(adapter >= 0, adapter, base_row).to(tl.int64)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = cols < N
    factor = tl.load(g + row * N + cols, mask=fits, other=0.0)[None, :]
    if HAS_BIAS:
        plus = tl.load(bias + row * N + cols, mask=fits, other=0.0)[None, :]
    for t in range(start, stop, BM):
        rows = t + tl.arange(0, BM)
        here = (rows < stop)[:, None] & fits[None, :]
        at = rows.to(tl.int64)[:, None] * N + cols[None, :]
        value = tl.load(z + at, mask=here, other=0.0).to(tl.float32) * factor
        if HAS_BIAS:
            value += plus
        tl.store(y + at, value.to(y.dtype.element_ty), mask=here)


@triton.jit
def run_kernel(
    z, y, g, bias, T, N, minus, ADD: tl.constexpr, HAS_G: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """y = (g - minus) z + bias, or y += that, over the rows [T, N] of one run; g, bias float32 [N]. Grid (blocks of N, T)."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = cols < N
    here = (rows < T)[:, None] & fits[None, :]
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    value = tl.load(z + at, mask=here, other=0.0).to(tl.float32)
    if HAS_G:
        value *= (tl.load(g + cols, mask=fits, other=0.0) - minus)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + cols, mask=fits, other=0.0)[None, :]
    if ADD:
        value += tl.load(y + at, mask=here, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=here)
