"""Operands of the experts' operator: the frozen weights of all experts, and the adapters on them.

Shapes: E experts, N outputs, K inputs, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """The frozen weights of all experts.

    weight: [E, N, K], or [E, K, N] where `transposed`. bias: [E, N].
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)"""
        E, N, K = self.weight.shape
        return (E, K, N) if self.transposed else (E, N, K)

    def from_outputs(self) -> torch.Tensor:
        """[E, N, K], a view."""
        return self.weight.transpose(1, 2) if self.transposed else self.weight

    def from_inputs(self) -> torch.Tensor:
        """[E, K, N], a view."""
        return self.weight if self.transposed else self.weight.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class ExpertLowRank:
    """One adapter on the weights of all experts, in the layout of PEFT's files.

    A: [E r, K], expert by expert. B: [N, r E], the expert running fastest. magnitude: DoRA's m [E, N], and norm the norms
    ||W_e + s B_e A_e|| by row, [E, N]. dropout, base_dropped: as in ops/lora_linear.
    """

    A: torch.Tensor
    B: torch.Tensor
    scaling: float
    dropout: float = 0.0
    magnitude: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    base_dropped: bool = True

    def rank(self, num_experts: int) -> int:
        return self.A.shape[0] // num_experts


def turned(A: torch.Tensor, B: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E r, K] and B [N, r E] of an adapter whose A [E r, N] and B [K, r E] are the factors of the turned weights [K, N]:
    s (B_e A_e)' = s A_e' B_e'."""
    A_ErN, B_KrE = A.view(num_experts, -1, A.shape[1]), B.view(B.shape[0], -1, num_experts)
    return B_KrE.permute(2, 1, 0).flatten(0, 1), A_ErN.permute(2, 1, 0).flatten(1)


def a_by_expert(A: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E, r, K] of A [E r, K], a view."""
    return A.view(num_experts, -1, A.shape[1])


def b_by_expert(B: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E, N, r] of B [N, r E], a view."""
    return B.view(B.shape[0], -1, num_experts).permute(2, 0, 1)
