"""Requests for samples, checked: from the JSON of an asample to what the engine samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from packlora.engine.rows import NO_ADAPTER
from packlora.engine.sampling import SampleRequest
from packlora.errors import quoted
from packlora.serve.errors import Failed, Refused
from packlora.serve.host import Facts
from packlora.serve.limits import Limits


def request_of(body: Mapping[str, Any], facts: Facts, limits: Limits, adapter: int = NO_ADAPTER) -> SampleRequest:
    """Request of the sampler that an asample asks for. Raises Refused, which names the field."""
    params = body.get("sampling_params") or {}
    if not isinstance(params, Mapping):
        raise Refused(f"sampling_params: {quoted(params)} is no object")
    tokens, texts = _stops(params.get("stop"), facts, limits)
    asked = body.get("target_prompt_logprobs")
    prompt = _prompt(body.get("prompt"))
    if body.get("prompt_alt_tokens_k"):
        raise Refused("prompt_alt_tokens_k: it is not served; topk_prompt_logprobs is")
    if body.get("record_stability_info"):
        raise Failed("record_stability_info: stable_reinforce is not served; use loss_fn=importance_sampling|ppo|cispo")
    return SampleRequest(
        prompt=prompt,
        adapter=adapter,
        max_tokens=_whole(params, "sampling_params.max_tokens", 1, 1 << 31, None),
        num_samples=_whole(body, "num_samples", 1, limits.samples, 1) or 1,
        temperature=_number(params, "temperature", 1.0),
        top_k=_whole(params, "sampling_params.top_k", -1, 1 << 31, -1) or 0,
        top_p=_number(params, "top_p", 1.0),
        seed=(_whole(params, "sampling_params.seed", -(1 << 63), 1 << 63, 0) or 0) % (1 << 63),
        stop_tokens=tokens,
        stop_strings=texts,
        prompt_logprobs=bool(body.get("prompt_logprobs")),
        top_prompt=_whole(body, "topk_prompt_logprobs", 0, limits.likeliest, 0) or 0,
        top_sampled=_whole(body, "topk_sample_logprobs", 0, limits.likeliest, 0) or 0,
        prompt_targets=None if asked is None else _targets(asked, len(prompt), limits),
    )


def _prompt(prompt: Any) -> tuple[int, ...]:
    chunks = prompt.get("chunks") if isinstance(prompt, Mapping) else None
    if not isinstance(chunks, list):
        raise Refused("prompt.chunks: it is no list")
    ids: list[int] = []
    for number, chunk in enumerate(chunks):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, Mapping) else None
        if kind != "encoded_text":
            raise Refused(f"prompt.chunks[{number}]: {quoted(kind)} is not served; encoded_text is")
        own = chunk.get("tokens")
        if not isinstance(own, list) or not all(type(token) is int for token in own):
            raise Refused(f"prompt.chunks[{number}].tokens: they are no list of token ids")
        ids += own
    return tuple(ids)


def _stops(stop: Any, facts: Facts, limits: Limits) -> tuple[frozenset[int], tuple[str, ...]]:
    if stop is None:
        return frozenset(facts.ends), ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > limits.spans:
        raise Refused("sampling_params.stop: give a text, a list of texts or a list of token ids")
    if not all(isinstance(own, str) or type(own) is int for own in stops):
        raise Refused("sampling_params.stop: its members are neither texts nor token ids")
    return frozenset(own for own in stops if isinstance(own, int)), tuple(own for own in stops if isinstance(own, str))


def _targets(asked: Any, length: int, limits: Limits) -> np.ndarray:
    """Tokens [P - 1, K] whose log-probabilities are wanted; -1: none."""
    shape = asked.get("shape") if isinstance(asked, Mapping) else None
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or shape[0] != length - 1
        or not 0 <= _int(shape[1]) <= limits.likeliest
    ):
        raise Refused(
            f"target_prompt_logprobs.shape: {quoted(shape)}; it must be [{length - 1}, K], K up to {limits.likeliest}"
        )
    try:
        data = np.array(asked.get("data"), np.int64).reshape(-1)
        if asked.get("sparse_crow_indices") is None:
            return data.reshape(shape)
        starts = np.array(asked["sparse_crow_indices"], np.int64)
        columns = np.array(asked["sparse_col_indices"], np.int64)
        out = np.full(shape, -1, np.int64)
        out[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = data
    except (TypeError, ValueError, OverflowError, IndexError, KeyError):
        raise Refused(f"target_prompt_logprobs: its values do not fit the shape {shape}") from None
    return out


def _int(value: Any) -> int:
    return value if type(value) is int else -1


def _whole(body: Mapping[str, Any], field: str, low: int, high: int, default: int | None) -> int | None:
    value = body.get(field.rpartition(".")[2])
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise Refused(f"{field}: {quoted(value)} is no whole number from {low} to {high}")
    return value


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = params.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"sampling_params.{name}: {quoted(value)} is no number")
    return float(value)
