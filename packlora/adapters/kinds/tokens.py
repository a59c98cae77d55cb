"""Rows of some tokens: y = the module with the job's own rows, of an embedding or of an output layer.

Shapes: n tokens with rows of their own, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from packlora.adapters.linear import Attached
from packlora.adapters.routed import First, Own, RoutedWeights, embed_scale
from packlora.adapters.spec import ModuleSpec
from packlora.adapters.token_rows import TokenRows


class Weights(RoutedWeights):
    """tokens [n, D], the rows of spec.tokens, which begin with the base's."""

    suffixes = MappingProxyType({"tokens": "token_adapter.trainable_tokens_delta"})
    unread = "holds parameters of {path} itself"

    def __init__(self, spec: ModuleSpec, base: Any, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, base, seed, room)
        self.rows = self.parameters["tokens"]
        self.index = TokenRows(spec.tokens, base.weight.shape[0], room["tokens"].device)

    @classmethod
    def shapes(cls, spec: ModuleSpec, base: Any) -> dict[str, tuple[int, ...]]:
        """See RoutedWeights."""
        return {"tokens": (len(spec.tokens), base.weight.shape[1])}

    @classmethod
    def replaced(cls, W: torch.Tensor, leaf: str, spec: ModuleSpec, own: Own) -> torch.Tensor | None:
        """See RoutedWeights."""
        return W.index_copy(0, torch.tensor(spec.tokens), own("tokens"))

    def first_values(self, base: Any, attached: Attached) -> First:
        return [(self.rows, base.weight.detach()[self.index.indices_n])]

    def forward(self, base: Any, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert y is not None
        if not isinstance(base, torch.nn.Embedding):
            return self.index.logits(x, y, self.rows)
        return self.index.embedded(base, x, y, self.rows, embed_scale(base))
