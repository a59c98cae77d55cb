"""Sampling by continuous batching: prompts and samples of many adapters in one pass over one frozen model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from packlora.adapters.linear import Attached
from packlora.engine.sampling import SampledToken, SampleRequest, Sampling


class Sampler:
    """Sampling of a model that runs packed rows (base/packing.py), with the adapters that are on it.

    Args:
        model: on its device, made ready by prepare_model.
        attached: state that its adapted layers share.
        tokenizer: for stop strings; None refuses these.
        rows: most samples that run at once.
        cache_tokens: most tokens that the cache of keys and values has room for.
        context: most tokens of a prompt with its answer.
    """

    def __init__(
        self, model: PreTrainedModel, attached: Attached, tokenizer: Any = None, *, rows: int = 64,
        cache_tokens: int = 65536, context: int | None = None,
    ) -> None:  # fmt: skip
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        raise NotImplementedError

    def submit(self, request: SampleRequest) -> int:
        raise NotImplementedError

    def cancel(self, ticket: int) -> None:
        raise NotImplementedError

    def publish(self, adapter: int, version: int) -> None:
        raise NotImplementedError

    def step(self) -> list[SampledToken]:
        raise NotImplementedError

    def free(self) -> None:
        raise NotImplementedError


def sampler_for(model: PreTrainedModel, attached: Attached, tokenizer: Any = None, **room: int) -> Sampling:
    """A Sampler where the model's cache is keys and values of tokens alone, else transformers' own generation, request by
    request. Arguments as those of Sampler."""
    raise NotImplementedError


def sample(sampling: Sampling, requests: Sequence[SampleRequest]) -> list[list[list[SampledToken]]]:
    """Submit requests and wait for all: by request and sample its tokens."""
    raise NotImplementedError
