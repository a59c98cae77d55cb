"""The forward of a layer with adapters, in the place of the layer's own: a mapping, packlora's operator, a mapping.

The layer stays the module that it was, of its own class and with its own attributes; only the attribute `forward` (of routers
`gating`) is another function. Where no adapter owns tokens the layer's own forward is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings

from packlora.adapters.linear import AdaptedCall, AdaptedLinear, compute
from packlora.adapters.owners import TokenOwners
from packlora.megatron.layers import Found, View, bias_of, enter_of, leave_of, norm_before, tokens_of
from packlora.megatron.owners import Owned
from packlora.ops.lora_linear.frozen import Dense


class LinearForward:
    """Forward of a linear layer, or of the grouped linear layers of experts.

    Args:
        members: the layer, or the layer of each expert, with its adapters, in their order.
        owned: who owns the tokens.
    """

    def __init__(self, members: list[tuple[Found, AdaptedLinear]], owned: Owned) -> None:
        self.members, self.owned = members, owned
        self.layer, self.linear = members[0]
        self.module: Any = self.layer.module
        self.original: Callable[..., Any] = self.module.forward
        self.enter, self.leave = enter_of(self.layer), leave_of(self.layer)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = self.layer
        owners = None if self.owned.merged else self._owners(tokens_of(x))
        if (owners is None and layer.expert is None) or self.owned.merged:
            return self._plain(x, weight, runtime_gather_output)
        if owners is not None and owners.adapters.isdisjoint(self.linear.adapters):
            return self._plain(x, weight, runtime_gather_output)
        x = norm_before(self.module, x)
        x = x if self.enter is None else self.enter(x)
        y = self._product(self.linear, x, owners, self.module.weight if weight is None else weight)
        y = y if self.leave is None else self.leave(y)
        bias, skipped = bias_of(layer)
        if bias is not None and not skipped and layer.dim == 1:
            y = y + bias
        gathers = (
            getattr(self.module, "gather_output", False) if runtime_gather_output is None else runtime_gather_output
        )
        if gathers and layer.degree > 1:
            y = mappings.gather_from_tensor_model_parallel_region(y, group=layer.group)
        return y, bias if skipped else None

    def grouped(self, x: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Forward of grouped layers: x has the tokens of each expert in turn."""
        if self.owned.merged:
            return self.original(x, m_splits)  # type: ignore[no-any-return]
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        outputs, skipped, biases = [], False, []
        for (layer, linear), own in zip(self.members, x.split(splits), strict=True):
            owners = self.owned.of_expert(int(layer.expert or 0), tokens_of(own))
            bias, skipped = bias_of(layer)
            y = self._product(linear, own, owners, layer.tensor())
            y = y if bias is None or skipped or layer.dim == 0 else y + bias
            outputs.append(y)
            biases.append(bias)
        return torch.cat(outputs), biases if skipped else None  # type: ignore[return-value]

    def _plain(self, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        while rest and rest[-1] is None:
            rest = rest[:-1]
        return self.original(x, *rest)  # type: ignore[no-any-return]

    def _owners(self, count: int) -> TokenOwners | None:
        """Owners of the tokens in the product, where the layer is given `count` tokens."""
        layer = self.layer
        if layer.expert is not None:
            return self.owned.of_expert(layer.expert, count)
        if layer.dim is not None or not layer.sequence:
            gathered = layer.dim == 0 and layer.sequence and layer.talks
            return self.owned.owners(count * layer.degree if gathered else count)
        whole = self.owned.owners(count * layer.degree)
        return None if whole is None else whole.part(layer.rank * count, (layer.rank + 1) * count)

    def _product(
        self, linear: AdaptedLinear, x: torch.Tensor, owners: TokenOwners | None, weight: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(linear.base, View)
        linear.base.hold(weight)
        if not tokens_of(x):
            return _of_nothing(linear, x)
        if owners is None or owners.adapters.isdisjoint(linear.adapters):
            return torch.nn.functional.linear(x, weight, linear.base.bias)
        return compute(x, (AdaptedCall(linear, owners),))[0]


def _of_nothing(linear: AdaptedLinear, x: torch.Tensor) -> torch.Tensor:
    """Empty output for no tokens; the parameters get gradients of zeros, because gradient buckets may wait for them."""
    y = torch.nn.functional.linear(x, linear.base.weight)
    for own in linear.adapters.values():
        if own.A is not None and own.B is not None:
            low = torch.nn.functional.linear(x, own.A.to(x.dtype)) @ own.B.to(x.dtype).t()
            y = y + (low if own.magnitude is None else low * own.magnitude.to(x.dtype))
    return y


class RouterForward:
    """The `gating` of a router: its logits, in the dtype in which it routes."""

    def __init__(self, layer: Found, linear: AdaptedLinear, owned: Owned) -> None:
        self.layer, self.linear, self.owned = layer, linear, owned
        self.module: Any = layer.module
        original: Any = layer.module.gating
        self.original: Callable[..., Any] = original
        self._cast: tuple[tuple[Any, ...], torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        layer, count = self.layer, tokens_of(x)
        owners = None if self.owned.merged else self._owners(count)
        if owners is None or owners.adapters.isdisjoint(self.linear.adapters):
            return self.original(x)  # type: ignore[no-any-return]
        if layer.sequence:
            owners = owners.part(layer.rank * count, (layer.rank + 1) * count)
        named = self.module.config.moe_router_dtype
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(named, x.dtype)
        assert isinstance(self.linear.base, View)
        self.linear.base.hold(self._weight(dtype))
        return compute(x.to(dtype), (AdaptedCall(self.linear, owners),))[0]

    def _owners(self, count: int) -> TokenOwners | None:
        return self.owned.owners(count * (self.layer.degree if self.layer.sequence else 1))

    def _weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Copy of the router's weight in another dtype, reused until the weight is written."""
        weight = self.layer.tensor()
        if weight.dtype == dtype:
            return weight
        written = Dense(weight).key
        key = written, dtype
        if self._cast is None or written is None or self._cast[0] != key:
            self._cast = key, torch.nn.Parameter(weight.detach().to(dtype), requires_grad=False)
        return self._cast[1]


class EmbeddingForward:
    """Forward of the word embedding: y = W[ids] + s B A[:, ids], cut by words, and added up by the embedding's own all-reduce.

    weights: by adapter number, A [r, words here], B [hidden, r] and the scaling.
    """

    def __init__(self, layer: Found, weights: Mapping[int, Any], owned: Owned) -> None:
        self.layer, self.weights, self.owned = layer, weights, owned
        self.module: Any = layer.module
        self.original: Callable[..., Any] = self.module.forward

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        owners = None if self.owned.merged else self.owned.owners(math.prod(ids.shape))
        if owners is None or owners.adapters.isdisjoint(self.weights):
            return self.original(ids)  # type: ignore[no-any-return]
        # tokens are owned in the order of the hidden states, [s, b]
        start, module = int(self.module.vocab_start_index), self.module
        words = ids.t().reshape(-1)
        here = (words >= start) & (words < module.vocab_end_index)
        words = torch.where(here, words - start, 0)
        y_TD = torch.nn.functional.embedding(words, module.weight)

        def part(own: Any, begin: int, stop: int) -> torch.Tensor:
            rows_tr = torch.nn.functional.embedding(words[begin:stop], own.A.T).to(y_TD.dtype)
            return y_TD[begin:stop] + (rows_tr @ own.B.T.to(y_TD.dtype)) * own.spec.scaling  # type: ignore[no-any-return]

        y = owners.by_owner(self.weights, lambda begin, stop: y_TD[begin:stop], part)
        y = y.masked_fill(~here[:, None], 0).view(*reversed(ids.shape), -1)
        if module.reduce_scatter_embeddings:
            return mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.layer.group)  # type: ignore[no-any-return]
        y = mappings.reduce_from_tensor_model_parallel_region(y, group=self.layer.group)
        return y.transpose(0, 1)  # type: ignore[no-any-return]
