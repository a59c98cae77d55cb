"""Measurements of the profiler on disk: one readable JSON file per device, in the folder profiles beside that of the plans.

    {"schema": 1, "device": "NVIDIA H200", "versions": {...},
     "profiles": {"llama 8.03B bfloat16 ...": [{"tokens": 4096, "squared": 2500000, "seconds": 0.24, "bytes": 31000000000}]}}

seconds null: out of memory. A file that is broken, or of another device or other versions, is replaced by the next write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from packlora.plans.device_file import DeviceFile
from packlora.plans.identity import cache_path, device_name, measured_versions

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Point:
    """One measured microbatch. squared: sum of the squares of its samples' lengths. seconds: of forward and backward, None
    where memory ran out. bytes: peak on the device.
    """

    tokens: int
    squared: int
    seconds: float | None
    bytes: int | None


class ProfileCache:
    """The points of one device, by what was measured."""

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        self.path = path or cache_path(device, "profiles")
        identity = {"schema": SCHEMA, "device": device_name(device), "versions": measured_versions()}
        self._file = DeviceFile(self.path, identity, "profiles", _profiles, lambda points: list(map(asdict, points)))

    def get(self, key: str) -> list[Point]:
        """Empty where nothing is known."""
        return self._file.read()[0].get(key, [])

    def put(self, key: str, points: Sequence[Point]) -> None:
        """Replace the points of a key; others stay. Raises OSError where nothing can be written."""
        self._file.put({key: list(points)})


def _profiles(found: Mapping[str, Any]) -> dict[str, list[Point]]:
    return {str(key): [_point(value) for value in values] for key, values in found.items()}


def _point(value: dict[str, Any]) -> Point:
    """Raises ValueError, KeyError or TypeError for anything that put cannot have written."""
    point = Point(**value)
    if not 0 < point.tokens <= point.squared:
        raise ValueError("a microbatch has tokens")
    if point.seconds is not None and not (math.isfinite(point.seconds) and point.seconds > 0):
        raise ValueError("a time is a positive number")
    return point
