"""How logits of a vocabulary of any number of words lie on a GPU: in rows that begin at aligned places.

Products of the library, of the logits and of their gradient, take an operand whose rows are not aligned several times as long;
and a row of which the end is not aligned is read element by element.

Shapes: C rows of a chunk, V words, D hidden size.
"""

from __future__ import annotations

import torch

ALIGNED = 16
"""Elements. Of a number, Triton knows when it compiles whether 16 divides it."""


def aligned(V: int) -> int:
    """Columns that a row of V words takes if all rows begin at aligned places."""
    return -(-V // ALIGNED) * ALIGNED


def columns(V: int, device: torch.device) -> int:
    """Columns that a row of V words takes on a device: on a CPU alignment brings nothing."""
    return aligned(V) if device.type == "cuda" else V


def logits_of(hidden_CD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """hidden weight', [C, V], in rows of `columns`, of which those of no word hold anything."""
    (C, _), V = hidden_CD.shape, len(weight_VD)
    width = columns(V, hidden_CD.device)
    if width == V:
        return hidden_CD @ weight_VD.T
    rows_CV = torch.empty(C, width, dtype=hidden_CD.dtype, device=hidden_CD.device)[:, :V]
    return torch.mm(hidden_CD, weight_VD.T, out=rows_CV)


def room(logits_CV: torch.Tensor) -> int:
    """Columns of a row that may be read and written: V, or those that logits_of has made."""
    V, stride = logits_CV.shape[1], logits_CV.stride(0)
    return stride if stride == aligned(V) else V
