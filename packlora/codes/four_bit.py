"""The dense weight of 4-bit codes by one launch, where bitsandbytes takes three through doors that cost the host more than the
GPU needs: 0.4 ms a weight, half of a step of an 8B model at 2048 tokens.

Its bits are bitsandbytes': a kind of codes is computed so once both have given the same weight (`dense`).

Shapes: B blocks of 64 numbers, which have a scale each; C blocks of 256 scales.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from packlora.ops import launcher
from packlora.ops.gpu import on_device

BLOCK = 64
ROWS = 64
"""Blocks of a program."""
TYPES = (torch.bfloat16, torch.float16, torch.float32)
_LAUNCHES: dict[Hashable, launcher.CachedLaunch] = {}
_EQUAL: dict[Hashable, bool] = {}
"""Whether the kernel has given bitsandbytes' bits, by device, dtype and kind of codes."""


@triton.jit(do_not_specialize=["B", "zero"])
def four_bit_kernel(
    stored_ptr, scales_ptr, code_ptr, outer_ptr, offset_ptr, table_ptr, out_ptr, B, zero,
    NESTED: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = block < B
    if NESTED:
        code = tl.load(scales_ptr + block, mask=there, other=0).to(tl.int32)
        product = tl.load(code_ptr + code) * tl.load(outer_ptr + block // OUTER, mask=there, other=0.0)
        # zero, which the compiler does not know, keeps it from adding before the product is rounded
        scale = (product.to(tl.int32, bitcast=True) ^ zero).to(tl.float32, bitcast=True) + tl.load(offset_ptr)
    else:
        scale = tl.load(scales_ptr + block, mask=there, other=0.0)
    place = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    pair = tl.load(stored_ptr + place, mask=there[:, None], other=0).to(tl.int32)
    first = tl.load(table_ptr + (pair >> 4)) * scale[:, None]
    second = tl.load(table_ptr + (pair & 15)) * scale[:, None]
    both = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
    numbers = block[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(out_ptr + numbers, both, mask=there[:, None])


def dense(stored: torch.Tensor, state: Any, dtype: torch.dtype, library: Any) -> torch.Tensor:
    """The numbers of codes, in order, [B * 64].

    Args:
        state: a QuantState.
        library: gives the same by bitsandbytes; asked where the kernel is not for these codes, or not known to give its bits.
    """
    count = state.shape.numel()
    if dtype not in TYPES or state.blocksize != BLOCK or count % BLOCK or launcher.is_rehearsing():
        return library()  # type: ignore[no-any-return]
    kind = stored.device, dtype, state.quant_type, state.nested
    if kind not in _EQUAL:
        if stored.is_cuda and torch.cuda.is_current_stream_capturing():
            return library()  # type: ignore[no-any-return]
        want: torch.Tensor = library()
        _EQUAL[kind] = torch.equal(computed(stored, state, dtype), want)
        return want
    return computed(stored, state, dtype) if _EQUAL[kind] else library()


def computed(stored: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """The same by the kernel."""
    count, nested = state.shape.numel(), state.nested
    out, B = torch.empty(count, dtype=dtype, device=stored.device), count // BLOCK
    outer = (state.state2.code, state.state2.absmax, state.offset) if nested else (None, None, None)
    args = (stored, state.absmax, *outer, state.code, out, B, 0)
    aligned = all(one is None or one.data_ptr() % 16 == 0 for one in args[:7])
    with on_device(stored.device):
        launcher.launch(
            four_bit_kernel, (-(-B // ROWS),), args, launcher.bounded(_LAUNCHES) if aligned else None,
            (stored.device, dtype, B, nested), NESTED=nested, OUTER=state.state2.blocksize if nested else 1, ROWS=ROWS,
            BYTES=BLOCK // 2, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out
