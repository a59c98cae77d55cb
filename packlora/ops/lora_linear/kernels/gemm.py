"""One GEMM kernel for a base product with the low-rank products in it: forward y = x W' + S B' + bias, backward
dx = d W + mask (dS A). Persistent, with the copy engine of Hopper (tensor descriptors); 16-bit operands.

The low-rank product of a tile is made first and is where the accumulator starts, so it costs no write and no read of the
output, and nothing is rounded before the base product is there. There is one accumulator: a second one of 128 x 256 would not
fit the registers, and spilling serialises the products (measured: 8 times slower).

Where X and V are codes of FP8 with scales by row and by column, the base product is made first and scaled, and the low-rank
product is added to it: tensor cores of Hopper add products of FP8 with some 14 bits, in which what is small would be lost.

Where one adapter owns all tokens, its operands are given as they are. Else a tile goes through the segments that it meets, one
after the other, with the rows of the others as zeros. An adapter that is not finite must not reach those, as 0 times infinity
would: of R, what is not finite becomes 0, and the segment's own rows of L become NaN.

Shapes: T tokens, K inputs, N outputs. Here X [T, P] is x or d, V is W, and Y [T, Q] is y or dx.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from packlora.ops import launcher
from packlora.ops.dropout import kernel as dropping
from packlora.ops.dropout.kernel import _drop, _keys
from packlora.ops.launcher import Descriptor
from packlora.ops.lora_linear.call import Call, Operands
from packlora.ops.lora_linear.kernels import sizes


@triton.jit
def _place_of_tile(tile, num_m, num_n, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles are walked through column by column, so that what they read is near."""
    group = tile // (GROUP * num_n)
    size = min(num_m - group * GROUP, GROUP)
    return group * GROUP + (tile % (GROUP * num_n)) % size, (tile % (GROUP * num_n)) // size


