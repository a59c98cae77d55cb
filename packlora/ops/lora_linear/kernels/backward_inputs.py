"""Triton kernels of the backward that read x, once the gradient of S is there, and their launches. See forward.py, whose words
hold here too; backward_outputs.py has what goes before.

    inputs   dx0 = drop(dS A), dA = dS' drop(x)       one read of x; d W accumulates onto dx0

Sums over tokens are made in two stages in a fixed order: no atomics, the same bits every time.

Shapes: T tokens, K inputs, R padded rank over the layers of the group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from packlora.ops import launcher
from packlora.ops.dropout import kernel as dropping
from packlora.ops.dropout.kernel import _drop, _drop_two, _keys
from packlora.ops.launcher import Descriptor
from packlora.ops.lora_linear.call import Call, Operands
from packlora.ops.lora_linear.kernels import sizes
from packlora.ops.lora_linear.kernels.common import _add_dot, _block_of, _inside, _rows_of, sum_rows_kernel


@triton.jit
def _inputs_block(
    x, dS, A_at, A_tile, dx, keys, t, column_0, cols, fits, ranks, has, rank, stop, threshold, salt, acc, lost, K, x_stride,
    width,
    TAIL: tl.constexpr, TMA: tl.constexpr, DROP: tl.constexpr, ASM: tl.constexpr, NEED_DX: tl.constexpr, NEED_DA: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One block of tokens from t on; TAIL: some of them may be past the segment. Returns dA' of the tokens so far."""
    rows = t + tl.arange(0, BM)
    inside = _inside(rows, stop, TAIL)
    rows_64 = rows.to(tl.int64)[:, None]
    dS_at = dS + rows_64 * width + ranks[None, :]
    dS_tile = tl.load(dS_at, mask=inside[:, None] & has[None, :], other=0.0)
    if DROP:
        key_0, key_1 = _keys(keys, rows, inside, salt)
    if NEED_DA:
        if TMA:
            x_tile = x.load([t, column_0])
            if TAIL:  # a product with 0 would let another segment's NaN through
                x_tile = tl.where(inside[:, None], x_tile, tl.zeros_like(x_tile))
        else:
            x_at = x + rows_64 * x_stride + cols[None, :]
            x_tile = tl.load(x_at, mask=inside[:, None] & fits[None, :], other=0.0)
    if NEED_DX:
        low = tl.dot(dS_tile, A_tile, input_precision=PRECISION)
        if NEED_DA == 0:  # wider than one rank block: the others are added up here
            low_lost = tl.zeros((BM, BK), dtype=tl.float32)
            for r in range(BR, rank, BR):
                more = (r + ranks < rank)[None, :]
                dS_more = tl.load(dS_at + r, mask=inside[:, None] & more, other=0.0)
                A_more = tl.load(A_at + r * K, mask=(r + ranks < rank)[:, None] & fits[None, :], other=0.0)
                low, low_lost = _add_dot(dS_more, A_more, low, low_lost, PRECISION)
        low_tile = low.to(dx.dtype.element_ty)
    if DROP:
        if NEED_DX and NEED_DA:
            x_tile, low_tile = _drop_two(x_tile, low_tile, key_0, key_1, column_0, threshold, BK, ASM)
        elif NEED_DX:
            low_tile = _drop(low_tile, key_0, key_1, column_0, threshold, BK, ASM)
        else:
            x_tile = _drop(x_tile, key_0, key_1, column_0, threshold, BK, ASM)
    if NEED_DX:
        tl.store(dx + rows_64 * K + cols[None, :], low_tile, mask=inside[:, None] & fits[None, :])
    if NEED_DA:
        acc, lost = _add_dot(tl.trans(x_tile), dS_tile, acc, lost, PRECISION)
    return acc, lost


