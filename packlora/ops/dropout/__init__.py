"""Dropout of x by counter-based masks: `keys` is the specification, `kernel` computes the same on a GPU."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from packlora.ops.dropout.keys import dropout_factor, dropped
from packlora.ops.gpu import on_device, runs_triton


def dropout(x_TK: torch.Tensor, keys_T2: torch.Tensor, salt: int, p: float) -> torch.Tensor:
    """x with dropped elements zero and the others scaled by 1 / (1 - rate). A NaN in a dropped element is dropped too."""
    return masked(x_TK, keys_T2, salt, p, scaled=True)


def masked(
    x_TK: torch.Tensor, keys_T2: torch.Tensor, salt: int, p: float, scaled: bool = False,
    launches: dict[Hashable, Any] | None = None,
) -> torch.Tensor:  # fmt: skip
    """x with dropped elements zero; the others as they are, or scaled as dropout scales them. launches: see launcher.launch."""
    if p == 0.0:
        return x_TK
    by_hand = not (x_TK.requires_grad and torch.is_grad_enabled())  # the kernel is none of autograd's operations
    if by_hand and x_TK.dtype != torch.float64 and x_TK.stride(-1) == 1 and runs_triton(x_TK.device):
        from packlora.ops.dropout.kernel import masked as masked_by_kernel

        with on_device(x_TK.device):
            return masked_by_kernel(x_TK, keys_T2, salt, p, scaled, launches)
    gone = dropped(keys_T2, salt, x_TK.shape[-1], p)
    return (x_TK * dropout_factor(p)).masked_fill_(gone, 0.0) if scaled else x_TK.masked_fill(gone, 0.0)
