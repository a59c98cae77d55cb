"""Layout of the parameters of one adapter in one tensor, so that a step of its job is a few operations and not hundreds.

Values, gradients, the optimizer's moments and copies of them are tensors of one layout; what layers and files see are views of
them. Between the views lie elements that belong to nobody: they are zero and stay zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

ALIGNED = 32
"""Elements. Every view begins at a multiple of it: 128 bytes of float32, which every kernel's loads and descriptors take."""
UNDECAYED = ("/bias", "/norm")
"""How names of parameters end on which weight decay does not work."""
SLOW = ("/A", "/weight", "/tokens", "/filter_magnitude")
"""How names end of parameters that learn at the learning rate itself under LoRA+, as PEFT groups them: of those without an A
or a B, all that have more than one dimension, as the magnitude of a convolution."""
ROW = 1024
"""Elements of a row of `total_norm`; the size is a multiple of it."""


class Place(NamedTuple):
    """Elements [start, stop), what lies unused behind them included."""

    start: int
    stop: int
    shape: tuple[int, ...]

    def view(self, elements: torch.Tensor) -> torch.Tensor:
        """The tensor, from the elements that are its place."""
        return elements[: math.prod(self.shape)].view(self.shape)


class FlatLayout:
    """The places of tensors in one tensor of one dimension, by name, in the order in which they lie.

    size: elements of the whole, at least one row.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.places: dict[str, Place] = {}
        start = 0
        for name, shape in shapes.items():
            stop = start + _rounded(math.prod(shape), ALIGNED)
            self.places[name] = Place(start, stop, shape)
            start = stop
        self.size = max(_rounded(start, ROW), ROW)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that lie in `flat` [size]. Writes into them move its version, and the other way round."""
        return {
            name: flat[start : start + math.prod(shape)].view(shape) for name, (start, _, shape) in self.places.items()
        }

    def chunks(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The elements of each place in `flat` [size], of one dimension, by one call."""
        sizes = [place.stop - place.start for place in self.places.values()]
        *chunks, _ = flat.split([*sizes, self.size - sum(sizes)])
        return dict(zip(self.places, chunks, strict=True))


def total_norm(flat: torch.Tensor) -> torch.Tensor:
    """The 2-norm of a tensor [size], first by rows: one long sum in float32 loses 3e-4 of the norm of 10 million elements on
    a CPU, sums of sums 1e-7."""
    norm: torch.Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(flat.view(-1, ROW), dim=1))
    return norm


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
