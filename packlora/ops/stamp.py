"""What the host can see of a tensor, to tell whether what was made from it still stands.

Everything that this package prepares from parameters and keeps (packed copies, scales, norms, siblings' outputs) goes by one
rule. It stands while the tensors are the same objects with the same stamps. Writes that leave no trace on the host, through
.data or by a kernel, only their author knows of: who keeps something says whether such writes happen ("trusted" or not).
"""

from __future__ import annotations

import torch

Stamp = tuple[int, int | None]


def stamp(tensor: torch.Tensor) -> Stamp:
    """Where its data lie, and its version; None where it counts none, as a tensor made in inference mode."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def counted(*stamps: Stamp) -> bool:
    """Whether an in-place operation would show; where it would not, nobody can be trusted."""
    return all(version is not None for _, version in stamps)
