"""Layout of logits of a vocabulary of any size on a GPU, and their products: rows begin at aligned places, and the last words,
fewer than ALIGNED, have products of their own.

The library's products take six to eight times as long where the number of words is not aligned (H200, bfloat16, 1024 rows of
128,257 words: 2.6 ms in the place of 0.4), and a row whose end is not is read element by element.

Shapes: C rows of a chunk, V words, D hidden size.
"""

from __future__ import annotations

import torch

from packlora.ops.gpu import runs_triton

ALIGNED = 16
"""Elements. Of a number, Triton knows when it compiles whether 16 divides it."""


def aligned(V: int) -> int:
    """Columns that a row of V words takes if all rows begin at aligned places."""
    return -(-V // ALIGNED) * ALIGNED


def columns(V: int, device: torch.device) -> int:
    """Columns that a row of V words takes on a device: on a CPU alignment brings nothing."""
    return aligned(V) if device.type == "cuda" else V


def logits_of(hidden_CD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """hidden weight', [C, V], in hidden's dtype, under autocast too, in rows of `columns`; those of no word hold anything."""
    (C, _), V = hidden_CD.shape, len(weight_VD)
    width = columns(V, hidden_CD.device)
    whole = V if width == V else V // ALIGNED * ALIGNED
    rows_CV = torch.empty(C, width, dtype=hidden_CD.dtype, device=hidden_CD.device)[:, :V]
    torch.mm(hidden_CD, weight_VD[:whole].T, out=rows_CV[:, :whole])
    if whole < V:
        torch.mm(hidden_CD, weight_VD[whole:].T, out=rows_CV[:, whole:])
    return rows_CV


def gradient_of(logits_CV: torch.Tensor, weight_VD: torch.Tensor, out_CD: torch.Tensor) -> None:
    """out = logits weight, of logits as logits_of makes them."""
    V = len(weight_VD)
    if room(logits_CV) == V:
        torch.mm(logits_CV, weight_VD, out=out_CD)
        return
    whole = V // ALIGNED * ALIGNED
    # the fewer words first: what is rounded twice is mostly the smaller part
    torch.mm(logits_CV[:, whole:], weight_VD[whole:], out=out_CD)
    out_CD.addmm_(logits_CV[:, :whole], weight_VD[:whole])


def room(logits_CV: torch.Tensor) -> int:
    """Columns of a row that may be read and written: V, or those that logits_of has made."""
    V, stride = logits_CV.shape[1], logits_CV.stride(0)
    return stride if stride == aligned(V) else V


def has_kernels(logits: torch.Tensor) -> bool:
    """Whether kernels compute losses of these logits, and their gradient."""
    return runs_triton(logits.device) and logits.dtype != torch.float64
