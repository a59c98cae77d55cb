"""Passes of the sampler that all ranks run: logits are whole on each, and rank 0 draws by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from packlora.base.kv_cache import KeyValueCache
from packlora.engine.decode import NextToken, Passes, Prompt
from packlora.serve.group.together import together
from packlora.serve.group.told import prompt_values, token_values

Tell = Callable[..., None]
"""Tells the other ranks: a kind and values of a message. It does nothing on them."""


class ToldCache(KeyValueCache):
    """The cache of this rank's heads, which all ranks have alike."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def resize(self, slots: int, length: int, moved: Mapping[int, int]) -> None:
        """See KeyValueCache."""
        self._tell("resize", slots=slots, length=length, moved=[*moved.items()])
        with together():
            super().resize(slots, length, moved)

    def clear(self, slot: int) -> None:
        """See KeyValueCache."""
        self._tell("clear", slot=slot)
        super().clear(slot)

    def free(self) -> None:
        """See KeyValueCache."""
        self._tell("free")
        super().free()


class ToldPasses:
    """See decode.Passes. inner: the passes of this rank."""

    def __init__(self, inner: Passes, tell: Tell) -> None:
        self._inner, self._tell = inner, tell

    @property
    def cache(self) -> KeyValueCache:
        """See Passes."""
        return self._inner.cache

    def prefill(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        """See Passes."""
        self._tell("prefill", prompts=[*map(prompt_values, prompts)])
        with together():
            return self._inner.prefill(prompts)

    def decode(self, tokens: Sequence[NextToken]) -> torch.Tensor:
        """See Passes."""
        self._tell("decode", tokens=[*map(token_values, tokens)])
        with together():
            return self._inner.decode(tokens)

    def free(self) -> None:
        """See Passes."""
        self._inner.free()
