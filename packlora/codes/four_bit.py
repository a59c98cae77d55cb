"""The dense weight of 4-bit codes by one launch, where bitsandbytes takes three through doors that cost the host more than the
GPU needs: 0.4 ms a weight, half of a step of an 8B model at 2048 tokens.

Its bits are bitsandbytes': a kind of codes is computed so once both have given the same weight (`dense`).

Shapes: B blocks of 64 numbers, which have a scale each; C blocks of 256 scales.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from packlora.codes.kernel import four_bit_kernel
from packlora.ops import launcher
from packlora.ops.gpu import on_device

BLOCK = 64
ROWS = 64
"""Blocks of a program."""
TYPES = (torch.bfloat16, torch.float16, torch.float32)
_LAUNCHES: dict[Hashable, launcher.CachedLaunch] = {}
_EQUAL: dict[Hashable, bool] = {}
"""Whether the kernel has given bitsandbytes' bits, by device, dtype and kind of codes."""


def dense(stored: torch.Tensor, state: Any, dtype: torch.dtype, library: Any) -> torch.Tensor:
    """The numbers of codes, in order, [B * 64].

    Args:
        state: a QuantState.
        library: gives the same by bitsandbytes; asked where the kernel is not for these codes, or not known to give its bits.
    """
    plain = stored.dtype == torch.uint8 and stored.is_contiguous() and state.shape.numel() % BLOCK == 0
    if not plain or dtype not in TYPES or state.blocksize != BLOCK or launcher.is_rehearsing():
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
    count, nested, device = state.shape.numel(), state.nested, stored.device
    out, B = torch.empty(count, dtype=dtype, device=device), count // BLOCK
    outer = (state.state2.code, state.state2.absmax, state.offset) if nested else (None, None, None)
    args, key = (stored, state.absmax, *outer, state.code, out, B, 0), (device, dtype, B, nested)
    with on_device(device):
        if not launcher.launched(_LAUNCHES, key, args):
            aligned = all(one is None or one.data_ptr() % 16 == 0 for one in args[:7])
            launcher.launch(
                four_bit_kernel, (-(-B // ROWS),), args, launcher.bounded(_LAUNCHES) if aligned else None, key, NESTED=nested,
                OUTER=state.state2.blocksize if nested else 1, ROWS=ROWS, BYTES=BLOCK // 2, num_warps=4, num_stages=1,
            )  # fmt: skip
    return out
