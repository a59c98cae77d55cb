"""||W_e + s B_e A_e|| by row of every expert, without a matrix of W's size.

    ||W + s B A||^2 = ||W||^2 + 2 s sum(B * (W A')) + s^2 sum((B G) * B)        G = A A', all sums by row

Shapes: E experts, N outputs, K inputs, r rank.
"""

from __future__ import annotations

import torch

from packlora.ops.lora_experts.types import ExpertWeight, a_by_expert, b_by_expert
from packlora.ops.row_norm.reference import NORM_EPS
from packlora.ops.row_norm.torch_path import compute_dtype

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Bytes of a chunk of W in the dtype of the sums."""


def expert_norms(
    frozen: ExpertWeight, A: torch.Tensor, B: torch.Tensor, scaling: float, squared_EN: torch.Tensor | None = None
) -> torch.Tensor:
    """[E, N], float32, or float64 where an operand is.

    A, B: as in ExpertLowRank. squared: ||W||^2 by row, where it is known.
    """
    E = frozen.shape[0]
    W, A_ErK, B_ENr = frozen.from_outputs(), a_by_expert(A, E), b_by_expert(B, E)
    out = squared_row_norms(frozen, A, B) if squared_EN is None else squared_EN.clone()
    dtype = out.dtype
    for first, last in _chunks(frozen, dtype):
        A_erK, B_eNr = A_ErK[first:last].to(dtype), B_ENr[first:last].to(dtype)
        inner = torch.bmm(W[first:last].to(dtype), A_erK.transpose(1, 2)).mul_(2 * scaling)
        inner += scaling**2 * torch.bmm(B_eNr, torch.bmm(A_erK, A_erK.transpose(1, 2)))
        out[first:last] += inner.mul_(B_eNr).sum(2)
    return out.clamp_(min=0.0).sqrt_().clamp_(min=NORM_EPS)


def squared_row_norms(frozen: ExpertWeight, *operands: torch.Tensor) -> torch.Tensor:
    """||W_e||^2 by row, [E, N], in the dtype of the norms of W with these operands."""
    dtype = compute_dtype(frozen.weight.dtype, *(operand.dtype for operand in operands))
    E, N, _ = frozen.shape
    out = torch.empty(E, N, dtype=dtype, device=frozen.weight.device)
    for first, last in _chunks(frozen, dtype):
        rows = frozen.from_outputs()[first:last].to(dtype)
        out[first:last] = torch.linalg.vecdot(rows, rows)
    return out


def _chunks(frozen: ExpertWeight, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Ranges of experts whose weights are converted to `dtype` together."""
    E, N, K = frozen.shape
    device = frozen.weight.device.type
    step = max(1, CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]) // (N * K * dtype.itemsize))
    return [(first, min(first + step, E)) for first in range(0, E, step)]
