"""Norms of the rows of W + s B A, DoRA's divisor, as they are defined. This file is the specification; row_norm.py is checked
against it.

Shapes: N outputs, K inputs, r rank.
"""

from __future__ import annotations

import torch

NORM_EPS = 1e-12
"""The smallest norm: a zero row divides nothing by zero."""


def weight_norm(
    weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float, chunk_bytes: int = 64 << 20
) -> torch.Tensor:
    """Row norms of W + s B A, [N], in the dtype of A; no gradient. Rows are taken in chunks, so nothing of W's size is made.

    The result is at least NORM_EPS.
    """
    with torch.no_grad():
        dtype, (rows, cols) = A_rK.dtype, weight_NK.shape
        norm_N = torch.empty(rows, dtype=dtype, device=weight_NK.device)
        step = max(1, chunk_bytes // (cols * dtype.itemsize))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            merged = torch.addmm(weight_NK[part].to(dtype), B_Nr[part], A_rK, alpha=scaling)
            torch.linalg.vector_norm(merged, dim=1, out=norm_N[part])
        return norm_N.clamp_(min=NORM_EPS)
