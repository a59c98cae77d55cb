"""Kernel by which launcher.py finds out how Triton launches; its result is not used."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def probe_kernel(x, nothing, y, n, one, shift, MAPPED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """y = x + one shift, float32 [n], for launcher.why_usual: it has an argument of every kind that kernels here have."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MAPPED:
        value = tl.reshape(x.load([tl.program_id(0), 0]), (BLOCK,))
    else:
        value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(y + at, value + shift * one, mask=at < n)
