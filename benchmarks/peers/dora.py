"""Peers of DoRA besides a whole PEFT layer: the three ways to the row norm, and the paper's layer.

identity_norm is PEFT's own code. factored_norm and PaperLayer are this project's own code of the formulas of Scaling-DoRA
(arXiv 2603.22276): float32 copies of W in chunks, the norm computed in every forward, base and low-rank product finished and
then composed by one kernel.

Shapes: K inputs, N outputs, r rank; W [N, K], A [r, K], B [N, r], norms [N].
"""

from __future__ import annotations

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from torch import nn

from benchmarks.peers.compose import HAS_TRITON, compose

CHUNK_BYTES = 256 * 2**20
"""The paper's budget of float32 copies."""


def identity_norm(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float) -> torch.Tensor:
    """PEFT's: B A as the image of an identity matrix [K, K], then the norm of a dense W + s B A. Recorded by autograd where A
    and B train, and detached afterwards, as there."""
    dora = DoraLinearLayer(fan_in_fan_out=False)
    low_NK = dora.get_lora_weight(lora_A=_linear(A_rK), lora_B=_linear(B_Nr))
    norm: torch.Tensor = dora.get_weight_norm(weight_NK, low_NK.detach(), scaling)
    return norm.detach()


def _linear(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return made


@torch.no_grad()
def dense_norm(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float) -> torch.Tensor:
    """B A by one product, then the norm of a dense W + s B A."""
    norm: torch.Tensor = torch.linalg.norm(weight_NK + scaling * (B_Nr @ A_rK), dim=1)
    return norm


def chunk_columns(N: int, K: int, r: int, budget: int = CHUNK_BYTES) -> int:
    """Columns of W that are widened at a time, by the paper's rule."""
    if 4 * ((N + r) * K + N * r + r * r) <= budget:
        return K
    fit = (budget - 4 * (N * r + r * r)) // (4 * (N + r))
    return max(fit // 64 * 64 if fit > 64 else fit, 1)


@torch.no_grad()
def factored_norm(
    weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor, scaling: float, budget: int = CHUNK_BYTES
) -> torch.Tensor:
    """The paper's: |W|^2 + 2 s B.(W A') + s^2 (B A A').B row by row, in float32 over chunks of columns. No product [N, K]."""
    (N, K), r = weight_NK.shape, len(A_rK)
    base_N = torch.zeros(N, device=weight_NK.device)
    U_Nr, G_rr = torch.zeros(N, r, device=weight_NK.device), torch.zeros(r, r, device=weight_NK.device)
    columns = chunk_columns(N, K, r, budget)
    for start in range(0, K, columns):
        W, A = weight_NK[:, start : start + columns].float(), A_rK[:, start : start + columns].float()
        base_N += (W * W).sum(1)
        U_Nr.addmm_(W, A.T)
        G_rr.addmm_(A, A.T)
    B = B_Nr.float()
    cross_N, low_N = (B * U_Nr).sum(1), ((B @ G_rr) * B).sum(1)
    square_N: torch.Tensor = base_N + 2 * scaling * cross_N + scaling**2 * low_N
    return square_N.clamp_min_(0).sqrt_()


class PaperLayer(nn.Module):
    """A DoRA layer by the paper's tiers: factored norm in every forward, g in the activations' dtype, one composing pass each
    way (Triton on a GPU). Everything in the dtype of the weight."""

    def __init__(
        self, weight_NK: nn.Parameter, A_rK: torch.Tensor, B_Nr: torch.Tensor, magnitude_N: torch.Tensor, scaling: float
    ) -> None:
        super().__init__()
        self.weight, self.scaling = weight_NK, scaling
        dtype = weight_NK.dtype
        self.A, self.B = nn.Parameter(A_rK.to(dtype, copy=True)), nn.Parameter(B_Nr.to(dtype, copy=True))
        self.magnitude = nn.Parameter(magnitude_N.to(dtype, copy=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        base_TN = nn.functional.linear(x_TK, self.weight)
        lora_TN = nn.functional.linear(nn.functional.linear(x_TK, self.A), self.B)
        norm_N = factored_norm(self.weight, self.A, self.B, self.scaling).to(self.weight.dtype)
        g_N = self.magnitude / norm_N.clamp_min(1e-12 if norm_N.dtype == torch.float32 else 1e-6)
        tier = "kernel" if x.is_cuda and HAS_TRITON else "eager"
        y_TN = base_TN + compose(base_TN, lora_TN, g_N, self.scaling, tier)  # type: ignore[arg-type]
        return y_TN.view(*x.shape[:-1], -1)