@triton.jit
def _low_rank_of_segments(
    acc, L, R, segments, places, first, last, rows, cols, Q, width, FORWARD: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """acc plus the low-rank products of the tile's segments, and the rows' rates of dropout, as thresholds."""
    thresholds = tl.zeros((BM,), dtype=tl.int32)
    fits = cols < Q
    for number in range(first, last):
        segment = segments + 4 * number
        adapter, start, stop, threshold = (
            tl.load(segment),
            tl.load(segment + 1),
            tl.load(segment + 2),
            tl.load(segment + 3),
        )
        own = (rows >= start) & (rows < stop)
        thresholds = tl.where(own, threshold, thresholds)
        known = adapter >= 0
        if FORWARD:
            place = places + 4 * adapter
            column = tl.multiple_of(tl.load(place, mask=known, other=0), 16)
            offset = tl.multiple_of(tl.load(place + 1, mask=known, other=0), 16)
            rank = tl.multiple_of(tl.load(place + 2, mask=known, other=0), 16)
        else:
            place = places + 2 * adapter
            column = 0
            offset = tl.load(place, mask=known, other=0).to(tl.int64) * Q
            rank = tl.multiple_of(tl.load(place + 1, mask=known, other=0), 16)
        for r in tl.range(0, rank, BR, num_stages=1):
            ranks = r + tl.arange(0, BR)
            has = ranks < rank
            L_at = L + rows.to(tl.int64)[:, None] * width + (column + ranks)[None, :]
            L_tile = tl.load(L_at, mask=own[:, None] & has[None, :], other=0.0)
            if FORWARD:
                R_at = R + offset + cols[None, :] * rank + ranks[:, None]
            else:
                R_at = R + offset + ranks[:, None] * Q + cols[None, :]
            R_tile = tl.load(R_at, mask=has[:, None] & fits[None, :], other=0.0)
            finite = R_tile * 0.0 == 0.0
            worst = tl.min(tl.min(finite.to(tl.int32), 1), 0)
            L_tile = tl.where(own[:, None] & (worst == 0), float("nan"), L_tile)
            acc = tl.dot(L_tile, tl.where(finite, R_tile, tl.zeros_like(R_tile)), acc)
    return acc, thresholds


@triton.jit
def _low_rank_of_one(
    acc, L, R, rows, cols, inside, first_row, first_column, Q, width, rank, WIDE: tl.constexpr, FORWARD: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """acc plus the low-rank product of the one adapter that owns all tokens."""
    for r in range(0, rank, BR):
        if WIDE:
            if FORWARD:
                acc = tl.dot(L.load([first_row, r]), R.load([first_column, r]).T, acc)
            else:
                acc = tl.dot(L.load([first_row, r]), R.load([r, first_column]), acc)
        else:
            ranks = r + tl.arange(0, BR)
            has = ranks < rank
            L_at = L + rows.to(tl.int64)[:, None] * width + ranks[None, :]
            L_tile = tl.load(L_at, mask=inside[:, None] & has[None, :], other=0.0)
            if FORWARD:
                R_at = R + cols[None, :] * rank + ranks[:, None]
            else:
                R_at = R + ranks[:, None] * Q + cols[None, :]
            R_tile = tl.load(R_at, mask=has[:, None] & (cols < Q)[None, :], other=0.0)
            acc = tl.dot(L_tile, R_tile, acc)
    return acc


@triton.jit
def _compose_segments(
    acc, g, bias, segments, first, last, rows, cols, Q, base_row, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """g acc + bias, by the adapter that owns a row."""
    fits = cols < Q
    for number in range(first, last):
        segment = segments + 4 * number
        adapter, start, stop = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
        at = tl.where(adapter >= 0, adapter, base_row).to(tl.int64) * Q + cols
        value = acc * tl.load(g + at, mask=fits, other=0.0)[None, :]
        if HAS_BIAS:
            value += tl.load(bias + at, mask=fits, other=0.0).to(tl.float32)[None, :]
        acc = tl.where(((rows >= start) & (rows < stop))[:, None], value, acc)
    return acc


@triton.jit
def _base(acc, X, V, m, n, steps, BY_OUTPUTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """acc plus the base product of a tile. BY_OUTPUTS: V is [Q, P], else [P, Q]."""
    for k in range(steps):
        X_tile = X.load([m * BM, k * BK])
        if BY_OUTPUTS:
            acc = tl.dot(X_tile, V.load([n * BN, k * BK]).T, acc)
        else:
            acc = tl.dot(X_tile, V.load([k * BK, n * BN]), acc)
    return acc


@triton.jit(do_not_specialize=["salt", "threshold", "T"])
def fused_kernel(
    X, V, Y, Z, L, R, bias, g, keys, segments, spans, places, x_scales, v_scales, salt, threshold, T, P, Q, width, rank,
    FORWARD: tl.constexpr, SCALED: tl.constexpr, DROP: tl.constexpr, ASM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_G: tl.constexpr, KEEP: tl.constexpr, WIDE: tl.constexpr, SEGMENTS: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Forward: L is S [T, width], R is B [Q, rank]. Backward: L is dS, R the stacked A [rank, Q]. WIDE: L and R are tensor
    descriptors of their first `rank` columns and rows. HAS_G: the product z is scaled before the bias; KEEP: z is stored.
    SCALED: X and V are codes with scales float32 [T] and [Q], and V is [Q, P] in the backward too.

    SEGMENTS: segments (tables.SegmentTables) have the low-rank products, of each tile those in spans [tiles, 2]. L is as
    before, R the layer's flat B or the A's of all adapters, places theirs of the layer or of the stacked A
    (tables.GroupTables); g and bias after g are float32 [rank + 1, Q], by adapter, the last row for tokens without one.

    PROGRAMS: a program takes every PROGRAMS-th tile; there may be fewer tiles."""
    num_m, num_n = tl.cdiv(T, BM), tl.cdiv(Q, BN)
    steps = tl.cdiv(P, BK)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=False):
        m, n = _place_of_tile(tile, num_m, num_n, GROUP)
        rows = m * BM + tl.arange(0, BM)
        cols = n * BN + tl.arange(0, BN)
        inside = rows < T
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if SCALED:
            base = _base(acc, X, V, m, n, steps, True, BM, BN, BK)
            base *= tl.load(x_scales + rows, mask=inside, other=0.0)[:, None]
            base *= tl.load(v_scales + cols, mask=cols < Q, other=0.0)[None, :]
            if not DROP:
                acc = base
        limit = threshold
        if SEGMENTS:
            first, last = tl.load(spans + 2 * m), tl.load(spans + 2 * m + 1)
            acc, thresholds = _low_rank_of_segments(
                acc, L, R, segments, places, first, last, rows, cols, Q, width, FORWARD, BM, BR
            )
            limit = thresholds[:, None]
            if not DROP and (HAS_G or not HAS_BIAS):
                acc = tl.where(inside[:, None], acc, 0.0)
        else:
            acc = _low_rank_of_one(
                acc, L, R, rows, cols, inside, m * BM, n * BN, Q, width, rank, WIDE, FORWARD, BR
            )  # fmt: skip
        if DROP:
            key_0, key_1 = _keys(keys, rows, inside, salt)
            acc = _drop(acc.to(DTYPE), key_0, key_1, n * BN, limit, BN, ASM).to(tl.float32)
            if SCALED:
                acc += base
        if HAS_BIAS and not HAS_G:
            acc += tl.load(bias + cols, mask=cols < Q, other=0.0).to(tl.float32)[None, :]
        if not SCALED:
            acc = _base(acc, X, V, m, n, steps, FORWARD, BM, BN, BK)
        if HAS_G:
            if KEEP:
                Z.store([m * BM, n * BN], acc.to(DTYPE))
            if SEGMENTS:
                acc = _compose_segments(acc, g, bias, segments, first, last, rows, cols, Q, rank, HAS_BIAS)
            else:
                acc *= tl.load(g + cols, mask=cols < Q, other=0.0)[None, :]
                if HAS_BIAS:
                    acc += tl.load(bias + cols, mask=cols < Q, other=0.0).to(tl.float32)[None, :]
        Y.store([m * BM, n * BN], acc.to(DTYPE))


# --- launches ------------------------------------------------------------------------------------------------------------


class _Product(NamedTuple):
    """Sizes of a fused product: X [T, P], Y [T, Q]; rank: that of the one adapter that owns all tokens or, where `several` do,
    the row of g of tokens without one; whether there is dropout."""

    forward: bool
    several: bool
    P: int
    Q: int
    rank: int
    dropped: bool = False


def _launch(call: Call, of: _Product, args: tuple[Any, ...], key: Hashable) -> None:
    """The launch of fused_kernel that could not be made again; args: with tensors in the place of descriptors."""
    segments, (X, V, Y, Z, L, R, bias, g, keys_T2, *_) = call.segment_tables, args
    assert segments is not None
    T, P, Q = call.T, of.P, of.Q
    scaled, drops = X.element_size() == 1, keys_T2 is not None and of.dropped
    BM, BK = sizes.FUSED_M, sizes.FUSED_BYTES // X.element_size()
    BN, warps, stages = sizes.tile_of(T, Q, sizes.programs_at_once(call.device), scaled and drops)
    BR = 32 if of.several else sizes.block_of(of.rank, 64)
    wide = BR > 16 and not of.several
    if wide:
        L = Descriptor(L, [BM, BR], [T, of.rank], [L.stride(0), 1])
        R = (
            Descriptor(R, [BN, BR], [Q, of.rank], [of.rank, 1])
            if of.forward
            else Descriptor(R, [BR, BN], [of.rank, Q], [Q, 1])
        )
    described = (
        Descriptor(X, [BM, BK], [T, P], [P, 1]), Descriptor(V, [BN, BK] if of.forward or scaled else [BK, BN]),
        Descriptor(Y, [BM, BN], [T, Q], [Q, 1]), None if Z is None else Descriptor(Z, [BM, BN], [T, Q], [Q, 1]), L, R,
    )  # fmt: skip
    programs = sizes.programs_at_once(call.device)
    grid = min(programs, sizes.cdiv(T, BM) * sizes.cdiv(Q, BN))
    launcher.launch(
        fused_kernel, (grid,), (*described, *args[6:]), segments.launches, key,
        FORWARD=of.forward, SCALED=scaled, DROP=drops, ASM=dropping.packed_dropout(Y), HAS_BIAS=bias is not None,
        HAS_G=g is not None, KEEP=Z is not None, WIDE=wide,
        SEGMENTS=of.several, DTYPE=getattr(tl, str(Y.dtype).removeprefix("torch.")),
        BM=BM, BN=BN, BK=BK, BR=BR, GROUP=8, PROGRAMS=programs, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def up(
    call: Call, own: Operands, x_TK: torch.Tensor, S: torch.Tensor, index: int, composed: bool, keep_z: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """y [..., N] = x W' + S B' + bias of one layer, or g z + bias where `composed`, and z where it is to be kept."""
    layout, tables, segments, single = call.layout, call.tables, call.segment_tables, call.single_adapter
    factors, N, several = own.frozen[index].factors(x_TK), layout.sizes[index], single is None
    assert tables is not None and segments is not None
    y = torch.empty(*call.lead, N, dtype=call.dtype, device=call.device)
    z = torch.empty_like(y) if keep_z else None
    g, bias, rank, R = None, own.biases[index], 0, own.B[index]
    if composed:
        scales = own.scales[index]
        g, bias, rank = scales.g, scales.bias, scales.adapters
    if single is not None:
        place = layout.places[single.adapter, index]
        rank, S = place.padded, S[:, place.column :] if place.column else S
        R = R if R is None or R.ndim == 2 else own.block(layout, single.adapter, index)[0]
        if composed:
            g, bias = scales.g_rows[single.adapter], scales.bias_rows[single.adapter]
    args = (
        factors.x, factors.weight, y, z, S, R, bias, g, None, segments.uncut if several else None,
        segments.spans if several else None, tables.places[index] if several else None, *factors[2:], call.word, 0, call.T,
        call.K, N, layout.width, rank,
    )  # fmt: skip
    key = (
        "fused up", call.shape, index, several, factors.x.dtype, None if bias is None else bias.dtype, g is None, z is None
    )  # fmt: skip
    if not launcher.launched(segments.launches, key, args):
        _launch(call, _Product(True, several, call.K, N, rank), args, key)
    return y, z


def dx(
    call: Call, own: Operands, e: torch.Tensor, dS: torch.Tensor, index: int, keys_T2: torch.Tensor | None
) -> torch.Tensor:
    """e W + drop(dS A) of one layer, as x [..., K]. e: contiguous [..., N]."""
    layout, tables, segments, single = call.layout, call.tables, call.segment_tables, call.single_adapter
    factors, N, several = own.frozen[index].factors_t(e), layout.sizes[index], single is None
    assert tables is not None and segments is not None
    dx = torch.empty(*call.lead, call.K, dtype=call.dtype, device=call.device)
    R, rank = own.A_RK, 0
    if single is not None:
        R, rank = own.A(layout, single.adapter)[0], layout.rows[single.adapter][1]
    args = (
        factors.x, factors.weight, dx, None, dS, R, None, None, keys_T2, segments.uncut if several else None,
        segments.spans if several else None, tables.rows if several else None, *factors[2:], call.word, call.threshold, call.T,
        N, call.K, layout.width, rank,
    )  # fmt: skip
    key = ("fused dx", call.shape, N, several, factors.x.dtype, keys_T2 is None)
    if not launcher.launched(segments.launches, key, args):
        _launch(call, _Product(False, several, N, call.K, rank, segments.dropout), args, key)
    return dx
