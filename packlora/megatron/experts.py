"""Owners and dropout keys that go with their tokens through a token dispatcher of Megatron-Core.

A dispatcher moves rows. So what is known of a token is written beside its hidden state, each byte as a number that every dtype
has exactly, and read again where the experts get the row. There the rows of each expert are sorted by owner, which takes one
table on the host, as the numbers of tokens of the experts do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings  # noqa: F401 - this room needs Megatron-Core

from packlora.adapters.owners import TokenOwners
from packlora.errors import InputError
from packlora.megatron.layers import rank_of, size_of
from packlora.megatron.owners import Owned

COLUMNS = 16
"""Columns beside a hidden state: 1 of the owner, 8 of the keys, the rest unused, so that rows stay aligned."""
MOST_ADAPTERS = 255
DISPATCHERS = ("MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher")


def check(layer: Any, adapters: int) -> None:
    """Raises InputError where owners cannot go with the tokens of a layer of experts, and they would have to."""
    config, kind = layer.config, type(layer.token_dispatcher).__name__
    if adapters > MOST_ADAPTERS:
        raise InputError(f"{adapters} adapters on experts; at most {MOST_ADAPTERS}")
    if adapters == 1:
        return
    if kind not in DISPATCHERS:
        raise InputError(
            f"several adapters on experts need moe_token_dispatcher_type allgather or alltoall; this model has a {kind}"
        )
    if config.moe_shared_expert_overlap:
        raise InputError("several adapters on experts need moe_shared_expert_overlap=False")
    if getattr(config, "moe_latent_size", None):
        raise InputError("several adapters on experts cannot be put on a model with moe_latent_size")


class Dispatch:
    """Wraps the methods of one layer's dispatcher and of its experts, in place."""

    def __init__(self, layer: Any, owned: Owned) -> None:
        self.owned, self.dispatcher, self.experts = owned, layer.token_dispatcher, layer.experts
        self.sequence = bool(layer.config.sequence_parallel) and size_of(layer.tp_group) > 1
        self.group = layer.tp_group
        self._pre: Callable[..., Any] = self.dispatcher.dispatch_preprocess
        self._post: Callable[..., Any] = self.dispatcher.dispatch_postprocess
        self._run: Callable[..., Any] = self.experts.forward
        self.dispatcher.dispatch_preprocess, self.dispatcher.dispatch_postprocess = self.send, self.receive
        self.experts.forward = self.compute
        self._arrived: torch.Tensor | None = None
        self._dropped = False

    def send(self, hidden: torch.Tensor, *rest: Any) -> Any:
        whole = self.owned.travelling
        if whole is None or self.owned.merged:
            self._arrived = None
            return self._pre(hidden, *rest)
        count = hidden.numel() // hidden.shape[-1]
        first = rank_of(self.group) * count
        here = whole.part(first, first + count) if self.sequence else whole
        self._dropped = here.keys_T2 is not None
        beside = written(here, hidden).view(*hidden.shape[:-1], COLUMNS)
        sent = self._pre(torch.cat([hidden, beside], -1), *rest)
        self.dispatcher.hidden_shape = hidden.shape
        if hasattr(self.dispatcher, "hidden_shape_before_permute"):
            self.dispatcher.hidden_shape_before_permute = torch.Size((count, hidden.shape[-1]))
        return sent

    def receive(self, hidden: torch.Tensor, *rest: Any) -> Any:
        if self.owned.travelling is None or self.owned.merged:
            return self._post(hidden, *rest)
        rows, *others = self._post(hidden, *rest)
        width = rows.shape[-1] - COLUMNS
        before = getattr(self.dispatcher, "hidden_shape_before_permute", None)
        if before is not None and before[-1] != width:
            self.dispatcher.hidden_shape_before_permute = torch.Size((*before[:-1], width))
        self._arrived = rows[:, width:].detach()
        return (rows[:, :width].contiguous(), *others)

    def compute(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> Any:
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return self._run(rows, tokens_per_expert, probs)
        numbers, keys = read(arrived)
        counts = tokens_per_expert.to(rows.device)
        expert = torch.repeat_interleave(torch.arange(len(counts), device=rows.device), counts, output_size=len(rows))
        group = expert * (MOST_ADAPTERS + 1) + numbers
        order = torch.argsort(group, stable=True)
        found = torch.bincount(group, minlength=len(counts) * (MOST_ADAPTERS + 1)).view(len(counts), -1).tolist()
        keys = keys[order] if self._dropped else None  # type: ignore[assignment]
        with self.owned.on_experts(_by_expert(found, keys)):
            y, bias = self._run(rows[order], tokens_per_expert, probs[order])
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        return y[back], bias


def _by_expert(counts: list[list[int]], keys: torch.Tensor | None) -> dict[int, TokenOwners]:
    """Token owners by expert, from the number of tokens without an adapter and of each adapter that the expert gets."""
    made, first = {}, 0
    for expert, own in enumerate(counts):
        at, segments = own[0], []
        for number, count in enumerate(own[1:]):
            if count:
                segments.append((number, at, at + count))
                at += count
        made[expert] = TokenOwners(at, tuple(segments), None if keys is None else keys[first : first + at])
        first += at
    return made


def written(owners: TokenOwners, like: torch.Tensor) -> torch.Tensor:
    """Owners and keys as numbers [T, COLUMNS], for `read`: bytes, which have 8 bits, as many as a bfloat16 counts exactly."""
    out = like.new_zeros(owners.total, COLUMNS)
    for number, start, stop in owners.segments:
        out[start:stop, 0] = number + 1
    if owners.keys_T2 is not None:
        out[:, 1:9] = owners.keys_T2.contiguous().view(torch.uint8).to(like.dtype)
    return out


def read(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Owner + 1 (0 without an adapter) [T], and keys [T, 2] int32."""
    keys = rows[:, 1:9].to(torch.uint8).contiguous().view(torch.int32)
    return rows[:, 0].long(), keys
