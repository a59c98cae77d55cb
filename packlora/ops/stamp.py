"""What the host can see of a tensor, to tell whether what was made from it still stands.

Everything that this package prepares from parameters and keeps (packed copies, scales, norms, siblings' outputs) goes by one
rule. It stands while the tensors are the same objects with the same stamps. Writes that leave no trace on the host, through
.data or by a kernel, only their author knows of: who keeps something says whether such writes happen ("trusted" or not).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Stamps = list[tuple[int, int]] | None


def stamps(tensors: Iterable[torch.Tensor]) -> Stamps:
    """Where their data lie, and their versions; None where one counts no versions, as a tensor made in inference mode: what is
    made of it never stands."""
    found = []
    for tensor in tensors:
        if tensor.is_inference():
            return None
        found.append((tensor.data_ptr(), tensor._version))
    return found
