"""Embeddings: y = g * (E[id] + s (A[:, id])' B')        as PEFT has it: nothing is dropped; g = 1 without DoRA

Rows and norms are added and multiplied in float32.

Shapes: t tokens, r rank, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from packlora.adapters import dora
from packlora.adapters.linear import Attached
from packlora.adapters.norms import NormHandle
from packlora.adapters.routed import First, RoutedWeights, embed_scale
from packlora.adapters.spec import ModuleSpec


class Weights(RoutedWeights):
    """A [r, V], B [D, r], and DoRA's magnitude [D]. B begins random and A with zeros, as in PEFT."""

    suffixes = MappingProxyType(
        {"A": "lora_embedding_A", "B": "lora_embedding_B", "magnitude": "lora_magnitude_vector"}
    )
    is_turned = True
    unread = None

    def __init__(self, spec: ModuleSpec, base: Any, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, base, seed, room)
        self.A, self.B, self.magnitude = (self.parameters.get(name) for name in ("A", "B", "magnitude"))
        self.norm: NormHandle | None = None

    @classmethod
    def takes(cls, module: torch.nn.Module) -> bool:
        """See RoutedWeights."""
        return isinstance(module, torch.nn.Embedding)

    @classmethod
    def why_not(cls, spec: ModuleSpec, base: Any) -> str | None:
        """See RoutedWeights: it has DoRA, and `spec` no dropout."""
        return None

    def first_factors(
        self, A: tuple[int, ...], B: tuple[int, ...], seed: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """See TrainedWeights: B from normal numbers, and A where init_lora_weights is false."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(B, generator=generator)
        return torch.randn(A, generator=generator) if self.spec.start is False else None, drawn

    def first_values(self, base: Any, attached: Attached) -> First:
        if self.magnitude is None:
            return []
        assert self.A is not None and self.B is not None
        self.norm = NormHandle(
            attached.norms, base.weight.detach().T, self.A, self.B, self.spec.scaling, version_counted=True
        )
        return [(self.magnitude, self.norm.get())]

    def forward(self, base: Any, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert y is not None and self.A is not None and self.B is not None
        low_tD = F.embedding(x, self.A.T, base.padding_idx) @ self.B.T
        wide_tD = y.to(torch.promote_types(y.dtype, low_tD.dtype)) + self.spec.scaling * embed_scale(base) * low_tD
        if self.magnitude is not None and self.norm is not None:
            wide_tD = dora.factor(self.magnitude, self.norm.get()) * wide_tD
        return wide_tD.to(y.dtype)
