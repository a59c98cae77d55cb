"""Triton kernels of a forward of few tokens without gradients, as a decode pass has them, around the base products.

    few_down   P [splits, T, width], float32: s (x A') over a part of K each; S is their sum
    few_up     y = g (z + S B') + bias of up to three layers of a group, z [T, N] in float32 the base products

Few tokens make few programs, each of which is as slow as the chain of its loads. So K is cut into parts that run side by side,
and siblings are one launch. z is not rounded before the low-rank part is added to it. Names of arguments: common.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from packlora.ops import launcher
from packlora.ops.lora_linear.call import Call, Operands
from packlora.ops.lora_linear.kernels import sizes
from packlora.ops.lora_linear.kernels.config import shared_bytes

DOWN_K, MOST_SPLITS = 128, 8
"""Columns of x of a step of few_down, and most parts of K."""
UP_N = 128
MOST_R = 64
"""Most ranks of a step of either."""
LAYERS = 3
"""Layers of one launch of few_up."""


@triton.jit(do_not_specialize=["T"])
def few_down_kernel(
    x, A, P, scales, tiles, adapters, K, x_stride, width, T,
    STEPS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (token blocks of BM, column blocks of BR, parts of K of STEPS times BK)."""
    tile = tiles + 4 * tl.program_id(0)
    adapter, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if adapter < 0:
        return
    first = tl.multiple_of(tl.load(adapters + 2 * adapter), 16)
    rank = tl.multiple_of(tl.load(adapters + 2 * adapter + 1), 16)
    ranks = tl.program_id(1) * BR + tl.arange(0, BR)
    rows, owned = start + tl.arange(0, BM), ranks < rank
    inside = rows < stop
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    A_rows = A + (first + ranks).to(tl.int64)[:, None] * K
    acc = tl.zeros((BM, BR), dtype=tl.float32)
    for step in range(STEPS):
        cols = (tl.program_id(2) * STEPS + step) * BK + tl.arange(0, BK)
        x_tile = tl.load(x_rows + cols[None, :], mask=inside[:, None] & (cols < K)[None, :], other=0.0)
        A_tile = tl.load(A_rows + cols[None, :], mask=owned[:, None] & (cols < K)[None, :], other=0.0)
        acc = tl.dot(x_tile, tl.trans(A_tile), acc, input_precision="ieee")
    acc *= tl.load(scales + first + ranks, mask=owned, other=0.0)[None, :]
    at = (tl.program_id(2) * T + rows).to(tl.int64)[:, None] * width + ranks[None, :]
    tl.store(P + at, acc, mask=inside[:, None] & owned[None, :])


