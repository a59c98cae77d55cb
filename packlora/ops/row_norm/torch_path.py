"""Row norms by torch's operations: rows of W + s B A in chunks that fit a budget, in float32 (float64 where an operand is).

Shapes: N outputs, K inputs, r rank.
"""

from __future__ import annotations

import torch

from packlora.ops.lora_linear.frozen import FrozenWeight
from packlora.ops.row_norm.reference import NORM_EPS
from packlora.ops.row_norm.types import NormProblem

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Bytes of a chunk of rows in float32, on the path without kernels. A CPU's chunk should stay in its cache."""


def squared_row_norm(weight_NK: torch.Tensor | FrozenWeight, out_N: torch.Tensor, chunk_bytes: int | None) -> None:
    """||W||^2 by row into out_N, in its dtype."""
    N, K = weight_NK.shape
    for start, stop in chunks(N, K, out_N.dtype, weight_NK.device, chunk_bytes):
        rows = read_rows(weight_NK, start, stop).to(out_N.dtype)
        torch.linalg.vecdot(rows, rows, out=out_N[start:stop])


def row_norm(problem: NormProblem, budget_bytes: int | None) -> torch.Tensor:
    """||W + s B A|| by row, [N], of a weight that is a tensor; rows are made `budget_bytes` at a time."""
    weight, A, B = problem.weight, problem.A, problem.B
    assert isinstance(weight, torch.Tensor)
    dtype = compute_dtype(weight.dtype, A.dtype, B.dtype)
    (N, K), low_rank = weight.shape, A.shape[0] > 0 and problem.scaling != 0
    A_rK = A.to(dtype)
    norm_N = torch.empty(N, dtype=dtype, device=weight.device)
    for start, stop in chunks(N, K, dtype, weight.device, budget_bytes):
        rows = weight[start:stop].to(dtype)
        if low_rank:
            rows = torch.addmm(rows, B[start:stop].to(dtype), A_rK, alpha=problem.scaling)
        torch.linalg.vector_norm(rows, dim=1, out=norm_N[start:stop])
    return norm_N.clamp_(min=NORM_EPS)


def read_rows(weight: torch.Tensor | FrozenWeight, start: int, stop: int) -> torch.Tensor:
    """Rows [stop - start, K]. Raises ValueError where FrozenWeight.rows gives another shape."""
    if isinstance(weight, torch.Tensor):
        return weight[start:stop]
    rows = weight.rows(start, stop)
    if rows.shape != (stop - start, weight.shape[1]):
        raise ValueError(
            f"FrozenWeight.rows({start}, {stop}) gave {list(rows.shape)}; expected is {[stop - start, weight.shape[1]]}"
        )
    return rows


def chunks(N: int, K: int, dtype: torch.dtype, device: torch.device, budget_bytes: int | None) -> list[tuple[int, int]]:
    """(start, stop) of the rows that fit `budget_bytes` in `dtype`; None is CHUNK_BYTES of the device."""
    if budget_bytes is None:
        budget_bytes = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"])
    step = max(1, budget_bytes // max(1, K * dtype.itemsize))
    return [(start, min(start + step, N)) for start in range(0, N, step)]


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float32, float64 where an operand is."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
