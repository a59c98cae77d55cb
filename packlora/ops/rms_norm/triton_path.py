"""Launches of the kernels of kernel.py. Nothing here waits for the device.

Shapes: x [..., D], of R rows; weight [D]. Rows are taken in the order in which those of x lie in memory, so that a transposed
view is read, and its result written, from front to back.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import torch
import triton

from packlora.ops import launcher
from packlora.ops.gpu import on_device
from packlora.ops.rms_norm.kernel import rms_backward_kernel, rms_forward_kernel

ELEMENTS = 2048
"""Elements of a program's tile where rows are shorter: 16 for each thread."""
_LAUNCHES: dict[Hashable, launcher.CachedLaunch] = {}


def forward(x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float, rounding: str) -> torch.Tensor:
    """y, its rows dense in the order of x's."""
    x, order, stride = _rows(x)
    y, weight_D = _dense(x, order), weight_D.contiguous()
    D = x.shape[-1]
    R, (BLOCK, ROWS, num_warps) = x.numel() // D, _sizes(D)
    aligned = (x.data_ptr() | weight_D.data_ptr()) % 16
    with on_device(x.device):
        launcher.launch(
            rms_forward_kernel, (-(-R // ROWS),), (x, weight_D, y, R, stride),
            launcher.bounded(_LAUNCHES), ("forward", x.device, x.dtype, R, D, stride, eps, offset, rounding, aligned),
            EPS=eps, OFFSET=offset, ROUNDED=rounding == "llama", D=D, ROWS=ROWS, BLOCK=BLOCK,
            num_warps=num_warps, num_stages=1,
        )  # fmt: skip
    return y


def backward(x: torch.Tensor, weight_D: torch.Tensor, dy: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """dL/dx, its rows dense in the order of x's. dy [..., D] is copied where its rows do not lie in that order."""
    x, order, stride = _rows(x)
    dx, weight_D = _dense(x, order), weight_D.contiguous()
    dy_stride = row_stride(dy, order)
    if dy_stride is None:
        dy, dy_stride = _dense(x, order).copy_(dy), x.shape[-1]
    D = x.shape[-1]
    R, (BLOCK, ROWS, num_warps) = x.numel() // D, _sizes(D)
    aligned = (x.data_ptr() | weight_D.data_ptr() | dy.data_ptr()) % 16
    with on_device(x.device):
        launcher.launch(
            rms_backward_kernel, (-(-R // ROWS),), (x, weight_D, dy, dx, R, stride, dy_stride),
            launcher.bounded(_LAUNCHES), ("backward", x.device, x.dtype, R, D, stride, dy_stride, eps, offset, aligned),
            EPS=eps, OFFSET=offset, D=D, ROWS=ROWS, BLOCK=BLOCK, num_warps=num_warps, num_stages=1,
        )  # fmt: skip
    return dx


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, list[int] | None, int]:
    """x, or a copy where its rows are not whole at one stride; its dimensions but the last in the order in which rows lie,
    outermost first (None: as they come); and elements from one row to the next."""
    if x.is_contiguous():
        return x, None, x.shape[-1]
    strides = x.stride()
    order = sorted(range(x.ndim - 1), key=lambda dim: -strides[dim])
    stride = row_stride(x, order)
    return (x.contiguous(), None, x.shape[-1]) if stride is None else (x, order, stride)


def row_stride(x: torch.Tensor, order: Sequence[int] | None) -> int | None:
    """Elements from one row to the next, rows being taken in this order of dimensions; None where it is not one number, or
    where rows are not contiguous."""
    if order is None:
        return x.shape[-1] if x.is_contiguous() else row_stride(x, range(x.ndim - 1))
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    stride, rows = x.shape[-1], 1
    for dim in reversed(order):
        if rows == 1:
            stride = x.stride(dim) if x.shape[dim] > 1 else stride
        elif x.shape[dim] > 1 and x.stride(dim) != stride * rows:
            return None
        rows *= x.shape[dim]
    return stride


def _dense(x: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """Uninitialised tensor of x's shape and dtype, whose rows are dense in this order of dimensions."""
    if order is None:
        return torch.empty_like(x)
    return torch.empty_permuted(x.shape, (*order, x.ndim - 1), dtype=x.dtype, device=x.device)


@functools.cache
def _sizes(D: int) -> tuple[int, int, int]:
    """Columns and rows of a program's tile, and its warps: 16 elements a thread, 32 in the widest rows."""
    BLOCK = triton.next_power_of_2(D)
    return BLOCK, max(1, ELEMENTS // BLOCK), min(16, max(4, BLOCK // 512))
