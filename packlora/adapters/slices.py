"""Slices of frozen layers: what adapters ask of one where a process holds a part of a layer's weight.

Whoever cuts a model gives its layers their slices (sharded.py, experts/part.py); nothing here knows how a layer is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Slice(Protocol):
    """The slice of an adapter's tensors that a process has."""

    def is_slice(self, name: str) -> bool:
        """Whether a process has a slice of an adapter's tensor."""

    def is_part(self, name: str) -> bool:
        """Whether a process computes a part of the gradient of what it has of an adapter's tensor."""

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a whole tensor of an adapter, from that of what is here."""

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Select what is here from a whole tensor of an adapter."""

    def joined(self, name: str, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor, from those of all processes in their order."""

    def place(self, leaf: str, shape: Sequence[int]) -> tuple[slice, ...]:
        """Place of a frozen tensor of this shape in the whole one; nothing for one that is whole here."""


class LinearSlice(Slice, Protocol):
    """The slice of a linear layer."""

    @property
    def adapted(self) -> Any:
        """The class of the module that puts adapters onto the slice, derived from linear.py's AdaptedLinear."""

    @property
    def add_inputs(self) -> Callable[[torch.Tensor], None] | None:
        """Adds up sums over W's inputs over the processes, in place; None where all inputs are here."""


def slice_of(linear: torch.nn.Module) -> LinearSlice | None:
    """The slice that a linear layer is; None of a whole one."""
    found: LinearSlice | None = vars(linear).get("shard")
    return found
