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
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from packlora.ops.lora_linear.kernels.candidates import KERNELS, Fields, combined, described
from packlora.ops.lora_linear.kernels.config import use, usual
from packlora.plans import identity as identity_of
from packlora.plans.device_file import DeviceFile
from packlora.plans.identity import cache_path, device_name, measured_versions

SCHEMA = 1
MARGIN = 0.02
"""Sizes are changed where that saves more than this, and no case takes so much longer."""
USUAL = described({})


@dataclass(frozen=True, slots=True)
class Record:
    """Of one kernel. fields: the sizes to use, none where the usual ones are best. ratios: by candidates.described, time over
    that of the usual sizes: geometric mean over cases, and the worst case. failed: why there is no time, by candidate."""

    fields: Fields
    ratios: dict[str, tuple[float, float]]
    failed: dict[str, str] = field(default_factory=dict)
    date: str = ""

    @staticmethod
    def of(name: str, ratios: Mapping[str, tuple[float, float]], failed: Mapping[str, str]) -> Record:
        """With the best of the candidates that have a time."""
        by_name = {described(fields): fields for fields in KERNELS[name].others}
        good = {own: mean for own, (mean, worst) in ratios.items() if own in by_name and worst < 1 + MARGIN}
        best = min(good, key=good.__getitem__, default=USUAL)
        fields = by_name[best] if best != USUAL and good[best] < 1 - MARGIN else {}
        return Record(dict(fields), dict(ratios), dict(failed), datetime.now(UTC).isoformat(timespec="seconds"))


def driver() -> str:
    """The version of NVIDIA's driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
    return next((word for word in text.split() if word[0].isdigit() and "." in word), "unknown")


class KernelCache:
    """The records of one device, by kernel."""

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        self.path = path or cache_path(device, "kernels")
        self.identity = {
            "schema": SCHEMA, "device": device_name(device), "driver": driver(), "versions": measured_versions(),
        }  # fmt: skip
        self._file = DeviceFile(self.path, self.identity, "kernels", _records, asdict)

    def read(self) -> dict[str, Record]:
        """Empty where nothing is known; warns where there is a file that cannot be used."""
        records, unused = self._file.read()
        if unused:
            warnings.warn(
                f"sizes of kernels measured earlier are not used: {unused}; packlora tune measures them", stacklevel=3
            )
        return records

    def put(self, name: str, record: Record) -> None:
        """Replace the record of a kernel; others stay. Raises OSError where nothing can be written."""
        self._file.put({name: record})


def _records(kernels: Mapping[str, Any]) -> dict[str, Record]:
    records = {str(name): _record(value) for name, value in kernels.items()}
    combined({name: record.fields for name, record in records.items()})
    return records


def _record(value: Any) -> Record:
    """Raises ValueError, KeyError, TypeError or AttributeError for anything that put cannot have written."""
    ratios = {str(name): (float(mean), float(worst)) for name, (mean, worst) in value["ratios"].items()}
    if not all(math.isfinite(number) and number > 0 for own in ratios.values() for number in own):
        raise ValueError("a ratio is not a positive number")
    failed = {str(name): str(reason) for name, reason in value["failed"].items()}
    return Record({str(name): int(size) for name, size in value["fields"].items()}, ratios, failed, str(value["date"]))


# --- use ---------------------------------------------------------------------------------------------------------------


@functools.cache
def tuned(device: torch.device) -> dict[str, Fields]:
    """Sizes that are not the usual ones, by kernel; read once for a device and process."""
    if not identity_of.has_kernels(device):
        return {}
    return {name: record.fields for name, record in KernelCache(device).read().items() if record.fields}


def forget(device: torch.device) -> None:
    """Read the file again when sizes are needed next; calls have the usual sizes until then."""
    tuned.cache_clear()
    use(device, None)


def use_tuned(device: torch.device) -> None:
    """Let the kernels have the sizes that were measured on this device, where there are any."""
    if found := tuned(device):
        use(device, combined(found, usual(device)))


def identity(device: torch.device) -> str | None:
    """Of the sizes in use, in few letters; None of the usual ones. Plans that were measured with other sizes are not used."""
    found = tuned(device)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12] if found else None
