"""Requests for samples, checked: from the JSON of an asample to what the engine samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from packlora.engine.sampling import SampleRequest
from packlora.errors import quoted
from packlora.serve.errors import Failed, Refused
from packlora.serve.fields import check_switches
from packlora.serve.host import Facts
from packlora.serve.limits import Limits
from packlora.serve.messages import dense_of


def request_of(body: Mapping[str, Any], facts: Facts, limits: Limits) -> SampleRequest:
    """Request of the sampler that an asample asks for. Raises Refused, which names the field."""
    params = body.get("sampling_params") or {}
    if not isinstance(params, Mapping):
        raise Refused(f"sampling_params: {quoted(params)} is no object")
    tokens, texts = _stops(params.get("stop"), facts, limits)
    asked = body.get("target_prompt_logprobs")
    prompt = _prompt(body.get("prompt"))
    if body.get("prompt_alt_tokens_k"):
        raise Refused("prompt_alt_tokens_k: it is not served; topk_prompt_logprobs is")
    check_switches(body, "prompt_logprobs", "record_stability_info")
    if (last := body.get("prompt_logprobs_last_n")) is not None:
        _check_last(last, bool(body.get("prompt_logprobs")), len(prompt))
    found = SampleRequest(
        prompt=prompt,
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
    if body.get("record_stability_info"):
        raise Failed("record_stability_info: stable_reinforce is not served; use loss_fn=importance_sampling|ppo|cispo")
    return found


def _check_last(last: Any, is_scored: bool, length: int) -> None:
    """Raises Refused where the last tokens of a prompt are not as many as it can be scored at, or it is not to be scored."""
    field = "prompt_logprobs_last_n"
    if not is_scored:
        raise Refused(f"{field}: it needs prompt_logprobs: true")
    if type(last) is not int or not 1 <= last < length:
        raise Refused(
            f"{field}: {quoted(last)} is no whole number from 1 to {length - 1}, as the prompt has {length} tokens"
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
    tokens = frozenset(own for own in stops if isinstance(own, int))
    if any(not 0 <= own < 1 << 31 for own in tokens):
        raise Refused(f"sampling_params.stop: a token is not one of the vocabulary, 0 to {facts.vocabulary - 1}")
    texts = tuple(own for own in stops if isinstance(own, str))
    if len(texts) > limits.stop_strings:
        raise Refused(
            f"sampling_params.stop: {len(texts)} texts, above the limit stop_strings of {limits.stop_strings}"
        )
    if (longest := max(map(len, texts), default=0)) > limits.stop_characters:
        raise Refused(
            f"sampling_params.stop: a text of {longest} characters, above the limit stop_characters of "
            f"{limits.stop_characters}"
        )
    return tokens, texts


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
    field = "target_prompt_logprobs"
    data = _ints(asked.get("data"), f"{field}.data")
    if asked.get("sparse_crow_indices") is not None:
        starts = _ints(asked["sparse_crow_indices"], f"{field}.sparse_crow_indices")
        columns = _ints(asked.get("sparse_col_indices"), f"{field}.sparse_col_indices")
        return dense_of(data, starts, columns, (shape[0], shape[1]), -1, f"{field}.sparse_")
    if len(data) != shape[0] * shape[1]:
        raise Refused(f"{field}: shape {shape} and {len(data)} values disagree")
    return data.reshape(shape)


def _ints(values: Any, field: str) -> np.ndarray:
    if not isinstance(values, list) or not all(type(own) is int and -(2**62) < own < 2**62 for own in values):
        raise Refused(f"{field}: it is no list of whole numbers")
    return np.array(values, np.int64)


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
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise Refused(f"sampling_params.{name}: {quoted(value)} is no finite number")
    return float(value)
