"""Measured cost of the output layer and the loss beside a decoder layer: stages of a pipeline are cut by it.

Counted operations do not tell it: a vocabulary of an odd number of words, say, makes a product slow. `packlora tune` measures
the two (tune/head.py), and what it finds is remembered by device:

    {"schema": 1, "device": "NVIDIA H200", "versions": {...},
     "heads": {"llama 80x8192 128256 words bfloat16": {"tokens": 8192, "layer_s": 0.045, "head_s": 0.049}}}
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from packlora.config import Run
from packlora.plans.device_file import DeviceFile
from packlora.runtime.prepared_job import ModelShape

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class HeadCost:
    """Seconds of forward and backward of a microbatch without adapters: layer_s of a layer, the mean of all; head_s of the
    output layer and the loss, where all tokens but the first of each sample are labels."""

    tokens: int
    layer_s: float
    head_s: float

    @property
    def in_layers(self) -> float:
        return self.head_s / self.layer_s


def known_head(run: Run, shape: ModelShape, device: torch.device) -> float | None:
    """HeadCost.in_layers, or None where it was not measured."""
    found = _file(device).read()[0].get(_key(run, shape))
    return None if found is None else found.in_layers


def remember(run: Run, shape: ModelShape, device: torch.device, cost: HeadCost) -> None:
    """Raises OSError where nothing can be written."""
    _file(device).put({_key(run, shape): cost})


def _key(run: Run, shape: ModelShape) -> str:
    words = (
        shape.model_type, f"{shape.parameters / 1e9:.3g}B", f"{shape.layers}x{shape.hidden}", f"{shape.vocabulary} words",
        run.dtype, "checkpointing" if run.gradient_checkpointing else "", f"liger-{run.liger}".lower(),
    )  # fmt: skip
    return " ".join(word for word in words if word)


def _file(device: torch.device) -> DeviceFile[HeadCost]:
    return DeviceFile(device, "heads", SCHEMA, lambda value: _checked(HeadCost(**value)), asdict)


def _checked(cost: HeadCost) -> HeadCost:
    if not (0 < cost.layer_s < math.inf and 0 < cost.head_s < math.inf):
        raise ValueError("a time is a positive number")
    return cost
