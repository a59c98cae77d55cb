"""What the row norm is asked: frozen weights, as a matrix or in chunks of rows, with A, B and s.

Shapes: N outputs, K inputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class RowChunks:
    """A frozen weight that is not there as a matrix, such as a quantised one.

    shape: (N, K). read: (start, stop) -> those rows, [stop - start, K], in any floating dtype. tensors: what the rows are
    made from; whoever keeps a norm watches them for changes.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    read: Callable[[int, int], torch.Tensor]
    tensors: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class NormProblem:
    """weight [N, K], A [r, K], B [N, r]; base_N is squared_row_norm(weight) where the caller has kept it."""

    weight: torch.Tensor | RowChunks
    A: torch.Tensor
    B: torch.Tensor
    scaling: float
    base_N: torch.Tensor | None = None

    def check(self, index: int) -> None:
        """Raises ValueError where shapes or devices do not fit; the message has the index."""
        weight, A, B = self.weight, self.A, self.B
        N, K = weight.shape
        if A.ndim != 2 or B.shape != (N, A.shape[0]) or A.shape[1] != K:
            raise ValueError(
                f"problem {index}: A must be [r, {K}] and B [{N}, r] for a weight of {[N, K]}, "
                f"got {list(A.shape)} and {list(B.shape)}"
            )
        if not (A.device == B.device == weight.device):
            raise ValueError(
                f"problem {index}: weight is on {weight.device}, A on {A.device}, B on {B.device}; one device is accepted"
            )
        base = self.base_N
        if base is not None and (base.shape != (N,) or base.device != weight.device):
            raise ValueError(
                f"problem {index}: base_N must be [{N}] on {weight.device}, got {list(base.shape)} on {base.device}"
            )
