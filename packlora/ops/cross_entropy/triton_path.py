"""Losses of a chunk of logits, and their gradient written over them, by one Triton kernel (kernel.py).

Shapes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton

from packlora.ops import launcher
from packlora.ops.cross_entropy.kernel import softmax_gradient_kernel
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
