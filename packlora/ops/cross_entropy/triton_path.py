"""Losses of a chunk of logits, and their gradient written over them, by Triton kernels (kernel.py).

Shapes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton

from packlora.ops import launcher
from packlora.ops.cross_entropy.kernel import part_gradient_kernel, part_sums_kernel, softmax_gradient_kernel
from packlora.ops.cross_entropy.reference import IGNORE
from packlora.ops.gpu import on_device

BLOCK = 4096
"""Columns at a time: 16 to a thread."""


def softmax_gradient(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, weights_C: torch.Tensor, gradient: bool
) -> torch.Tensor:
    """As torch_path.softmax_gradient. The rows of the logits are contiguous; weights are float32."""
    losses_C = torch.empty_like(weights_C)
    C, V = logits_CV.shape
    with on_device(logits_CV.device):
        launcher.launch(
            softmax_gradient_kernel, (C,), (logits_CV, labels_C, weights_C, losses_C, V, logits_CV.stride(0)),
            IGNORE=IGNORE, GRADIENT=gradient, BLOCK=min(BLOCK, triton.next_power_of_2(V)), num_warps=8, num_stages=3,
        )  # fmt: skip
    return losses_C


def part_sums(logits_Cv: torch.Tensor, here_C: torch.Tensor) -> torch.Tensor:
    """As torch_path.part_sums, in float32."""
    C, v = logits_Cv.shape
    found = torch.empty(2, C, device=logits_Cv.device)
    with on_device(logits_Cv.device):
        launcher.launch(
            part_sums_kernel, (C,), (logits_Cv, here_C, found, C, v, logits_Cv.stride(0)),
            BLOCK=min(BLOCK, triton.next_power_of_2(v)), num_warps=8, num_stages=3,
        )  # fmt: skip
    return found


def part_gradient(
    logits_Cv: torch.Tensor, here_C: torch.Tensor, weights_C: torch.Tensor, sum_C: torch.Tensor, ignored_C: torch.Tensor
) -> None:
    """As torch_path.part_gradient; weights and sums are float32."""
    C, v = logits_Cv.shape
    with on_device(logits_Cv.device):
        launcher.launch(
            part_gradient_kernel, (C,),
            (logits_Cv, here_C, weights_C, sum_C, ignored_C.to(torch.int32), v, logits_Cv.stride(0)),
            BLOCK=min(BLOCK, triton.next_power_of_2(v)), num_warps=8, num_stages=3,
        )  # fmt: skip
