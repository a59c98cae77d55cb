"""The device that a run computes on, and the dtype that it computes in."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from packlora.config import Run
from packlora.errors import InputError

DTYPES = ("float32", "bfloat16", "float16", "float64")
BFLOAT16_SINCE = 8
"""The first compute capability, its major number, that multiplies bfloat16."""


def choose_device(name: str) -> torch.device:
    """Device by name: auto is the current GPU if there is one. A numbered GPU becomes the current one, on which kernels are
    launched. Raises InputError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:<number>") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device: {name!r} is not supported; use auto, cpu, cuda or cuda:<number>")
    if device.type == "cpu" and device.index:
        raise InputError(f"device: {name!r} is not there; this machine's processors are one device, cpu")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise InputError(f"device: {name!r} is not there; this machine has {torch.cuda.device_count()} usable GPUs")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def usual_dtype(run: Run) -> str:
    """The run's dtype; of auto that of the run in the output folder, where there is one, else bfloat16 on a GPU that computes
    in it and float32 elsewhere. Raises as choose_device."""
    if run.dtype != "auto":
        return run.dtype
    record = Path(run.output_dir) / "run.json"
    try:  # a run.json that is none is refused when it is read
        saved = json.loads(record.read_bytes())["config"]["dtype"] if record.is_file() else None
        if saved in DTYPES:
            return str(saved)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        pass
    device = choose_device(run.device)
    known = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= BFLOAT16_SINCE
    return "bfloat16" if known else "float32"


def settle_dtype(run: Run) -> None:
    """Replace the run's dtype: auto by the dtype that it means here."""
    if run.dtype == "auto":
        run.dtype = usual_dtype(run)  # type: ignore[assignment]
