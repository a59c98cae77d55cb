"""The widest floating dtype of a device, for sums of few numbers: losses, metrics, norms."""

from __future__ import annotations

import torch

WITHOUT_FLOAT64 = {"mps"}
"""Kinds of devices that hold no float64 tensor."""


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64; float32 on a device that has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in the widest dtype of its device."""
    return x.to(wide_dtype(x.device))
