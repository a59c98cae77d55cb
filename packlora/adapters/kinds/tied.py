"""Rows of some tokens on the output layer that is tied to their embedding: the embedding's, nothing of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from packlora.adapters.kinds.tokens import Weights as TokenWeights
from packlora.adapters.routed import RoutedWeights
from packlora.adapters.spec import ModuleSpec


class Weights(RoutedWeights):
    """No parameters. tied_to is set by the caller."""

    suffixes: Mapping[str, str] = MappingProxyType({})
    unread = None

    @classmethod
    def shapes(cls, spec: ModuleSpec, base: Any) -> dict[str, tuple[int, ...]]:
        """See RoutedWeights."""
        return {}

    def forward(self, base: Any, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert y is not None and isinstance(self.tied_to, TokenWeights)
        return self.tied_to.index.logits(x, y, self.tied_to.rows)
