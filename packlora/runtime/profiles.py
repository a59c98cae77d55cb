"""Knowledge of a model, its jobs and a device, and measurements on disk: one readable JSON file per device, in the folder
profiles beside that of the plans.

    {"schema": 1, "device": "NVIDIA H200", "versions": {...},
     "profiles": {"llama 8.03B bfloat16 ...": [{"tokens": 4096, "squared": 2500000, "seconds": 0.24, "bytes": 31000000000}]}}

seconds null: out of memory. A file that is broken, or of another device or other versions, is replaced by the next write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from packlora.plans.device_file import DeviceFile
from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch

SCHEMA = 1
ROOM_SHARE = 0.92
"""Share of a device's memory that is planned with; the allocator's rounding and other buffers take the rest."""
FITTED = ("cuda", "mps")
MEASURES = ("gradient_checkpointing", "offload_embedding", "activation_offloading")
"""Kinds of devices on which `fit` chooses; keys that it may make true, in this order, of which none changes a number."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured microbatch. squared: sum of the squares of its samples' lengths. seconds: of forward and backward, None
    where memory ran out. bytes: peak on the device.
    """

    tokens: int
    squared: int
    seconds: float | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Profile:
    """Knowledge of a model, its jobs and a device.

    origin: estimated, measured or remembered. cost: seconds of a microbatch, on each stage of the pipeline that the model lies
    on, a device each. kept_bytes, bytes_per_token: of memory at its peak. room: bytes of the device. failed: fewest tokens that
    memory did not hold.
    """

    origin: Literal["estimated", "measured", "remembered"]
    cost: CostModel
    kept_bytes: float
    bytes_per_token: float
    room: int
    points: tuple[Point, ...] = ()

    @property
    def failed(self) -> int | None:
        return min((point.tokens for point in self.points if point.seconds is None), default=None)

    def bytes(self, tokens: int) -> int:
        """Bytes at the peak of a microbatch."""
        return round(self.kept_bytes + self.bytes_per_token * tokens)

    def fits(self, tokens: int) -> bool:
        return self.has_room(self.bytes(tokens)) and (self.failed is None or tokens < self.failed)

    def has_room(self, size: int) -> bool:
        """Whether a device has so many bytes."""
        return size <= ROOM_SHARE * self.room

    def describe(self) -> dict[str, Any]:
        """For run.json and the report."""
        return {
            "origin": self.origin, "cost": asdict(self.cost), "kept_bytes": round(self.kept_bytes),
            "bytes_per_token": round(self.bytes_per_token), "room_bytes": self.room,
            "points": [asdict(point) for point in self.points],
        }  # fmt: skip

    def seconds(self, microbatch: Microbatch) -> float:
        """Seconds of forward and backward, all stages together."""
        return sum(self.cost.by_stage(microbatch))

    def pace(self, microbatch: Microbatch) -> float:
        """Seconds from one microbatch to the next like it: those of the slowest stage."""
        return max(self.cost.by_stage(microbatch))


class ProfileCache:
    """The points of one device, by what was measured."""

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        self._file = DeviceFile(device, "profiles", SCHEMA, _points, lambda points: list(map(asdict, points)), path)
        self.path = self._file.path

    def get(self, key: str) -> list[Point]:
        """Empty where nothing is known."""
        return self._file.read()[0].get(key, [])

    def put(self, key: str, points: Sequence[Point]) -> None:
        """Replace the points of a key; others stay. Raises OSError where nothing can be written."""
        self._file.put({key: list(points)})


def _points(values: list[dict[str, Any]]) -> list[Point]:
    return list(map(_point, values))


def _point(value: dict[str, Any]) -> Point:
    """Raises ValueError, KeyError or TypeError for anything that put cannot have written."""
    point = Point(**value)
    if not 0 < point.tokens <= point.squared:
        raise ValueError("a microbatch has tokens")
    if point.seconds is not None and not (math.isfinite(point.seconds) and point.seconds > 0):
        raise ValueError("a time is a positive number")
    return point
