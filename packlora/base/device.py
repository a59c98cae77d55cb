"""The device that a run computes on."""

from __future__ import annotations

import torch

from packlora.errors import InputError


def choose_device(name: str) -> torch.device:
    """auto is the current GPU if there is one; a numbered one becomes the current one, where kernels of anybody start. Raises
    InputError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:<number>") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device: {name!r} is not supported; use auto, cpu, cuda or cuda:<number>")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise InputError(f"device: {name!r} is not there; this machine has {torch.cuda.device_count()} usable GPUs")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device
