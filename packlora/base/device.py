"""The device that a run computes on, and the dtype that it computes in."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from packlora.config import Run
from packlora.errors import InputError, plural

DTYPES = ("float32", "bfloat16", "float16", "float64")
BFLOAT16_SINCE = 8
"""The first compute capability, its major number, that multiplies bfloat16."""


def choose_device(name: str) -> torch.device:
    """Device by name: auto is the current GPU of CUDA (or of AMD, by torch's build for it) if there is one, else the CPU; mps
    must be asked for. A numbered GPU becomes the current one, on which kernels are launched. Raises InputError for a device
    that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device: {name!r} is not a device; use auto, cpu, cuda, cuda:<number> or mps") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"device: {name!r} is not supported; use auto, cpu, cuda, cuda:<number> or mps")
    if device.type == "mps" and (device.index or not torch.backends.mps.is_available()):
        raise InputError(f"device: {name!r} is not there; mps is the one GPU of a Mac with Apple's chips")
    if device.type == "cpu" and device.index:
        raise InputError(f"device: {name!r} is not there; this machine's processors are one device, cpu")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        here = plural(torch.cuda.device_count(), "usable GPU")
        raise InputError(f"device: {name!r} is not there; this machine has {here}")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def usual_dtype(run: Run) -> str:
    """The run's dtype; of auto that of the run in the output folder, where there is one, else native_dtype. Raises as
    choose_device."""
    if run.dtype == "float64" and run.device == "mps":
        raise InputError("dtype: float64 is not there on device: mps; use float32, bfloat16 or float16")
    if run.dtype != "auto":
        return run.dtype
    record = Path(run.output_dir) / "run.json"
    try:  # a run.json that is none is refused when it is read
        saved = json.loads(record.read_bytes())["config"]["dtype"] if record.is_file() else None
        if saved in DTYPES:
            return str(saved)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        pass
    return native_dtype(choose_device(run.device))


def native_dtype(device: torch.device) -> str:
    """16 bits that a GPU computes in: bfloat16 where it can, else float16. float32 on a CPU."""
    if device.type == "cuda":
        is_new = torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= BFLOAT16_SINCE
        return "bfloat16" if is_new else "float16"
    if device.type == "mps":
        return "bfloat16" if torch.backends.mps.is_macos_or_newer(14, 0) else "float16"
    return "float32"


def settle_dtype(run: Run) -> None:
    """Replace the run's dtype: auto by the dtype that it means here. Raises as usual_dtype."""
    found = usual_dtype(run)
    if run.dtype == "auto":
        run.dtype = found  # type: ignore[assignment]