@triton.jit
def _few_up(
    P, B, g, bias, z, y, places, adapter, start, stop, base_row, block, N, T, width,
    HAS_BIAS: tl.constexpr, COMPOSED: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    rows, cols = start + tl.arange(0, BM), block * BN + tl.arange(0, BN)
    inside, fits = rows < stop, cols < N
    here, at = inside[:, None] & fits[None, :], rows.to(tl.int64)[:, None] * N + cols[None, :]
    acc = tl.load(z + at, mask=here, other=0.0)
    if adapter >= 0:
        place = places + 4 * adapter
        column, offset = tl.multiple_of(tl.load(place), 16), tl.multiple_of(tl.load(place + 1), 16)
        rank = tl.multiple_of(tl.load(place + 2), 16)
        for r in range(0, rank, BR):
            ranks = r + tl.arange(0, BR)
            S_at = P + rows.to(tl.int64)[:, None] * width + (column + ranks)[None, :]
            owned = inside[:, None] & (ranks < rank)[None, :]
            S = tl.load(S_at, mask=owned, other=0.0)
            for split in tl.static_range(1, SPLITS):
                S += tl.load(S_at + (split * T).to(tl.int64) * width, mask=owned, other=0.0)
            B_at = B + offset + cols[:, None] * rank + ranks[None, :]
            B_tile = tl.load(B_at, mask=fits[:, None] & (ranks < rank)[None, :], other=0.0)
            acc = tl.dot(S.to(B_tile.dtype), tl.trans(B_tile), acc, input_precision="ieee")
    row = adapter * 0
    if COMPOSED:
        row = tl.where(adapter >= 0, adapter, base_row)
        acc *= tl.load(g + row.to(tl.int64) * N + cols, mask=fits, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + row.to(tl.int64) * N + cols, mask=fits, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["base_row", "T"])
def few_up_kernel(
    P, B_0, B_1, B_2, g_0, g_1, g_2, bias_0, bias_1, bias_2, z_0, z_1, z_2, y_0, y_1, y_2, places_0, places_1, places_2,
    N_0, N_1, N_2, tiles, base_row, T, width,
    NUM: tl.constexpr, HAS_BIAS: tl.constexpr, COMPOSED: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of N of all layers, token blocks of BM). NUM: layers; what the others have is not looked at."""
    tile = tiles + 4 * tl.program_id(1)
    adapter, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if start >= stop:
        return
    block = tl.program_id(0)
    second = tl.cdiv(N_0, BN)
    third = second
    if NUM > 1:
        third += tl.cdiv(N_1, BN)
    if NUM == 1 or block < second:
        _few_up(P, B_0, g_0, bias_0, z_0, y_0, places_0, adapter, start, stop, base_row, block, N_0, T, width,
                HAS_BIAS, COMPOSED, SPLITS, BM, BN, BR)  # fmt: skip
    elif NUM == 2 or block < third:
        _few_up(P, B_1, g_1, bias_1, z_1, y_1, places_1, adapter, start, stop, base_row, block - second, N_1, T, width,
                HAS_BIAS, COMPOSED, SPLITS, BM, BN, BR)  # fmt: skip
    else:
        _few_up(P, B_2, g_2, bias_2, z_2, y_2, places_2, adapter, start, stop, base_row, block - third, N_2, T, width,
                HAS_BIAS, COMPOSED, SPLITS, BM, BN, BR)  # fmt: skip


# --- launches ------------------------------------------------------------------------------------------------------------


def down(call: Call, own: Operands, x_TK: torch.Tensor) -> torch.Tensor:
    """Parts of S [splits, T, width] in float32; rows and columns that no adapter owns are not written."""
    segments, tables, width, K = call.segment_tables, call.tables, call.layout.width, call.K
    assert segments is not None and tables is not None
    steps = sizes.cdiv(K, DOWN_K * MOST_SPLITS)
    splits, BM, BR = sizes.cdiv(K, DOWN_K * steps), segments.config.few_down_m, sizes.block_of(width // 4, MOST_R)
    P = torch.empty(splits, call.T, width, dtype=torch.float32, device=call.device)
    args = x_TK, own.A_RK, P, tables.row_scales, segments.blocks[BM], tables.rows, K, x_TK.stride(0), width, call.T
    key = ("few down", call.shape, x_TK.stride(0))
    if not launcher.launched(segments.launches, key, args):
        launcher.launch(
            few_down_kernel, (segments.counts[BM], sizes.cdiv(width, BR), splits), args, segments.launches, key,
            STEPS=steps, BM=BM, BK=DOWN_K, BR=BR, num_warps=2, num_stages=2,
        )  # fmt: skip
    return P


def up(
    call: Call, own: Operands, P: torch.Tensor, layers: Sequence[int], products: Sequence[torch.Tensor]
) -> list[torch.Tensor]:  # fmt: skip
    """y [T, N] of these layers, at most LAYERS, that all have scales or none, and all biases or none. products: z by layer."""
    segments, tables, layout, T = call.segment_tables, call.tables, call.layout, call.T
    assert segments is not None and tables is not None
    composed, N = layers[0] in call.composed, [layout.sizes[index] for index in layers]
    scales = [own.scales[index] if composed else None for index in layers]
    biases = [own.biases[i] if s is None else s.bias for i, s in zip(layers, scales, strict=True)]
    outputs = [torch.empty(T, n, dtype=call.dtype, device=call.device) for n in N]
    BM, BR = segments.config.few_down_m, sizes.block_of(max(layout.max_padded[index] for index in layers), MOST_R)
    step = len(P) * BM * BR * P.element_size() + UP_N * BR * call.dtype.itemsize
    stages = 2 if 2 * step <= shared_bytes(call.device) else 1  # all that a step reads is there twice

    def three(values: Sequence[object]) -> tuple[object, ...]:
        return (*values, *[values[0]] * (LAYERS - len(values)))

    args = (
        P, *three([own.B[index] for index in layers]), *three([None if s is None else s.g for s in scales]), *three(biases),
        *three(products), *three(outputs), *three([tables.places[index] for index in layers]), *three(N),
        segments.blocks[BM], tables.adapters, T, layout.width,
    )  # fmt: skip
    key = ("few up", call.shape, tuple(layers), composed, *map(sizes.dtype_of, biases))
    if not launcher.launched(segments.launches, key, args):
        launcher.launch(
            few_up_kernel, (sum(sizes.cdiv(n, UP_N) for n in N), segments.counts[BM]), args, segments.launches, key,
            NUM=len(layers), HAS_BIAS=biases[0] is not None, COMPOSED=composed, SPLITS=len(P), BM=BM, BN=UP_N, BR=BR,
            num_warps=2, num_stages=stages,
        )  # fmt: skip
    return outputs
