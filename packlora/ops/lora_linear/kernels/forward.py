"""Triton kernels of the forward of a group of layers with low-rank adapters, around the base product, and their
launches. layout.py says where things lie; backward_outputs.py and backward_inputs.py have those of the backward.

    down     S = s c (drop(x) A')                     x is read once for all adapters and layers; the mask stays in registers
    up       y0 = S B' + bias                         y0 is what the base product x W' then accumulates onto
             y = g (x W' + S B') + bias               or: the base product is there, one pass over it
    compose  y = g z + bias                           segment: the same for one segment, and its variants under dropout

drop() puts dropped elements to 0 and does not scale; the scaling s and the survivors' factor c = 1 / (1 - p) are in S and dS,
multiplied in while they are float32, and nowhere else.

Each block of tokens belongs to one adapter (blocks never cross from one segment into another), so what one adapter's tokens
hold, be it NaN, reaches no other adapter, and rows past the end of a segment are masked, not padded. Where one segment has all
tokens (SINGLE), blocks, places and ranks come as arguments: a table would have to be read before anything else can start.

Shapes: T tokens, K inputs, N outputs, r padded rank of one layer, R padded rank over the layers of the group.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from packlora.ops import launcher
from packlora.ops.dropout import kernel as dropping
from packlora.ops.dropout.kernel import _drop, _keys
from packlora.ops.lora_linear.call import Call, Dropped, Launches, Operands, Scales
from packlora.ops.lora_linear.kernels import sizes
from packlora.ops.lora_linear.kernels.common import _add_dot, _block_of, _rows_of


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


@triton.jit(do_not_specialize=["salt", "T", "single_threshold"])
def down_kernel(
    x, A, S, scales, keys, tiles, adapters, salt, K, x_stride, width, T, single_threshold, single_first, single_rank,
    SINGLE: tl.constexpr, DROP: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """Grid (token blocks of BM, column blocks of BR)."""
    column = tl.program_id(1) * BR
    adapter, start, stop, threshold = _block_of(tiles, tl.program_id(0), BM, T, single_threshold, SINGLE)
    if adapter >= 0:
        first, rank = _rows_of(adapters, adapter, single_first, single_rank, SINGLE)
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


@triton.jit(do_not_specialize=["base_row"])
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


@triton.jit(do_not_specialize=["base_row"])
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
def _tile_of_rows(T, N, BM: tl.constexpr, BN: tl.constexpr):
    """Tile of a program in a grid (blocks of N, T): its columns, the mask of the columns inside N, the element offsets of its
    tile of [T, N], and the mask of the offsets inside the tensor."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = cols < N
    return cols, fits, rows.to(tl.int64)[:, None] * N + cols[None, :], (rows < T)[:, None] & fits[None, :]


@triton.jit(do_not_specialize=["T"])
def rows_kernel(
    z, y, g, bias, T, N, minus, HAS_G: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """y = (g - minus) z + bias over rows [T, N] of one segment; g, bias float32 [N]. Grid (blocks of N, T)."""
    cols, fits, at, here = _tile_of_rows(T, N, BM, BN)
    value = tl.load(z + at, mask=here, other=0.0).to(tl.float32)
    if HAS_G:
        value *= (tl.load(g + cols, mask=fits, other=0.0) - minus)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + cols, mask=fits, other=0.0)[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["T"])
