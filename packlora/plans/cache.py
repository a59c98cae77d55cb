"""Cache of measured times on disk: one readable JSON file for each device and set of versions, by default in
~/.cache/packlora/plans.

    {"schema": 2, "device": "NVIDIA H200", "versions": {...},
     "cases": {"cuda bfloat16 T2048 ...": {"ms": {"mm/after-mm/after": 0.31, ...}, "failed": {}, "date": "..."}}}

A file that is broken, or of another device or other versions, is ignored with one warning and replaced by the next write: its
figures say nothing about here and now, nor where kernels have other sizes (kernel_sizes.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.plans import identity
from packlora.plans.device_file import DeviceFile

SCHEMA = 2
"""Schema of the file. It is raised whenever the list of plans changes, so that every case is measured again among the new
plans."""
MARGIN = 0.01
"""Less than this is within the noise of a measurement."""


@dataclass(frozen=True, slots=True)
class Record:
    """Measurements of a case: milliseconds and reasons of failure by plan name."""

    ms: dict[str, float]
    failed: dict[str, str] = field(default_factory=dict)
    date: str = ""


def fastest(plans: Iterable[Plan], ms: Mapping[str, float]) -> Plan:
    """The fastest of the plans that have a time; the plain chain, which has one, unless another beats it by MARGIN."""
    best = min((plan for plan in plans if plan.name in ms), key=lambda plan: ms[plan.name], default=CHAIN)
    return best if ms[best.name] < (1 - MARGIN) * ms[CHAIN.name] else CHAIN


class PlanCache(DeviceFile[Record]):
    """The records of one device. The file is read at the first question, and again before every write."""

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        versions = identity.measured_versions()
        if identity.has_kernels(device):
            from packlora.plans import kernel_sizes

            if (sizes := kernel_sizes.identity(device)) is not None:
                versions["kernels"] = sizes
        super().__init__(device, "cases", SCHEMA, _record, asdict, path, "plans", versions=versions)
        self._records: dict[str, Record] | None = None

    def get(self, key: str) -> Record | None:
        """The record of a case by Case.key."""
        if self._records is None:
            self._records, unused = self.read()
            if unused:
                warnings.warn(f"plans measured earlier are not used: {unused}", stacklevel=3)
        return self._records.get(key)

    def put(self, records: Mapping[str, Record]) -> dict[str, Record]:
        self._records = super().put(records)
        return self._records


def _record(value: Any) -> Record:
    """Raises one of device_file.DAMAGED for anything that put cannot have written."""
    ms = {str(name): float(time) for name, time in value["ms"].items()}
    if not all(math.isfinite(time) and time > 0 for time in ms.values()) or CHAIN.name not in ms:
        raise ValueError("a record has no time for the plain chain, or one that is not a positive number")
    failed = {str(name): str(reason) for name, reason in value["failed"].items()}
    return Record(ms, failed, str(value["date"]))
