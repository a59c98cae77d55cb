"""What jobs train beside low-rank adapters of linear layers, where the owners of tokens are on the device: for CUDA graphs.

Each job's module is given all tokens, and a mask on the device chooses those that are its own. So what is recorded once serves
any owners. Others' tokens are zeros in what it multiplies: their gradients there are zeros too, whatever they are.

Shapes: T tokens, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from packlora.adapters.norms import NormHandle
from packlora.adapters.owners import TokenOwners
from packlora.ops.lora_linear.types import Segment

W = TypeVar("W")


class OwnerTable:
    """The adapter of each token, on the device [T] int32; -1 for tokens without one."""

    def __init__(self, total: int, device: torch.device) -> None:
        self.owners_T = torch.full((total,), -1, dtype=torch.int32, device=device)

    def write(self, segments: Sequence[Segment]) -> None:
        """Replace the owners; what runs on the device later reads the new ones."""
        own = np.full(len(self.owners_T), -1, np.int32)
        for segment in segments:
            own[segment.rows] = segment.adapter
        table = torch.from_numpy(own)
        self.owners_T.copy_(table.pin_memory() if self.owners_T.is_cuda else table, non_blocking=True)


class KeptNorm:
    """DoRA's norm [N] of one adapter in a buffer that graphs read. It is computed outside of them, once the adapter changed."""

    def __init__(self, norm: NormHandle) -> None:
        self._norm, self._seen = norm, norm.get()
        self._kept_N = self._seen.clone()

    def get(self) -> torch.Tensor:
        """The norm of the adapter as it was when owners were written last."""
        return self._kept_N

    def write(self, segments: Sequence[Segment]) -> None:
        """Bring it up to date."""
        if (norm_N := self._norm.get()) is not self._seen:
            self._kept_N.copy_(norm_N)
            self._seen = norm_N


@contextmanager
def _kept_norms(adapters: Iterable[Any], moving: Any) -> Iterator[None]:
    """Let the adapters of embeddings that have a norm read it where it is kept for graphs."""
    norms = {own: own.norm for own in adapters if getattr(own, "norm", None) is not None}
    for own, norm in norms.items():
        own.norm = moving.tables((KeptNorm, norm.number), (), partial(KeptNorm, norm))
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
    moving: Any = owners.moving
    here = {number: weights for number, weights in adapters.items() if number in owners.adapters}
    with _kept_norms(here.values(), moving):
        if not moving.moves:
            (weights,) = here.values()
            return own(weights, x)
        segments = tuple(Segment(*one) for one in owners.segments)
        table = moving.tables(OwnerTable, segments, lambda: OwnerTable(owners.total, x.device))
        y = base()
        for number, weights in here.items():
            others_T = table.owners_T != number
            out = own(weights, x.masked_fill(_beside(others_T, x), 0) if x.is_floating_point() else x)
            y = torch.where(_beside(others_T, out), y, out)
        return y


def _beside(mask_T: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask of tokens with the dimensions of a tensor that has them first."""
    return mask_T.view(-1, *[1] * (like.ndim - 1))
