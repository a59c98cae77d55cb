"""The kernels' sizes that a device was fastest with, on disk beside the measured plans, in the folder kernels:

    {"schema": 1, "device": "NVIDIA H200", "driver": "570.86", "versions": {...},
     "kernels": {"down": {"fields": {"down_m": 64, ...}, "ratios": {"usual": [1.0, 1.0], ...}, "failed": {}, "date": "..."}}}

`use_tuned` reads it, once for a device and process. A file that is broken, or of another device, driver or other versions, is
ignored with one warning. tune/kernel_sizes.py measures.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from packlora.ops.lora_linear.kernels.config import BITS_16, Sizes, use, usual
from packlora.plans import identity as identity_of
from packlora.plans.device_file import DeviceFile

SCHEMA = 1
Fields = dict[str, int]
"""Fields of Sizes that differ from the usual ones."""


@dataclass(frozen=True, slots=True)
class Record:
    """Tuning result of one kernel.

    fields: sizes to use, empty where the usual ones are best. ratios: time relative to the usual sizes, by `described`:
    geometric mean over cases, and the worst case. failed: reason why there is no time, by candidate."""

    fields: Fields
    ratios: dict[str, tuple[float, float]]
    failed: dict[str, str] = field(default_factory=dict)
    date: str = ""


def described(fields: Fields) -> str:
    """Sizes as a text, for a report and as a name: `grad_m 64, grad_n 128`."""
    return ", ".join(f"{name} {value}" for name, value in fields.items()) or "usual"


def combined(chosen: Mapping[str, Fields], usual: Sizes = BITS_16) -> Sizes:
    """The sizes of all kernels: those chosen, by name of the kernel, in the place of the usual ones of the device.

    Raises:
        TypeError: there is no such size.
        ValueError: a block is no power of two that kernels take, or a number of warps or stages is not one of theirs.
    """
    fields = {name: value for own in chosen.values() for name, value in own.items()}
    for name, value in fields.items():
        block = name.endswith(("_m", "_n", "_k", "_r"))
        chunk = name.endswith(("_chunk", "_chunks"))  # of tokens, which are never tuned
        if chunk or value not in ((16, 32, 64, 128, 256, 512) if block else range(1, 17)):
            raise ValueError(f"{name} is {value}")
    return replace(usual, **fields)  # type: ignore[arg-type]


def driver() -> str:
    """The version of NVIDIA's driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
    return next((word for word in text.split() if word[0].isdigit() and "." in word), "unknown")


class KernelCache(DeviceFile[Record]):
    """The records of one device, by kernel."""

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        super().__init__(device, "kernels", SCHEMA, _record, asdict, path, driver=driver())

    def known(self) -> dict[str, Record]:
        """Empty where nothing is known; warns where there is a file that cannot be used."""
        records, unused = self.read()
        if unused:
            warnings.warn(
                f"sizes of kernels measured earlier are not used: {unused}; packlora tune measures them", stacklevel=3
            )
        return records


def _record(value: Any) -> Record:
    """Raises one of device_file.DAMAGED for anything that put cannot have written."""
    ratios = {str(name): (float(mean), float(worst)) for name, (mean, worst) in value["ratios"].items()}
    if not all(math.isfinite(number) and number > 0 for own in ratios.values() for number in own):
        raise ValueError("a ratio is not a positive number")
    failed = {str(name): str(reason) for name, reason in value["failed"].items()}
    fields = {str(name): int(size) for name, size in value["fields"].items()}
    combined({"": fields})
    return Record(fields, ratios, failed, str(value["date"]))


# --- use ---------------------------------------------------------------------------------------------------------------


@functools.cache
def tuned(device: torch.device) -> dict[str, Fields]:
    """Sizes that are not the usual ones, by kernel; read once for a device and process."""
    if not identity_of.has_kernels(device):
        return {}
    return {name: record.fields for name, record in KernelCache(device).known().items() if record.fields}


def forget(device: torch.device) -> None:
    """Read the file again when sizes are needed next; calls have the usual sizes until then."""
    tuned.cache_clear()
    use(device, None)


def use_tuned(device: torch.device) -> None:
    """Make the kernels use the sizes that were measured on this device, where there are any."""
    if found := tuned(device):
        use(device, combined(found, usual(device)))


def identity(device: torch.device) -> str | None:
    """Short hash of the kernel sizes in use; None for the usual ones. Plans that were measured with other sizes are not
    used."""
    found = tuned(device)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12] if found else None
