"""Launches of kernels.py: block sizes, buffers and grids. Everything runs on the current stream and nothing waits.

Block sizes come from `Sizes`, one set per dtype; see benchmarks/LOG.md for what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from packlora.ops.dropout import signed
from packlora.ops.lora_linear import kernels
from packlora.ops.lora_linear.layout import GroupTables, Layer, Layout, Packed, RunTables


@dataclass(frozen=True, slots=True)
class Sizes:
    """Block sizes, warps and stages. *_m: tokens, *_n and *_k: columns, band: tokens that one program sums over."""

    down_m: int = 64
    down_k: int = 128
    down_r: int = 64
    down_warps: int = 4
    down_stages: int = 4
    up_m: int = 64
    up_n: int = 128
    up_warps: int = 4
    grad_m: int = 256
    grad_n: int = 64
    grad_warps: int = 8
    grad_stages: int = 3
    grad_programs: int = 132
    inputs_m: int = 64
    inputs_k: int = 128
    inputs_band: int = 1024
    inputs_warps: int = 4
    inputs_stages: int = 3

    @property
    def tokens(self) -> tuple[int, ...]:
        """Block sizes for which RunTables must have a table."""
        return (self.down_m, self.up_m, self.grad_m, self.inputs_band)


HALF = Sizes()
SINGLE = Sizes(
    down_m=32, down_k=64, down_r=32, down_stages=2, up_m=32, up_n=64, grad_m=64, grad_n=32, grad_warps=4, grad_stages=2,
    inputs_m=32, inputs_k=64, inputs_stages=2,
)  # fmt: skip


def sizes_for(dtype: torch.dtype) -> Sizes:
    return SINGLE if dtype == torch.float32 else HALF


def _block(rank: int, largest: int) -> int:
    """Power of two that covers a rank, from 16 to `largest`."""
    block = 16
    while block < rank and block < largest:
        block *= 2
    return block


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def down(
    x_TK: torch.Tensor, packed: Packed, tables: GroupTables, runs: RunTables, keys_T2: torch.Tensor | None, salt: int
) -> torch.Tensor:
    """S [T, width]; rows of tokens without an adapter and columns past an adapter's rank are not written."""
    size, layout, (T, K) = sizes_for(x_TK.dtype), packed.layout, x_TK.shape
    S = torch.empty(T, layout.width, dtype=x_TK.dtype, device=x_TK.device)
    blocks, BR = runs.blocks[size.down_m], _block(layout.width, size.down_r)
    kernels.down_kernel[(len(blocks), _cdiv(layout.width, BR))](
        x_TK, packed.A_RK, S, keys_T2, blocks, tables.rows, signed(salt), K, x_TK.stride(0), layout.width,
        DROP=runs.dropout, PRECISION="ieee", BM=size.down_m, BK=size.down_k, BR=BR,
        num_warps=size.down_warps, num_stages=size.down_stages,
    )  # fmt: skip
    return S


def up(S: torch.Tensor, packed: Packed, tables: GroupTables, runs: RunTables, layers: Sequence[Layer]) -> list[torch.Tensor]:
    """Per layer s S B' + bias, [T, N], onto which the base product is to be accumulated."""
    size, layout, T = sizes_for(S.dtype), packed.layout, len(S)
    blocks, out = runs.blocks[size.up_m], []
    for index, layer in enumerate(layers):
        N = len(layer.weight)
        y = torch.empty(T, N, dtype=S.dtype, device=S.device)
        kernels.up_kernel[(_cdiv(N, size.up_n), len(blocks))](
            S, packed.B[index], layer.bias, y, blocks, tables.places[index], tables.scalings[index], N, layout.width,
            HAS_BIAS=layer.bias is not None, PRECISION="ieee", BM=size.up_m, BN=size.up_n,
            BR=_block(layout.max_padded[index], 64), num_warps=size.up_warps,
        )  # fmt: skip
        out.append(y)
    return out


