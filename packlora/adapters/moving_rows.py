"""What jobs train beside low-rank adapters of linear layers, where the owners of tokens are on the device: for CUDA graphs.

Each job's module is given all tokens, and a mask on the device chooses those that are its own. So what is recorded once serves
any owners. Others' tokens are zeros in what it multiplies: their gradients there are zeros too, whatever they are.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

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


def by_moving_owner(
    adapters: Mapping[int, W], owners: TokenOwners, x: torch.Tensor, base: torch.Tensor,
    own: Callable[[W, torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Outputs of a module [T, ...] for tokens of several jobs.

    Args:
        adapters: by number, what some owners have.
        owners: active ones, with segments that move.
        x: input of the module with T tokens in the first dimension; ids of an embedding.
        base: outputs of the frozen module for x.
        own: gives the outputs of one owner for all tokens of an input like x.
    """
    moving: Any = owners.moving
    segments = tuple(Segment(*one) for one in owners.segments)
    table = moving.tables(OwnerTable, segments, lambda: OwnerTable(owners.total, x.device))
    y = base
    for number, weights in adapters.items():
        if number in owners.adapters:
            others_T = table.owners_T != number
            out = own(weights, x.masked_fill(_beside(others_T, x), 0) if x.is_floating_point() else x)
            y = torch.where(_beside(others_T, out), y, out)
    return y


def _beside(mask_T: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask of tokens with the dimensions of a tensor that has them first."""
    return mask_T.view(-1, *[1] * (like.ndim - 1))
