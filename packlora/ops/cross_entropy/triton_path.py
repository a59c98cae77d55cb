"""Losses of a chunk of logits, and their gradient written over them, by Triton kernels (kernel.py).

Shapes: C rows of a chunk, V vocabulary. Rows of logits are contiguous; other operands may lie in any way. Between two rows of
logits may be columns of no word (rows.py), which hold anything; what writes a gradient writes 0 there.
"""

from __future__ import annotations

import torch
import triton

from packlora.ops import launcher
from packlora.ops.cross_entropy.kernel import part_gradient_kernel, part_sums_kernel, softmax_gradient_kernel
from packlora.ops.cross_entropy.reference import IGNORE
from packlora.ops.cross_entropy.rows import room
from packlora.ops.gpu import on_device

BLOCK = 4096
"""Columns at a time: 16 to a thread."""


def softmax_gradient(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, weights_C: torch.Tensor, gradient: bool
) -> torch.Tensor:
    """Compute softmax.softmax_gradient with a kernel; weights are float32."""
    labels_C, weights_C = labels_C.contiguous(), weights_C.contiguous()
    losses_C = torch.empty_like(weights_C)
    (C, V), width = logits_CV.shape, room(logits_CV)
    with on_device(logits_CV.device):
        launcher.launch(
            softmax_gradient_kernel, (C,), (logits_CV, labels_C, weights_C, losses_C, V, width, logits_CV.stride(0)),
            IGNORE=IGNORE, GRADIENT=gradient, PADDED=width > V, BLOCK=_block(width), num_warps=8, num_stages=3,
        )  # fmt: skip
    return losses_C


def part_sums(logits_Cv: torch.Tensor, here_C: torch.Tensor) -> torch.Tensor:
    """Compute parts.part_sums with a kernel, in float32."""
    (C, v), width = logits_Cv.shape, room(logits_Cv)
    found = torch.empty(2, C, device=logits_Cv.device)
    with on_device(logits_Cv.device):
        launcher.launch(
            part_sums_kernel, (C,), (logits_Cv, here_C.contiguous(), found, C, v, width, logits_Cv.stride(0)),
            PADDED=width > v, BLOCK=_block(width), num_warps=8, num_stages=3,
        )  # fmt: skip
    return found


def part_gradient(
    logits_Cv: torch.Tensor, here_C: torch.Tensor, weights_C: torch.Tensor, sum_C: torch.Tensor, ignored_C: torch.Tensor
) -> None:
    """Compute parts.write_gradient with a kernel; weights and sums are float32."""
    (C, v), width = logits_Cv.shape, room(logits_Cv)
    by_row = [own.contiguous() for own in (here_C, weights_C, sum_C, ignored_C.to(torch.int32))]
    with on_device(logits_Cv.device):
        launcher.launch(
            part_gradient_kernel, (C,), (logits_Cv, *by_row, v, width, logits_Cv.stride(0)),
            PADDED=width > v, BLOCK=_block(width), num_warps=8, num_stages=3,
        )  # fmt: skip


def _block(width: int) -> int:
    size: int = triton.next_power_of_2(width)
    return min(BLOCK, size)
