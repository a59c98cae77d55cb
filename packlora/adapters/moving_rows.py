"""Tensors that jobs train beside adapters of linear layers, where the owners of tokens are on the device: for CUDA graphs.

Experts sort tokens by owners that they read from the device. Of other modules each job's is given all tokens, and a mask on the
device chooses those that are its own. So what is recorded once serves any owners. Others' tokens are zeros in what is
multiplied: their gradients there are zeros too, whatever they are.

Shapes: T tokens, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from packlora.adapters.owners import TokenOwners
from packlora.ops.lora_linear.types import Segment

W = TypeVar("W")


class OwnerTable:
    """The owner of each token on the device, int64 [T], as its place among some adapters; their number for all others.

    Args:
        places: of the adapters, by number.
    """

    def __init__(self, total: int, places: Mapping[int, int], device: torch.device) -> None:
        self._places = places
        self.owners_T = torch.full((total,), len(places), device=device)

    def write(self, segments: Sequence[Segment]) -> None:
        """Replace the owners; what runs on the device later reads the new ones."""
        own = np.full(len(self.owners_T), len(self._places))
        for segment in segments:
            own[segment.rows] = self._places.get(segment.adapter, len(self._places))
        table = torch.from_numpy(own)
        self.owners_T.copy_(table.pin_memory() if self.owners_T.is_cuda else table, non_blocking=True)


def owners_on_device(owners: TokenOwners, numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Owners as OwnerTable has them, in a tensor that holds those of every microbatch. numbers: of the adapters."""
    segments, places = tuple(Segment(*one) for one in owners.segments), {n: at for at, n in enumerate(numbers)}
    key = (OwnerTable, tuple(numbers))
    table: OwnerTable = owners.boundaries.tables(key, segments, lambda: OwnerTable(owners.total, places, device))
    return table.owners_T


@dataclass(frozen=True, slots=True)
class _Kept:
    """A norm that is there."""

    norm: torch.Tensor

    def get(self) -> torch.Tensor:
        return self.norm


@contextmanager
def _kept_norms(adapters: Iterable[Any], owners: TokenOwners) -> Iterator[None]:
    """Let the adapters of embeddings that have a norm read it where it is kept for graphs."""
    norms = {own: own.norm for own in adapters if getattr(own, "norm", None) is not None}
    for own, norm in norms.items():
        own.norm = _Kept(owners.boundaries.kept(norm.number, norm.get))
    try:
        yield
    finally:
        for own, norm in norms.items():
            own.norm = norm


def by_moving_owner(
    adapters: Mapping[int, W], owners: TokenOwners, x: torch.Tensor, base: Callable[[], torch.Tensor],
    own: Callable[[W, torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Outputs of a module [T, ...] for the tokens of a microbatch.

    Args:
        adapters: by number, what some owners have.
        owners: active ones, with segments that may move.
        x: input of the module with T tokens in the first dimension; ids of an embedding.
        base: gives the outputs of the frozen module for x.
        own: gives the outputs of one owner for all tokens of an input like x.
    """
    here = {number: weights for number, weights in adapters.items() if number in owners.adapters}
    with _kept_norms(here.values(), owners):
        if owners.boundaries.known:
            (weights,) = here.values()
            return own(weights, x)
        owners_T, y = owners_on_device(owners, tuple(here), x.device), base()
        for at, weights in enumerate(here.values()):
            others_T = owners_T != at
            out = own(weights, x.masked_fill(_beside(others_T, x), 0) if x.is_floating_point() else x)
            y = torch.where(_beside(others_T, out), y, out)
        return y


def _beside(mask_T: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask of tokens with the dimensions of a tensor that has them first."""
    return mask_T.view(-1, *[1] * (like.ndim - 1))
