"""Triton kernels of compose.py: one pass forward, one pass backward with the gradient of g in two fixed stages.

A program owns BLOCK columns and a strip of rows, ROWS at a time. Every thread holds eight neighbouring columns of 16-bit
numbers (16 bytes a load) in each of the ROWS rows, so the loads of a step are independent of each other and the sum over rows
stays in its thread. Arithmetic is float32 whatever the operands' dtype, in compose.py's order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Columns of a program: 128 threads with 16 bytes each."""
ROWS = 4
"""Rows in flight. H100 and H200 need about 64 KiB on the way per multiprocessor; seven programs forward (72 registers a thread)
bring 16 KiB of loads each, four programs backward (128 registers) 24 KiB each."""
LONGEST_STRIP = 64
"""Rows of a program at most in the backward: its partial sums are then under 1 % of what it reads and writes."""
PROGRAMS = 1024
"""Programs that a backward should have at least, before strips get longer: seven for each multiprocessor of an H200."""


@triton.jit
def compose_kernel(
    base, lora, g, out, scaling, M, N, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Grid (row strips * column blocks). out = (g - 1) base + g (s lora)."""
    blocks = tl.cdiv(N, BLOCK)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    base_RB = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    lora_RB = tl.load(lora + at, mask=inside, other=0.0).to(tl.float32)
    g_B = tl.load(g + columns, mask=columns < N, other=1.0).to(tl.float32)
    out_RB = (g_B - 1.0)[None, :] * base_RB + g_B[None, :] * (scaling * lora_RB)
    tl.store(out + at, out_RB.to(out.dtype.element_ty), mask=inside)


@triton.jit
def compose_grad_kernel(
    d, base, lora, g, d_base, d_lora, parts, scaling, M, N, strip,
    WANT_G: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (row strips * column blocks). parts [strips, N] float32: each strip's share of dg, if WANT_G."""
    blocks = tl.cdiv(N, BLOCK)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    number = (tl.program_id(0) // blocks).to(tl.int64)
    g_B = tl.load(g + columns, mask=columns < N, other=1.0).to(tl.float32)
    of_lora_B, of_base_B = g_B * scaling, g_B - 1.0
    share_RB = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, strip, ROWS):
        rows = number * strip + start + tl.arange(0, ROWS)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        at = rows[:, None] * N + columns[None, :]
        d_RB = tl.load(d + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_lora + at, (of_lora_B[None, :] * d_RB).to(d_lora.dtype.element_ty), mask=inside)
        tl.store(d_base + at, (of_base_B[None, :] * d_RB).to(d_base.dtype.element_ty), mask=inside)
        if WANT_G:
            base_RB = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
            lora_RB = tl.load(lora + at, mask=inside, other=0.0).to(tl.float32)
            share_RB += d_RB * (scaling * lora_RB + base_RB)
    if WANT_G:
        tl.store(parts + number * N + columns, tl.sum(share_RB, 0), mask=columns < N)


def forward(base_MN: torch.Tensor, lora_MN: torch.Tensor, g_N: torch.Tensor, scaling: float) -> torch.Tensor:
    """All contiguous."""
    M, N = base_MN.shape
    out_MN = torch.empty_like(base_MN)
    block = min(BLOCK, triton.next_power_of_2(N))
    grid = (triton.cdiv(N, block) * triton.cdiv(M, ROWS),)
    with torch.cuda.device_of(base_MN):
        compose_kernel[grid](base_MN, lora_MN, g_N, out_MN, float(scaling), M, N, BLOCK=block, ROWS=ROWS, num_warps=4)
    return out_MN


def strip_rows(M: int, blocks: int) -> int:
    """Rows of a strip: LONGEST_STRIP, less where the programs would be few; a multiple of ROWS."""
    rows = min(LONGEST_STRIP, M * blocks // PROGRAMS)
    return max(ROWS, rows // ROWS * ROWS)


def backward(
    d_MN: torch.Tensor, base_MN: torch.Tensor, lora_MN: torch.Tensor, g_N: torch.Tensor, scaling: float, want_g: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """d_base, d_lora and, if wanted, dg in float32; all operands contiguous. The same operands give the same bits."""
    M, N = base_MN.shape
    d_base_MN, d_lora_MN = torch.empty_like(base_MN), torch.empty_like(base_MN)
    block = min(BLOCK, triton.next_power_of_2(N))
    blocks = triton.cdiv(N, block)
    strip = strip_rows(M, blocks)
    strips = triton.cdiv(M, strip)
    parts_SN = torch.empty(strips if want_g else 0, N, dtype=torch.float32, device=base_MN.device)
    with torch.cuda.device_of(base_MN):
        compose_grad_kernel[(strips * blocks,)](
            d_MN, base_MN, lora_MN, g_N, d_base_MN, d_lora_MN, parts_SN, float(scaling), M, N, strip,
            WANT_G=want_g, BLOCK=block, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return d_base_MN, d_lora_MN, parts_SN.sum(0) if want_g else None
