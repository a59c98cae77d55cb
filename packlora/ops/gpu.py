"""Properties of a GPU that its kernels depend on. Kernels on a CPU run in Triton's interpreter, which accepts everything."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
_NOTHING = contextlib.nullcontext()
OLDEST = (8, 0)
"""Compute capability from which on the kernels run."""


def is_elsewhere(device: torch.device) -> bool:
    """Whether it is a GPU, and not the current one. Of devices that tensors are on: torch has looked for GPUs before."""
    return device.type == "cuda" and device.index != torch._C._cuda_getDevice()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a GPU the current one: kernels start there, whatever their operands are on. In backwards autograd has done so."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _NOTHING
    return torch.cuda.device(device)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, as (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """Number of large programs that a GPU runs at the same time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def why_no_kernels(device: torch.device) -> str | None:
    """Reason why the Triton kernels are not used on a device; None where they are."""
    if device.type != "cuda":
        return f"{device.type} has no Triton kernels"
    if torch.version.hip is not None:
        return "the kernels have not been tried on AMD GPUs"
    if (found := capability(device)) < OLDEST:
        return f"the kernels need compute capability 8.0 or newer, this GPU has {found[0]}.{found[1]}"
    return None if HAS_TRITON else "the triton package is not installed"


def rounds_before_adding(device: torch.device) -> bool:
    """Whether torch.addmm in 16 bits rounds the product before it adds it: cuBLAS from Hopper on (measured there; newer ones
    are taken to be the same). What is added is then lost where it is under half of the product's last bit."""
    return device.type == "cuda" and capability(device) >= (9, 0)


def has_copy_engine(device: torch.device) -> bool:
    """Whether kernels may read through tensor descriptors, and keep as much on their way as it takes for that to pay: Hopper,
    and Blackwell in data centres. Blackwell's cards (12.x) have the engine, and less than half of the memory."""
    return capability(device)[0] in (9, 10)
