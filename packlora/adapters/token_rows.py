"""Rows of some tokens in the place of those of an embedding or of an output layer, without a copy of its weight.

Shapes: n tokens with rows of their own, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F


class TokenRows:
    """Tables on the device of the tokens that have rows.

    Args:
        tokens: n different ones.
    """

    def __init__(self, tokens: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self.indices_n = torch.tensor(tokens, device=device)
        self.places_V = torch.full((vocabulary,), -1, device=device)
        self.places_V[self.indices_n] = torch.arange(len(tokens), device=device)

    def embedded(
        self, base: Any, ids: torch.Tensor, y: torch.Tensor, rows_nD: torch.Tensor, scale: float | torch.Tensor
    ) -> torch.Tensor:
        """Output of the embedding, y [..., D], with the rows of the tokens.

        Args:
            ids: [...].
            scale: that the embedding multiplies its rows with.
        """
        places = self.places_V[ids]
        rows = F.embedding(places.clamp(min=0), rows_nD) * scale
        if base.padding_idx is not None:  # torch gives the row of padding no gradient
            rows = torch.where((ids == base.padding_idx)[..., None], rows.detach(), rows)
        return torch.where((places >= 0)[..., None], rows.to(y.dtype), y)

    def logits(self, x: torch.Tensor, y: torch.Tensor, rows_nD: torch.Tensor) -> torch.Tensor:
        """Logits y [..., V] of hidden states x [..., D] with those of the tokens made anew."""
        return y.index_copy(-1, self.indices_n, F.linear(x, rows_nD.to(x.dtype)).to(y.dtype))
