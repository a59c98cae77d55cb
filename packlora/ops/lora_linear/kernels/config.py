"""Block sizes, warps and stages of the kernels: those that an H200 was fastest with, and those of a device that was tuned.

Which of them a call has is settled with its tables of segments (tables.SegmentTables.config): other sizes that come into use
later are for tables that are made later. benchmarks/LOG.md has what was measured; tune/candidates.py what else can be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from packlora.ops import gpu
from packlora.ops.gpu import has_copy_engine, has_little_memory


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Block sizes, warps and stages. *_m: tokens, *_n and *_k: columns, *_r: ranks, *_chunk: tokens that one program sums, or
    *_chunks, of which the launch chooses. few_*: where there would be fewer programs than processors take. several_*: where
    no segment has all tokens. narrow_*: of inputs_kernel where it writes dx and there are no more than 16 ranks."""

    down_m: int = 32
    down_k: int = 128
    down_r: int = 64
    down_warps: int = 4
    down_stages: int = 4
    few_down_m: int = 16
    few_down_k: int = 256
    up_m: int = 64
    up_n: int = 64
    up_loop: int = 8
    up_warps: int = 4
    up_stages: int = 2
    grad_m: int = 64
    several_grad_m: int = 32
    grad_n: int = 256
    few_grad_n: int = 128
    grad_r: int = 32
    several_grad_r: int = 32
    grad_warps: int = 4
    several_grad_warps: int = 4
    grad_stages: int = 3
    grad_chunks: tuple[int, ...] = (256, 512, 1024, 2048)
    joint_m: int = 32
    joint_n: int = 128
    joint_warps: int = 4
    joint_stages: int = 4
    scale_m: int = 32
    scale_n: int = 128
    scale_chunk: int = 256
    scale_warps: int = 4
    scale_stages: int = 3
    inputs_m: int = 64
    inputs_k: int = 128
    few_inputs_k: int = 64
    several_inputs_k: int = 64
    inputs_r: int = 64
    inputs_chunks: tuple[int, ...] = (512, 1024)
    inputs_warps: int = 4
    inputs_stages: int = 3
    narrow_k: int = 64
    narrow_stages: int = 4

    @property
    def tokens(self) -> tuple[int, ...]:
        """Block sizes for which SegmentTables must have a table."""
        return (self.down_m, self.few_down_m, self.up_m, *self.grad_chunks, self.scale_chunk, *self.inputs_chunks)


BITS_16 = Sizes()
SMALL_16 = replace(BITS_16, down_stages=3, grad_stages=2)
"""Sizes for GPUs with 64 KiB of shared memory per program: AMD's."""
LARGE_16 = replace(BITS_16, several_grad_m=64, several_grad_r=64, several_grad_warps=8)
"""Sizes for GPUs with more shared memory per program: Hopper, and Blackwell in data centres."""
FLOAT_32 = Sizes(
    down_m=32, down_k=32, down_r=32, down_stages=2, few_down_m=32, few_down_k=32, up_m=32, grad_m=32, grad_n=64, few_grad_n=64,
    grad_stages=2, grad_chunks=(128,), joint_m=32, joint_n=64, joint_stages=2, scale_chunk=64,
    inputs_m=32, inputs_k=64, few_inputs_k=64, inputs_r=32, inputs_chunks=(128,), inputs_stages=2, narrow_k=64,
    narrow_stages=2,
)  # fmt: skip
_TUNED: dict[torch.device, Sizes] = {}


def sizes_for(dtype: torch.dtype, device: torch.device) -> Sizes:
    """Tuned sizes of the device for 16 bits where there are any, otherwise the usual ones; float32 has its own."""
    if dtype == torch.float32:
        return FLOAT_32
    return _TUNED.get(_numbered(device)) or usual(device)


def usual(device: torch.device) -> Sizes:
    """Sizes in 16 bits for a device that was not tuned."""
    return LARGE_16 if has_copy_engine(device) else SMALL_16 if has_little_memory(device) else BITS_16


def shared_bytes(device: torch.device) -> int:
    """Shared memory of a program, in bytes."""
    if has_copy_engine(device):
        return 227 * 1024
    if has_little_memory(device):
        return 64 * 1024
    return (163 if gpu.capability(device) in ((8, 0), (8, 7)) else 99) * 1024


def use(device: torch.device, sizes: Sizes | None) -> Sizes | None:
    """Set the sizes of calls in 16 bits that are settled from now on; None: the usual ones. Returns the sizes before."""
    before = _TUNED.pop(_numbered(device), None)
    if sizes is not None:
        _TUNED[_numbered(device)] = sizes
    return before


def _numbered(device: torch.device) -> torch.device:
    """Device with its index: `cuda` becomes the current device, on which new tensors are placed."""
    return torch.empty(0, device=device).device if device.type == "cuda" and device.index is None else device
