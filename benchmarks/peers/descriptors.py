"""Triton's present tensor descriptors under the names that LoRAFusion's TMA kernel calls."""

from __future__ import annotations

import triton


@triton.jit
def load(desc, offsets, block_shape, dtype):  # type: ignore[no-untyped-def]
    """A tile."""
    return desc.load(offsets)


@triton.jit
def store(desc, value, offsets):  # type: ignore[no-untyped-def]
    """A tile."""
    desc.store(offsets, value)