def dropped_kernel(
    base, low, y, g, bias, T, N, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """y += (g - 1) base + g low + bias and low += base, over rows as rows_kernel has them."""
    cols, fits, at, here = _tile_of_rows(T, N, BM, BN)
    g_row = tl.load(g + cols, mask=fits, other=0.0)[None, :]
    base_tile = tl.load(base + at, mask=here, other=0.0).to(tl.float32)
    low_tile = tl.load(low + at, mask=here, other=0.0).to(tl.float32)
    value = tl.load(y + at, mask=here, other=0.0).to(tl.float32) + ((g_row - 1) * base_tile + g_row * low_tile)
    if HAS_BIAS:
        value += tl.load(bias + cols, mask=fits, other=0.0)[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=here)
    tl.store(low + at, (base_tile + low_tile).to(low.dtype.element_ty), mask=here)


# --- launches ------------------------------------------------------------------------------------------------------------


def down(call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, dropped: Dropped) -> torch.Tensor:
    """S [T, width]; rows of tokens without an adapter and columns past an adapter's rank are not written."""
    width, T, K, stride = call.layout.width, call.T, call.K, x_TK.stride(0)
    segments, tables, single = call.segment_tables, call.tables, call.single_adapter
    assert segments is not None and tables is not None
    size = segments.config
    S = torch.empty(T, width, dtype=call.dtype, device=call.device)
    BM, BK, BR = size.down_m, size.down_k, sizes.block_of(width, size.down_r)
    if segments.counts[BM] < sizes.programs_at_once(call.device):
        BM = size.few_down_m
        BK = size.few_down_k if BR <= 32 else BK  # cards of any generation have 99 KiB
    args = (
        x_TK, own.A_RK, S, tables.row_scales, keys_T2, segments.blocks[BM], tables.rows, call.word, K, stride, width, T,
        *sizes.rows_of(call),
    )  # fmt: skip
    key = ("down", call.shape, stride, keys_T2 is None)
    if not launcher.launched(segments.launches, key, args):
        launcher.launch(
            down_kernel, (segments.counts[BM], sizes.cdiv(width, BR)), args, segments.launches, key,
            SINGLE=single is not None, DROP=segments.dropout, ASM=dropping.packed_dropout(x_TK), PRECISION="ieee", BM=BM, BK=BK,
            BR=BR, num_warps=size.down_warps, num_stages=size.down_stages,
        )  # fmt: skip
    return S


def up(
    call: Call, own: Operands, S: torch.Tensor, index: int, base_TN: torch.Tensor | None = None, composed: bool = False,
    keep_z: bool = False, dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """S B' of one layer, [T, N], onto which the base product is to be accumulated. With the base product, which is written
    over: y, and z where it is to be kept. composed: y = g z + bias with the scales of the layer, else y = z + bias. dtype: of
    S B'; None: that of the call."""
    layout, segments, tables = call.layout, call.segment_tables, call.tables
    assert segments is not None and tables is not None
    size = segments.config
    N, tiles, epilogue = layout.sizes[index], segments.counts[size.up_m], base_TN is not None
    span = size.up_n * size.up_loop
    if sizes.cdiv(N, span) * tiles < sizes.programs_at_once(call.device):
        span = size.up_n
    scales = own.scales[index] if composed else None
    bias = None if base_TN is None else own.biases[index] if scales is None else scales.bias
    y_TN = base_TN if base_TN is not None and not keep_z else None
    y_TN = torch.empty(call.T, N, dtype=dtype or call.dtype, device=call.device) if y_TN is None else y_TN
    z_TN = y_TN if base_TN is None else base_TN
    args = (
        S, own.B[index], bias, None if scales is None else scales.g, z_TN, y_TN, segments.blocks[size.up_m],
        tables.places[index], tables.adapters, N, layout.width, span,
    )  # fmt: skip
    key = ("up", call.shape, index, sizes.dtype_of(bias), scales is None, epilogue, keep_z, y_TN.dtype)
    if not launcher.launched(segments.launches, key, args):
        launcher.launch(
            up_kernel, (sizes.cdiv(N, span), tiles), args, segments.launches, key,
            HAS_BIAS=bias is not None, EPILOGUE=epilogue, COMPOSED=scales is not None, KEEP=keep_z, PRECISION="ieee",
            BM=size.up_m, BN=size.up_n, BR=sizes.block_of(layout.max_padded[index], 64), num_warps=size.up_warps,
            num_stages=size.up_stages,
        )  # fmt: skip
    return y_TN, z_TN if keep_z else None


def compose(call: Call, scales: Scales, z_TN: torch.Tensor, y_TN: torch.Tensor) -> None:
    """y = g z + bias, [T, N]; y may be z."""
    N, segments = z_TN.shape[1], call.segment_tables
    assert segments is not None
    size = segments.config
    launcher.launch(
        compose_kernel, (sizes.cdiv(N, 256), segments.counts[size.up_m]),
        (z_TN, y_TN, scales.g, scales.bias, segments.blocks[size.up_m], scales.adapters, N),
        launches=segments.launches, key=("compose", call.dtype, N, scales.bias is None),
        HAS_BIAS=scales.bias is not None, BM=16, BN=256, num_warps=4, num_stages=2,
    )  # fmt: skip


def scale_rows(
    launches: Launches, z_tN: torch.Tensor, y_tN: torch.Tensor, g_N: torch.Tensor | None, bias_N: torch.Tensor | None,
    minus: int,
) -> None:  # fmt: skip
    """See call.ScaleRows."""
    T, N = z_tN.shape
    args = (z_tN, y_tN, g_N, bias_N, T, N, minus)
    key = ("rows", z_tN.dtype, T, N, minus, g_N is None, bias_N is None)
    if not launcher.launched(launches, key, args):
        launcher.launch(
            rows_kernel, (sizes.cdiv(N, 256), sizes.cdiv(T, 16)), args, launches, key,
            HAS_G=g_N is not None, HAS_BIAS=bias_N is not None, BM=16, BN=256, num_warps=4, num_stages=1,
        )  # fmt: skip


def add_dropped(
    launches: Launches, base_tN: torch.Tensor, low_tN: torch.Tensor, y_tN: torch.Tensor, g_N: torch.Tensor,
    bias_N: torch.Tensor | None,
) -> None:  # fmt: skip
    """See call.AddDropped."""
    T, N = y_tN.shape
    args = (base_tN, low_tN, y_tN, g_N, bias_N, T, N)
    key = ("dropped", y_tN.dtype, T, N, bias_N is None)
    if not launcher.launched(launches, key, args):
        launcher.launch(
            dropped_kernel, (sizes.cdiv(N, 256), sizes.cdiv(T, 16)), args, launches, key,
            HAS_BIAS=bias_N is not None, BM=16, BN=256, num_warps=4, num_stages=1,
        )  # fmt: skip


def ratio(
    magnitude_N: torch.Tensor, norm_N: torch.Tensor, g_N: torch.Tensor, w_N: torch.Tensor, launches: dict[Hashable, Any]
) -> None:  # fmt: skip
    """g = magnitude / norm and w = norm. launches: cached launches with this N."""
    args = (magnitude_N, norm_N, g_N, w_N, g_N.shape[0])
    key = (magnitude_N.dtype, norm_N.dtype, g_N.data_ptr() % 16)
    if not launcher.launched(launches, key, args):
        launcher.launch(
            ratio_kernel, (sizes.cdiv(g_N.shape[0], 512),), args, launches, key, BN=512, num_warps=4, num_stages=1
        )