@triton.jit
def _inputs(
    x, dS, A, dx, dA_parts, keys, first, rank, column, chunk_index, start, stop, threshold, salt, K, x_stride, width,
    TMA: tl.constexpr, DROP: tl.constexpr, ASM: tl.constexpr, NEED_DX: tl.constexpr, NEED_DA: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column_0 = tl.program_id(0) * BK
    cols = column_0 + tl.arange(0, BK)
    fits = cols < K
    ranks = column + tl.arange(0, BR)
    has = ranks < rank
    A_at = A + (first + ranks).to(tl.int64)[:, None] * K + cols[None, :]
    A_tile = tl.load(A_at, mask=has[:, None] & fits[None, :], other=0.0)
    acc = tl.zeros((BK, BR), dtype=tl.float32)
    lost = tl.zeros((BK, BR), dtype=tl.float32)
    if TMA:
        whole = (stop - start) // BM
        for block in tl.range(0, whole, num_stages=STAGES):
            acc, lost = _inputs_block(
                x, dS, A_at, A_tile, dx, keys, start + block * BM, column_0, cols, fits, ranks, has, rank, stop, threshold,
                salt, acc, lost, K, x_stride, width, False, TMA, DROP, ASM, NEED_DX, NEED_DA, PRECISION, BM, BK, BR,
            )  # fmt: skip
        if start + whole * BM < stop:
            acc, lost = _inputs_block(
                x, dS, A_at, A_tile, dx, keys, start + whole * BM, column_0, cols, fits, ranks, has, rank, stop, threshold,
                salt, acc, lost, K, x_stride, width, True, TMA, DROP, ASM, NEED_DX, NEED_DA, PRECISION, BM, BK, BR,
            )  # fmt: skip
    else:
        for t in tl.range(start, stop, BM, num_stages=STAGES):
            acc, lost = _inputs_block(
                x, dS, A_at, A_tile, dx, keys, t, column_0, cols, fits, ranks, has, rank, stop, threshold, salt, acc, lost, K,
                x_stride, width, True, TMA, DROP, ASM, NEED_DX, NEED_DA, PRECISION, BM, BK, BR,
            )  # fmt: skip
    if NEED_DA:
        part_at = dA_parts + (chunk_index.to(tl.int64) * width + ranks[None, :]) * K + cols[:, None]
        tl.store(part_at, acc, mask=has[None, :] & fits[:, None])


@triton.jit(do_not_specialize=["salt", "T", "single_threshold"])
def inputs_kernel(
    x, dS, A, dx, dA_parts, keys, chunks, adapters, salt, K, x_stride, width, T, single_chunk, single_threshold, single_first,
    single_rank,
    SINGLE: tl.constexpr, TMA: tl.constexpr, DROP: tl.constexpr, ASM: tl.constexpr, NEED_DX: tl.constexpr,
    NEED_DA: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (column blocks of BK, token chunks, rank blocks of BR; one rank block where dx is needed).

    dA_parts [chunks, width, K] float32. dx is written in every row: 0 where no adapter is. TMA: x is a tensor descriptor of
    blocks [BM, BK].
    """
    chunk_index, column = tl.program_id(1), tl.program_id(2) * BR
    adapter, start, stop, threshold = _block_of(chunks, chunk_index, single_chunk, T, single_threshold, SINGLE)
    first, rank = 0, 0
    if adapter >= 0:
        first, rank = _rows_of(adapters, adapter, single_first, single_rank, SINGLE)
    left = rank - column
    if left > 0 or NEED_DX:
        if BR == 16 or left > BR // 2:
            _inputs(x, dS, A, dx, dA_parts, keys, first, rank, column, chunk_index, start, stop, threshold, salt, K, x_stride,
                    width, TMA, DROP, ASM, NEED_DX, NEED_DA, PRECISION, BM, BK, BR, STAGES)  # fmt: skip
        elif BR == 32 or left <= 16:
            _inputs(x, dS, A, dx, dA_parts, keys, first, rank, column, chunk_index, start, stop, threshold, salt, K, x_stride,
                    width, TMA, DROP, ASM, NEED_DX, NEED_DA, PRECISION, BM, BK, 16, STAGES)  # fmt: skip
        elif BR == 64 or left <= 32:
            _inputs(x, dS, A, dx, dA_parts, keys, first, rank, column, chunk_index, start, stop, threshold, salt, K, x_stride,
                    width, TMA, DROP, ASM, NEED_DX, NEED_DA, PRECISION, BM, BK, 32, STAGES)  # fmt: skip
        else:
            _inputs(x, dS, A, dx, dA_parts, keys, first, rank, column, chunk_index, start, stop, threshold, salt, K, x_stride,
                    width, TMA, DROP, ASM, NEED_DX, NEED_DA, PRECISION, BM, BK, 64, STAGES)  # fmt: skip


# --- launches ------------------------------------------------------------------------------------------------------------


def inputs(
    call: Call, own: Operands, x_TK: torch.Tensor, keys_T2: torch.Tensor | None, dS: torch.Tensor, need_dx: bool, need_dA: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """drop(dS A) [T, K], onto which the base products are to be accumulated, and the stacked dA [rows, K] in the parameters'
    dtype."""
    layout, segments, tables = call.layout, call.segment_tables, call.tables
    assert segments is not None and tables is not None
    size = segments.config
    T, K, device, width, single = call.T, call.K, call.device, layout.width, call.single_adapter
    BR = sizes.block_of(width, size.inputs_r)
    BK, stages = (size.narrow_k, size.narrow_stages) if BR == 16 and need_dx else (size.inputs_k, size.inputs_stages)
    if few := not need_dx and sizes.few_programs(sizes.cdiv(K, BK), size.inputs_chunks, segments, device):
        BK = size.few_inputs_k
    elif not need_dx and single is None:
        BK = size.several_inputs_k
    chunk = size.inputs_chunks[0] if few else sizes.chunk_size(size.inputs_chunks, sizes.cdiv(K, BK), segments, device)
    chunks, num_chunks, blocks, stride = (
        segments.blocks[chunk],
        segments.counts[chunk],
        sizes.cdiv(width, BR),
        x_TK.stride(0),
    )
    threshold, first, rank = sizes.rows_of(call)
    dx = torch.empty(T, K, dtype=call.dtype, device=device) if need_dx else None
    parts = torch.empty(num_chunks, width, K, dtype=torch.float32, device=device) if need_dA else None
    # one pass where a single block of ranks covers all; else dx in a pass of its own, and dA by blocks of ranks
    for with_dx, with_dA in [(need_dx, need_dA)] if blocks == 1 else [(need_dx, False), (False, need_dA)]:
        if not (with_dx or with_dA):
            continue
        tma = with_dA and sizes.described(x_TK, stride)
        args = (
            Descriptor(x_TK, [size.inputs_m, BK]) if tma else x_TK, dS, own.A_RK, dx, parts, keys_T2, chunks, tables.rows,
            call.word, K, stride, width, T, chunk, threshold, first, rank,
        )  # fmt: skip
        key = ("inputs", call.shape, stride, keys_T2 is None, tma, with_dx, with_dA, dx is None, parts is None)
        if not launcher.launched(segments.launches, key, args):
            launcher.launch(
                inputs_kernel, (sizes.cdiv(K, BK), num_chunks, blocks if with_dA else 1), args, segments.launches, key,
                SINGLE=single is not None, TMA=tma, DROP=segments.dropout, ASM=dropping.packed_dropout(x_TK), NEED_DX=with_dx,
                NEED_DA=with_dA, PRECISION="ieee", BM=size.inputs_m, BK=BK, BR=BR, STAGES=stages,
                num_warps=size.inputs_warps, num_stages=1,
            )  # fmt: skip
    return dx, None if parts is None else _sum_dA(call, parts, chunk)


def _sum_dA(call: Call, parts: torch.Tensor, chunk: int) -> torch.Tensor:
    """The stacked dA [rows, K] from those of chunks [chunks, width, K]."""
    layout, segments, tables, single = call.layout, call.segment_tables, call.tables, call.single_adapter
    assert segments is not None and tables is not None
    _, first, rank = sizes.rows_of(call)
    dA = torch.empty(layout.num_rows, call.K, dtype=call.wide, device=call.device)
    args = (
        parts, dA, segments.blocks[chunk], segments.ranges[chunk], tables.owners, None, None, call.K, layout.width,
        segments.counts[chunk], first,
    )  # fmt: skip
    key = ("sum_rows", call.shape, call.wide, chunk)
    if not launcher.launched(segments.launches, key, args):
        launcher.launch(
            sum_rows_kernel, (sizes.cdiv(call.K, 512), layout.num_rows if single is None else rank), args,
            segments.launches, key, SINGLE=single is not None, MAGNITUDE=False, OF_Y=False, CHUNKS=4, BK=512, num_warps=4,
            num_stages=1,
        )  # fmt: skip
    return dA
