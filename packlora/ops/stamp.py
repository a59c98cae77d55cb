"""What the host can see of a tensor, to tell whether what was made from it still stands.

Everything that this package prepares from parameters and keeps (packed copies, scales, norms, siblings' outputs) goes by one
rule. It stands while the tensors are the same objects with the same stamps; where objects may be replaced, while they lie in
the same places with the same versions. Writes that leave no trace on the host, through .data or by a kernel, only their author
knows of: who keeps something says whether such writes happen ("trusted" or not).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Stamps = list[tuple[int, int]] | None
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose data are where they say; others may be spread over devices."""


def stamps(tensors: Iterable[torch.Tensor]) -> Stamps:
    """Where their data lie, and their versions; None where one counts no versions, as a tensor made in inference mode: what is
    made of it never stands."""
    found = []
    for tensor in tensors:
        if tensor.is_inference():
            return None
        found.append((tensor.data_ptr(), tensor._version))
    return found


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where its data lie, in which storage and how. Whoever keeps a place holds a weak reference to the storage
    (StorageWeakRef), so that no later storage can be taken for it."""
    if type(tensor) not in PLAIN:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.untyped_storage()._cdata, tensor.dtype, tensor.shape, tensor.stride()


def version(tensor: torch.Tensor) -> int | None:
    """How often torch's operations wrote into it; None where that is not counted."""
    return None if tensor.is_inference() else tensor._version
