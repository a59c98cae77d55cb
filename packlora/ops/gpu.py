"""Properties of a GPU that its kernels depend on. Kernels on a CPU run in Triton's interpreter, which accepts everything."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
_NOTHING = contextlib.nullcontext()
SWITCH = "PACKLORA_KERNELS"
ASKED = os.environ.get(SWITCH, "auto")
"""auto: the kernels run on the GPUs that they are for. on: also on AMD GPUs that they were never compiled for. off: nowhere."""
OLDEST = (8, 0)
"""Compute capability from which on the kernels run."""
OLDEST_WITHOUT_PRODUCTS = (7, 5)
"""The same of kernels without products. Before 8.0 Triton 3.7 multiplies without tensor cores, so torch's products are faster;
attention of heads 128 wide would also take 80 KiB of shared memory where there are 64."""
AMD = ("gfx942", "gfx1100")
"""Architectures of AMD for which the kernels were compiled; they were never run there. DoRA's norms are torch's."""


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
    """Compute capability, as (9, 0) for Hopper; AMD's numbers mean other things, and (8, 0) promises the least."""
    if device.type != "cuda":
        return 9, 0
    return (8, 0) if torch.version.hip is not None else torch.cuda.get_device_capability(device)


@functools.cache
def processors(device: torch.device) -> int:
    """Number of large programs that a GPU runs at the same time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def why_no_kernels(device: torch.device) -> str | None:
    """Reason why the Triton kernels are not used on a device; None where they are."""
    if device.type != "cuda":
        return f"{device.type} has no Triton kernels"
    if (reason := _switched_off(device)) is not None:
        return reason
    if (found := capability(device)) < OLDEST:
        return f"the kernels need compute capability 8.0 or newer, this GPU has {found[0]}.{found[1]}"
    return None if HAS_TRITON else "the triton package is not installed"


@functools.cache
def architecture(device: torch.device) -> str:
    """Name of an AMD GPU's architecture, as gfx942."""
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


def _switched_off(device: torch.device) -> str | None:
    if ASKED == "off":
        return f"{SWITCH}=off switches the kernels off"
    if ASKED not in ("auto", "on"):
        return f"{SWITCH} is {ASKED!r}, which is none of auto, on, off"
    if torch.version.hip is not None and ASKED == "auto" and architecture(device) not in AMD:
        return f"the kernels were compiled for {' and '.join(AMD)} of AMD's; {SWITCH}=on tries them on {architecture(device)}"
    return None


def runs_triton(device: torch.device) -> bool:
    """Whether kernels without matrix products run on a device: of the loss, norms of the model, dropout."""
    return (
        device.type == "cuda" and HAS_TRITON and capability(device) >= OLDEST_WITHOUT_PRODUCTS
        and _switched_off(device) is None
    )  # fmt: skip


def rounds_before_adding(device: torch.device) -> bool:
    """Whether torch.addmm in 16 bits rounds the product before it adds it: cuBLAS from Hopper on (measured there; newer ones
    are taken to be the same, and so are AMD's). What is added is then lost where it is under half of the product's last bit."""
    return device.type == "cuda" and (torch.version.hip is not None or capability(device) >= (9, 0))


def has_little_memory(device: torch.device) -> bool:
    """Whether a program has 64 KiB of shared memory: AMD's GPUs."""
    return device.type == "cuda" and torch.version.hip is not None


def has_copy_engine(device: torch.device) -> bool:
    """Whether kernels may read through tensor descriptors, and keep as much on their way as it takes for that to pay: Hopper,
    and Blackwell in data centres. Blackwell's cards (12.x) have the engine, and less than half of the memory."""
    return capability(device)[0] in (9, 10)
