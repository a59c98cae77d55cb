"""The allocator of torch on GPUs."""

from __future__ import annotations

import contextlib
import os
import sys

import torch


def grow_segments(grow: bool = True) -> None:
    """Let torch's allocator on GPUs grow its segments page by page, where the environment does not say how it allocates. With
    segments of fixed size it holds 7 to 13 % more than is in use when 4-bit weights are made layer by layer."""
    set_by_user = any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if sys.platform == "linux" and settings is not None and not set_by_user:
        with contextlib.suppress(RuntimeError):  # no more than memory is won by it
            settings(f"expandable_segments:{grow}")
