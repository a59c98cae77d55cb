"""Triton kernels of the backward that read d, the gradient of a layer's output, and their launches. See forward.py, whose words
hold here too; backward_inputs.py has what follows.

    grad     dS = s c (e B), dB = e' S                one read of d; e and the sums in the same pass (scales.py)

Sums over tokens are made in two stages in a fixed order: no atomics, the same bits every time.

Shapes: T tokens, N outputs, r padded rank of one layer, R padded rank over the layers of the group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from packlora.ops import launcher
from packlora.ops.launcher import Descriptor
from packlora.ops.lora_linear.call import Call, Operands
from packlora.ops.lora_linear.kernels import sizes
from packlora.ops.lora_linear.kernels.common import _add_dot, _block_of, _inside, _place_of
from packlora.ops.lora_linear.kernels.config import shared_bytes
from packlora.ops.lora_linear.kernels.scales import Scaling, sum_tokens


@triton.jit
def _grad_block(
    d, S_tile, kept, e, parts, t, B_tile, factor, g_row, ranks, has, first, fits, stop, acc, lost, dz, d_sum, N, part_width,
    TAIL: tl.constexpr, TMA: tl.constexpr, NEED_DB: tl.constexpr, COMPOSED: tl.constexpr, NEED_DZ: tl.constexpr,
    NEED_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One block of tokens from t on; TAIL: some of them may be past the segment. Returns the sums over tokens so far."""
    rows = t + tl.arange(0, BM)
    rows_64 = rows.to(tl.int64)[:, None]
    cols = first + tl.arange(0, BN)
    inside = _inside(rows, stop, TAIL)
    here = inside[:, None] & fits[None, :]
    if TMA:
        d_tile = d.load([t, first])
        if TAIL:  # a product with 0 would let another segment's NaN through
            d_tile = tl.where(inside[:, None], d_tile, tl.zeros_like(d_tile))
    else:
        d_tile = tl.load(d + rows_64 * N + cols[None, :], mask=here, other=0.0)
    mine = inside[:, None] & has[None, :]
    if COMPOSED:
        wide = d_tile.to(tl.float32)
        if NEED_DZ:
            if TMA:
                kept_tile = kept.load([t, first])
                if TAIL:
                    kept_tile = tl.where(inside[:, None], kept_tile, tl.zeros_like(kept_tile))
            else:
                kept_tile = tl.load(kept + rows_64 * N + cols[None, :], mask=here, other=0.0)
            dz += tl.sum(tl.reshape(wide * kept_tile.to(tl.float32), (BM // 8, 8, BN)), 0)
        if NEED_D:
            d_sum += tl.sum(tl.reshape(wide, (BM // 8, 8, BN)), 0)
        d_tile = (wide * g_row[None, :]).to(d_tile.dtype)
        tl.store(e + rows_64 * N + cols[None, :], d_tile, mask=here)
    dS = tl.dot(d_tile, B_tile, input_precision=PRECISION)
    tl.store(parts + rows_64 * part_width + ranks[None, :], dS * factor, mask=mine)
    if NEED_DB:
        acc, lost = _add_dot(tl.trans(d_tile), S_tile, acc, lost, PRECISION)
    return acc, lost, dz, d_sum


@triton.jit
def _S_of(S, t, column, ranks, has, stop, width, NEED_DB: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr):
    """S of a block of tokens from t on; anything where no dB is needed."""
    if NEED_DB:
        rows = t + tl.arange(0, BM)
        at = S + rows.to(tl.int64)[:, None] * width + (column + ranks)[None, :]
        return tl.load(at, mask=(rows < stop)[:, None] & has[None, :], other=0.0)
    else:
        return tl.zeros((BM, BR), dtype=S.dtype.element_ty)


@triton.jit
def _grad(
    d, S, B, dS_parts, dB_parts, kept, e, sums, g, column, offset, rank, column_0, start, stop, row, factor, chunk, T, N,
    width, part_width,
    TMA: tl.constexpr, NEED_DB: tl.constexpr, COMPOSED: tl.constexpr, NEED_DZ: tl.constexpr, NEED_D: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BN
    cols = first + tl.arange(0, BN)
    fits = cols < N
    ranks = column_0 + tl.arange(0, BR)
    has = ranks < rank
    B_at = B + offset + cols.to(tl.int64)[:, None] * rank + ranks[None, :]
    B_tile = tl.load(B_at, mask=fits[:, None] & has[None, :], other=0.0)
    parts = dS_parts + tl.program_id(0).to(tl.int64) * T * part_width
    acc = tl.zeros((BN, BR), dtype=tl.float32)
    lost = tl.zeros((BN, BR), dtype=tl.float32)
    dz = tl.zeros((8, BN), dtype=tl.float32)
    d_sum = tl.zeros((8, BN), dtype=tl.float32)
    g_row = None
    if COMPOSED:
        g_row = tl.load(g + row * N + cols, mask=fits, other=0.0)
    whole = 0
    if TMA:
        whole = (stop - start) // BM
        # S comes a block ahead through registers: in the ring of d's blocks it would take the memory of a second program
        S_tile = _S_of(S, start, column, ranks, has, stop, width, NEED_DB, BM, BR)
        for block in tl.range(0, whole, num_stages=STAGES):
            t = start + block * BM
            S_next = _S_of(S, t + BM, column, ranks, has, stop, width, NEED_DB, BM, BR)
            acc, lost, dz, d_sum = _grad_block(
                d, S_tile, kept, e, parts, t, B_tile, factor, g_row, ranks, has, first, fits, stop, acc,
                lost, dz, d_sum, N, part_width, False, TMA, NEED_DB, COMPOSED, NEED_DZ, NEED_D, PRECISION,
                BM, BN,
            )  # fmt: skip
            S_tile = S_next
        if start + whole * BM < stop:
            acc, lost, dz, d_sum = _grad_block(
                d, S_tile, kept, e, parts, start + whole * BM, B_tile, factor, g_row, ranks, has, first, fits, stop, acc,
                lost, dz, d_sum, N, part_width, True, TMA, NEED_DB, COMPOSED, NEED_DZ, NEED_D, PRECISION,
                BM, BN,
            )  # fmt: skip
    else:
        for t in tl.range(start, stop, BM, num_stages=STAGES):
            S_tile = _S_of(S, t, column, ranks, has, stop, width, NEED_DB, BM, BR)
            acc, lost, dz, d_sum = _grad_block(
                d, S_tile, kept, e, parts, t, B_tile, factor, g_row, ranks, has, first, fits, stop, acc, lost, dz, d_sum,
                N, part_width, True, TMA, NEED_DB, COMPOSED, NEED_DZ, NEED_D, PRECISION, BM, BN,
            )  # fmt: skip
    chunk_64 = chunk.to(tl.int64)
    if NEED_DB:
        part_at = dB_parts + (chunk_64 * N + cols[:, None]) * part_width + ranks[None, :]
        tl.store(part_at, acc, mask=fits[:, None] & has[None, :])
    if NEED_DZ:
        tl.store(sums + chunk_64 * 2 * N + cols, tl.sum(dz, 0), mask=fits)
    if NEED_D:
        tl.store(sums + (chunk_64 * 2 + 1) * N + cols, tl.sum(d_sum, 0), mask=fits)


@triton.jit(do_not_specialize=["base_row", "T", "single", "single_threshold"])
def grad_kernel(
    d, S, B, dS_parts, dB_parts, kept, e, sums, g, chunks, places, scalings, base_row, T, N, width, part_width,
    single, single_chunk, single_threshold, single_column, single_offset, single_rank,
    SINGLE: tl.constexpr, TMA: tl.constexpr, NEED_DB: tl.constexpr, COMPOSED: tl.constexpr, NEED_DZ: tl.constexpr,
    NEED_D: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (column blocks of BN, token chunks, rank blocks of BR; one rank block where COMPOSED).

    A program keeps its columns of B and of dB and walks over the tokens of its chunk, BM at a time. dS_parts [column blocks, T,
    part_width] float32: the columns' share of dS; dB_parts [chunks, N, part_width] float32: the chunk's of dB. TMA: d, and
    kept, are tensor descriptors of blocks [BM, BN]. COMPOSED: d is scaled by g first, e and sums are written as by
    scale_kernel. single: the one adapter, where SINGLE.
    """
    chunk_index, column_0 = tl.program_id(1), tl.program_id(2) * BR
    adapter, start, stop, threshold = _block_of(chunks, chunk_index, single_chunk, T, single_threshold, SINGLE)
    if SINGLE:
        adapter = single
    column, offset, rank = 0, 0, 0
    factor = 0.0
    if adapter >= 0:
        column, offset, rank = _place_of(places, adapter, single_column, single_offset, single_rank, SINGLE)
        factor = tl.load(scalings + adapter) * (65536.0 / (65536 - threshold))
    row = tl.where(adapter >= 0, adapter, base_row).to(tl.int64)
    left = rank - column_0
    if left > 0 or COMPOSED:
        if BR == 16 or left > BR // 2:
            _grad(d, S, B, dS_parts, dB_parts, kept, e, sums, g, column, offset, rank, column_0, start, stop, row, factor,
                  chunk_index, T, N, width, part_width, TMA, NEED_DB, COMPOSED, NEED_DZ, NEED_D, PRECISION, BM, BN, BR,
                  STAGES)  # fmt: skip
        elif BR == 32 or left <= 16:
            _grad(d, S, B, dS_parts, dB_parts, kept, e, sums, g, column, offset, rank, column_0, start, stop, row, factor,
                  chunk_index, T, N, width, part_width, TMA, NEED_DB, COMPOSED, NEED_DZ, NEED_D, PRECISION, BM, BN, 16,
                  STAGES)  # fmt: skip
        else:
            _grad(d, S, B, dS_parts, dB_parts, kept, e, sums, g, column, offset, rank, column_0, start, stop, row, factor,
                  chunk_index, T, N, width, part_width, TMA, NEED_DB, COMPOSED, NEED_DZ, NEED_D, PRECISION, BM, BN, 32,
                  STAGES)  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "num_blocks", "spans", "T", "num_chunks"])
def sum_grads_kernel(
    dS_parts, dS, dB_parts, dB, tiles, num_tiles, chunks, ranges, places, num_blocks, N, width, part_width, spans, step, T,
    num_chunks, single_column, single_offset, single_rank,
    SINGLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Add up the parts that grad_kernel made for one layer: dS, the sum of dS_parts over the column blocks, and dB, flat as B
    is, the sum of dB_parts over the adapter's chunks; both in order. Grid (num_tiles + num_blocks * adapters, rank blocks of
    BR): first the token blocks of BM, then for each adapter the blocks of N. step: elements from one share of dS to the next.
    AHEAD parts are on their way at once."""
    program = tl.program_id(0)
    ranks = tl.program_id(1) * BR + tl.arange(0, BR)
    if program < num_tiles:
        adapter, start, stop, _ = _block_of(tiles, program, BM, T, 0, SINGLE)
        if adapter >= 0:
            column, _, rank = _place_of(places, adapter, single_column, single_offset, single_rank, SINGLE)
            rows = (start + tl.arange(0, BM)).to(tl.int64)
            mine = (rows < stop)[:, None] & (ranks < rank)[None, :]
            at = dS_parts + rows[:, None] * part_width + ranks[None, :]
            total = tl.zeros((BM, BR), dtype=tl.float32)
            for first in range(0, spans, AHEAD):
                for more in tl.static_range(AHEAD):
                    total += tl.load(at, mask=mine & (first + more < spans), other=0.0)
                    at += step
            tl.store(dS + rows[:, None] * width + (column + ranks)[None, :], total.to(dS.dtype.element_ty), mask=mine)
    elif dB_parts is not None:
        adapter = (program - num_tiles) // num_blocks
        _, offset, rank = _place_of(places, adapter, single_column, single_offset, single_rank, SINGLE)
        cols = ((program - num_tiles) % num_blocks * BN + tl.arange(0, BN)).to(tl.int64)
        if tl.program_id(1) * BR < rank:
            inside = (cols < N)[:, None] & (ranks < rank)[None, :]
            total_B = tl.zeros((BN, BR), dtype=tl.float32)
            start_chunk, last = 0, num_chunks
            if SINGLE == 0:
                start_chunk, last = tl.load(ranges + 2 * adapter), tl.load(ranges + 2 * adapter + 1)
            for first in range(start_chunk, last, AHEAD):
                for more in tl.static_range(AHEAD):
                    chunk = first + more
                    own = chunk < last
                    if SINGLE == 0:
                        own = tl.load(chunks + 4 * chunk, mask=own, other=-1) == adapter
                    at = dB_parts + (chunk.to(tl.int64) * N + cols[:, None]) * part_width + ranks[None, :]
                    total_B += tl.load(at, mask=inside & own, other=0.0)
            tl.store(dB + offset + cols[:, None] * rank + ranks[None, :], total_B.to(dB.dtype.element_ty), mask=inside)


# --- launches ------------------------------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """Block sizes and block counts by which grad_kernel cuts a layer."""

    BM: int
    BN: int
    BR: int
    warps: int
    spans: int
    chunk: int


def _blocks(call: Call, index: int, scaled: bool) -> _Blocks:
    segments, N = call.segment_tables, call.layout.sizes[index]
    assert segments is not None
    size, single = segments.config, call.single_adapter
    BM, BN, BR, warps = size.grad_m, size.grad_n, size.grad_r, size.grad_warps
    if scaled:
        BM, BN, warps = size.joint_m, size.joint_n, size.joint_warps
    elif single is None:
        BM, BR, warps = size.several_grad_m, size.several_grad_r, size.several_grad_warps
    BR = sizes.block_of(call.layout.max_padded[index], BR)
    if few := not scaled and sizes.few_programs(sizes.cdiv(N, BN), size.grad_chunks, segments, call.device):
        BN = size.few_grad_n
    spans = sizes.cdiv(N, BN)
    chunk = size.grad_chunks[0] if few else sizes.chunk_size(size.grad_chunks, spans, segments, call.device)
    return _Blocks(BM, BN, BR, warps, spans, chunk)


def _stages(call: Call, cut: _Blocks, need_dB: bool, scaled: bool, tma: bool) -> int:
    """Blocks of d that are on their way at once. Where only dS is made they go to its product through shared memory, as many as
    fit there."""
    assert call.segment_tables is not None
    size = call.segment_tables.config
    if scaled or need_dB or tma:
        return size.joint_stages if scaled else size.grad_stages
    fit = shared_bytes(call.device) // (cut.BM * cut.BN * call.dtype.itemsize) - 1
    return max(1, min(size.grad_stages, fit))


def grad(
    call: Call, own: Operands, S: torch.Tensor, dS: torch.Tensor, d: torch.Tensor, index: int, need_dB: bool,
    scaling: Scaling | None, rooms: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Writes the layer's columns of dS [T, width]. Gives e (d itself where it is not scaled), dB, flat as B is, in the
    parameters' dtype, and the sums as `scale` gives them. Where d is scaled one block of ranks must cover all. d: contiguous
    [..., N]. rooms: for parts, which one layer after the other of a backward makes and sums."""
    layout, segments, tables = call.layout, call.segment_tables, call.tables
    assert segments is not None and tables is not None
    T, N, device, single = call.T, layout.sizes[index], call.device, call.single_adapter
    part_width = layout.max_padded[index]
    blocks = call.cut.get((index, scaling is None))
    if blocks is None:
        blocks = call.cut[index, scaling is None] = _blocks(call, index, scaling is not None)
    BM, BN, BR, warps, spans, chunk = blocks
    num_chunks = segments.counts[chunk]
    dS_parts = rooms.get("dS")
    if dS_parts is None or dS_parts.numel() < spans * T * part_width:
        dS_parts = rooms["dS"] = torch.empty(spans * T * part_width, device=device)
    dB_parts = rooms.get("dB") if need_dB else None
    if need_dB and (dB_parts is None or dB_parts.numel() < num_chunks * N * part_width):
        dB_parts = rooms["dB"] = torch.empty(num_chunks * N * part_width, device=device)
    e, kept, g, sums, need_dz, need_d = d, None, None, None, False, False
    if scaling is not None:
        _, kept, need_dz, need_d, _ = scaling
        g, e = scaling.scales.g, torch.empty(T, N, dtype=call.dtype, device=device)
        sums = torch.empty(num_chunks, 2, N, device=device) if need_dz or need_d else None
    place = sizes.place_of(call, index)
    tma = sizes.described(d, N) and (not need_dz or kept is None or sizes.described(kept, N))
    args: tuple[Any, ...] = (
        d, S, own.B[index], dS_parts, dB_parts, kept, None if scaling is None else e, sums, g, segments.blocks[chunk],
        tables.places[index], tables.scalings[index], tables.adapters, T, N, layout.width, part_width,
        0 if single is None else layout.numbers.index(single.adapter), chunk, call.threshold, *place,
    )  # fmt: skip
    key = ("grad", call.shape, index, tma, need_dB, scaling is None, kept is None, need_dz, need_d)
    if not launcher.launched(segments.launches, key, args):
        if tma:
            tile, shape, strides = [BM, BN], [T, N], [N, 1]
            z = Descriptor(kept, tile, shape, strides) if need_dz and kept is not None else kept
            args = (Descriptor(d, tile, shape, strides), *args[1:5], z, *args[6:])
        launcher.launch(
            grad_kernel, (spans, num_chunks, sizes.cdiv(part_width, BR)), args, segments.launches, key,
            SINGLE=single is not None, TMA=tma, NEED_DB=need_dB, COMPOSED=scaling is not None, NEED_DZ=need_dz, NEED_D=need_d,
            PRECISION="ieee", BM=BM, BN=BN, BR=BR,
            STAGES=_stages(call, blocks, need_dB, scaling is not None, tma), num_warps=warps, num_stages=1,
        )  # fmt: skip
    total = None
    if scaling is not None and sums is not None:
        total = sum_tokens(call, sums, index, scaling, chunk)
    return e, _sum_grads(call, dS_parts, dS, dB_parts, index, blocks, place), total


def _sum_grads(
    call: Call, dS_parts: torch.Tensor, dS: torch.Tensor, dB_parts: torch.Tensor | None, index: int, cut: _Blocks,
    place: tuple[int, int, int],
) -> torch.Tensor | None:  # fmt: skip
    """Sums what grad_kernel made parts of: one layer's columns of dS, and its dB. place: as sizes.place_of gives it."""
    layout, segments, tables = call.layout, call.segment_tables, call.tables
    assert segments is not None and tables is not None
    spans, chunk, T, part_width, N = cut.spans, cut.chunk, call.T, layout.max_padded[index], layout.sizes[index]
    dB = None if dB_parts is None else torch.empty(layout.b_shapes[index], dtype=call.wide, device=call.device)
    down_m, single = segments.config.down_m, call.single_adapter
    num_tiles = segments.counts[down_m]
    blocks = -(-N // down_m) if dB is not None else 0
    args = (
        dS_parts, dS, dB_parts, dB, segments.blocks[down_m], num_tiles, segments.blocks[chunk], segments.ranges[chunk],
        tables.places[index], blocks, N, layout.width, part_width, spans, T * part_width, T, segments.counts[chunk], *place,
    )  # fmt: skip
    key = ("sum_grads", call.shape, index, call.wide, spans, chunk, dB is not None)
    if not launcher.launched(segments.launches, key, args):
        ranks = min(cut.BR, 32)
        launcher.launch(
            sum_grads_kernel,
            (num_tiles + blocks * (tables.adapters if single is None else 1), sizes.cdiv(part_width, ranks)), args,
            segments.launches, key,
            SINGLE=single is not None, BM=down_m, BN=down_m, BR=ranks, AHEAD=8, num_warps=4, num_stages=1,
        )  # fmt: skip
    return dB
