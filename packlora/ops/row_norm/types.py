"""Arguments of the row norm: frozen weights, as tensors or by rows, with A, B and s.

Shapes: N outputs, K inputs, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from packlora.ops.lora_linear.frozen import FrozenWeight


def dense_of(weight: torch.Tensor | FrozenWeight) -> torch.Tensor | None:
    """The weight as a tensor [N, K], None where there is none."""
    return weight if isinstance(weight, torch.Tensor) else weight.dense()


@dataclass(frozen=True, slots=True, eq=False)
class NormProblem:
    """weight [N, K], A [r, K], B [N, r]; base_N is squared_row_norm(weight) where the caller has kept it."""

    weight: torch.Tensor | FrozenWeight
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
