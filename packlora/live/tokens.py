"""PEFT's rows of some tokens (`trainable_token_indices`) at run time, without PEFT's copy of the whole weight.

PEFT copies the weight [V, D] with the rows in it in every forward, and makes a gradient of the whole copy in every backward, of
an output layer by a product as large as the layer's. Here the frozen module gives what it gives, and the rows take their places
in that (adapters/token_rows.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from packlora.adapters.kinds import why_no_rows
from packlora.adapters.norms import RowNorms
from packlora.adapters.token_rows import TokenRows
from packlora.live.adapter import DTYPES, active_adapter, observed
from packlora.live.forward import OwnForward
from packlora.live.wrapped import NotWhole, why_called, why_no_weight, why_not_whole

PLAN = "rows"
"""How the report names what this file does."""


@dataclass(frozen=True, slots=True)
class TokensCall:
    """The one active adapter: its rows [n, D], whose they are, and the frozen module."""

    rows: torch.Tensor
    index: TokenRows
    base: Any


class TokensForward(OwnForward):
    """Forward of a TrainableTokensLayer over an embedding, or over an output layer without a bias."""

    def __init__(self, layer: Any, path: str, norms: RowNorms) -> None:
        super().__init__(layer, path, norms)
        self._index: tuple[object, TokenRows] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}

    def compute(self, x: torch.Tensor, call: TokensCall) -> torch.Tensor:
        base, y, index = call.base, call.base(x), call.index
        if not isinstance(base, nn.Embedding):
            return index.logits(x, y, call.rows)
        scale = self.layer._get_embed_scale()
        return index.embedded(base, x, y, call.rows, 1.0 if scale is None else scale)

    def ready(self) -> TokensCall | str:
        layer = self.layer
        name, reason = active_adapter(layer, layer.token_indices)
        if reason:
            return reason
        base, rows, tokens = layer.base_layer, layer.trainable_tokens_delta[name], tuple(layer.token_indices[name])
        if isinstance(base, nn.Embedding):
            if reason := why_no_rows(base) or "":
                return f"its base layer is {reason}"
        elif type(base) is not nn.Linear or base.bias is not None:
            return f"its base layer is a {type(base).__name__}, not an embedding or an output layer without a bias"
        if observed(base):
            return why_called("base layer", base)
        weight: Any = base._parameters.get("weight")
        if type(weight) not in (nn.Parameter, torch.Tensor):
            return why_no_weight("base layer", base)
        if weight.ndim != 2:
            return why_not_whole("base layer", weight)
        if type(rows) not in (nn.Parameter, torch.Tensor) or rows.shape != (len(tokens), weight.shape[1]):
            return NotWhole("its rows are not whole here")
        if weight.dtype not in DTYPES or rows.dtype not in DTYPES:
            return f"the weight of its base layer is {weight.dtype}, its rows are {rows.dtype}"
        if len(set(tokens)) < len(tokens):
            return "a token has two rows"
        return TokensCall(rows, self._tables(tokens, weight.shape[0], rows.device), base)

    def planned(self, found: Mapping[str, object]) -> tuple[str, str]:
        call = found[self.path]
        assert isinstance(call, TokensCall)
        return PLAN, f"{len(call.rows)} of {len(call.base.weight)}, the weight is not copied"

    def _tables(self, tokens: tuple[int, ...], vocabulary: int, device: torch.device) -> TokenRows:
        key = (tokens, vocabulary, device)
        if self._index is None or self._index[0] != key:
            self._index = key, TokenRows(tokens, vocabulary, device)
        return self._index[1]