def grad(
    d: Sequence[torch.Tensor | None], S: torch.Tensor, packed: Packed, tables: GroupTables, runs: RunTables, dtype: torch.dtype,
    need_dB: bool,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:  # fmt: skip
    """dS [T, width], and per layer dB, flat as B is, in `dtype`. d: per layer [T, N] or None where nothing came back."""
    size, layout, T = sizes_for(S.dtype), packed.layout, len(S)
    bands = runs.blocks[size.grad_m]
    count = _cdiv(size.grad_programs, len(bands))
    spans = max(1, min(count, min(_cdiv(len(t[0]), size.grad_n) for t in d if t is not None)))
    dS_parts = torch.empty(spans, T, layout.width, dtype=torch.float32, device=S.device)
    if any(t is None for t in d):
        dS_parts.zero_()
    out: list[torch.Tensor | None] = []
    for index, d_TN in enumerate(d):
        part_width = layout.max_padded[index]
        if d_TN is None or not part_width:
            out.append(None)
            continue
        N = d_TN.shape[1]
        span = _cdiv(_cdiv(N, spans), size.grad_n) * size.grad_n
        BR = _block(part_width, 64)
        dB_parts = torch.empty(
            (len(bands), N, part_width) if need_dB else (1,), dtype=torch.float32, device=S.device
        )
        kernels.grad_kernel[(spans, len(bands), _cdiv(part_width, BR))](
            d_TN, S, packed.B[index], dS_parts, dB_parts, bands, tables.places[index], tables.scalings[index],
            T, N, d_TN.stride(0), layout.width, part_width, span,
            NEED_DB=need_dB, PRECISION="ieee", BM=size.grad_m, BN=size.grad_n, BR=BR,
            num_warps=size.grad_warps, num_stages=size.grad_stages,
        )  # fmt: skip
        dB = None
        if need_dB:
            dB = torch.empty(layout.b_sizes[index], dtype=dtype, device=S.device)
            kernels.sum_blocks_kernel[(_cdiv(N, 64), len(tables.rows))](
                dB_parts, dB, bands, len(bands), tables.places[index], N, part_width, BN=64, BR=min(BR, 32), num_warps=4
            )
        out.append(dB)
    dS = torch.empty(T, layout.width, dtype=S.dtype, device=S.device)
    kernels.sum_spans_kernel[(_cdiv(dS.numel(), 1024),)](dS_parts, dS, dS.numel(), spans, BLOCK=1024, num_warps=4)
    return dS, out


def inputs(
    x_TK: torch.Tensor, dS: torch.Tensor, packed: Packed, tables: GroupTables, runs: RunTables, row_table: torch.Tensor,
    keys_T2: torch.Tensor | None, salt: int, dtype: torch.dtype, need_dx: bool, need_dA: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """dropout'(dS A) [T, K], onto which the base products are to be accumulated, and the stacked dA [rows, K] in `dtype`."""
    size, layout, (T, K) = sizes_for(x_TK.dtype), packed.layout, x_TK.shape
    bands = runs.blocks[size.inputs_band]
    BR = _block(layout.width, 128 if size is HALF else 32)
    dx = torch.empty(T, K, dtype=x_TK.dtype, device=x_TK.device) if need_dx else None
    parts = dA = None
    if need_dA:
        parts = torch.empty(len(bands), layout.width, K, dtype=torch.float32, device=x_TK.device)
    blocks = _cdiv(layout.width, BR)
    # one pass where a single block of ranks covers all; else dA by rank blocks, dx in a pass of its own
    passes = [(need_dx, need_dA)] if blocks == 1 else [(need_dx, False), (False, need_dA)]
    for with_dx, with_dA in passes:
        if with_dx or with_dA:
            kernels.inputs_kernel[(_cdiv(K, size.inputs_k), len(bands), blocks if with_dA else 1)](
                x_TK, dS, packed.A_RK, dx, parts, keys_T2, bands, tables.rows, signed(salt), K, x_TK.stride(0), layout.width,
                DROP=runs.dropout, NEED_DX=with_dx, NEED_DA=with_dA, PRECISION="ieee",
                BM=size.inputs_m, BK=size.inputs_k, BR=BR, num_warps=size.inputs_warps, num_stages=size.inputs_stages,
            )  # fmt: skip
    if parts is not None:
        dA = torch.empty(layout.num_rows, K, dtype=dtype, device=x_TK.device)
        kernels.sum_rows_kernel[(_cdiv(K, 512), layout.num_rows)](
            parts, dA, bands, len(bands), row_table, K, layout.width, BK=512, num_warps=4
        )
    return dx, dA


def row_table(layout: Layout, device: torch.device) -> torch.Tensor:
    """int32 [rows, 2]: adapter and row within it of every row of the stacked A."""
    rows = [(number, row) for number, (_, padded) in layout.rows.items() for row in range(padded)]
    return torch.tensor(rows, dtype=torch.int32).view(-1, 2).to(device)
