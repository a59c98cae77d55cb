"""Sampling of many adapters in one batch, held against transformers' own generation, PEFT's models and whole forwards."""

from __future__ import annotations

import gc
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import tiny_model
from graph_runs import Fixed, Pretended, attention_by_starts
from peft import LoraConfig
from sampling_cases import Case, case_of, full_logits, ids_of, prompt
from seeds import SOAK
from transformers import TopKLogitsWarper, TopPLogitsWarper

from packlora.adapters.attach import adapted_layers, attach, attach_one, detach_one
from packlora.adapters.linear import AdaptedLinear, Attached
from packlora.adapters.spec import resolve
from packlora.base.cached_proof import own_probe, why_not_cached
from packlora.base.kv_cache import KeyValueCache
from packlora.base.packing import prepare_model
from packlora.engine import recorded_decode, recorded_prefill
from packlora.engine.decode import Passes
from packlora.engine.draw import _inverse, inverse_in_blocks
from packlora.engine.generate import Sampler, sample, sampler_for
from packlora.engine.library_sampler import LibrarySampler
from packlora.engine.recorded_decode import GraphedPasses
from packlora.engine.sampling import SampledToken, SampleRequest
from packlora.errors import InputError
from packlora.ops.lora_linear.plan import ROUTED
from packlora.runtime.run import deterministic

GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """In float32; in a soak by two threads, whose products have other bits than one thread's for a few rows."""
    torch.set_num_threads(2 if SOAK else 1)
    yield case_of(tmp_path_factory.mktemp("single"), ("lora", "dora", "some"), torch.float32)
    torch.set_num_threads(1)


def generated(model: Any, request: SampleRequest) -> list[int]:
    """Tokens of transformers' own greedy generation."""
    ids = torch.tensor([request.prompt])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_tokens, do_sample=False,
        eos_token_id=[*request.stop_tokens] or None, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def own_logprobs(model: Any, request: SampleRequest, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [n, V] at the places of the new tokens, tempered."""
    logits = full_logits(model, [*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
    return (logits / (request.temperature or 1.0)).log_softmax(-1)


def check_logprobs(model: Any, request: SampleRequest, tokens: list[SampledToken]) -> None:
    want = own_logprobs(model, request, ids_of(tokens))
    for at, token in enumerate(tokens):
        assert math.isclose(token.logprob, float(want[at, token.id]), abs_tol=1e-10, rel_tol=1e-10)


def all_requests(case: Case, **how: Any) -> list[tuple[str, SampleRequest]]:
    """Ragged prompts of the base and all adapters, whose samples end at different times."""
    return [
        (name, SampleRequest(prompt(10 * at + n, length), number, max_tokens=4 + 6 * n + at, **how))
        for at, (name, number) in enumerate(case.numbers.items())
        for n, length in enumerate((1, 7, 33))
    ]


@pytest.mark.parametrize(
    "room",
    [pytest.param({}, marks=pytest.mark.soak), {"rows": 3, "cache_tokens": 200}, {"fewest_rows": 1, "rows": 5}],
    ids=["all at once", "three slots", "few rows"],
)
def test_greedy_tokens_of_mixed_adapters_are_those_of_peft_models(exact: Case, room: dict[str, int]) -> None:
    requests = all_requests(exact, **GREEDY)
    sampler = Sampler(exact.model, exact.attached, **room)
    first = [sampler.submit(request) for _, request in requests[:8]]
    early = [token for _ in range(3) for token in sampler.step()]  # the others come while these run
    rest = [sampler.submit(request) for _, request in requests[8:]]
    found: dict[int, list[SampledToken]] = {ticket: [] for ticket in (*first, *rest)}
    for token in early:
        found[token.ticket].append(token)
    while sampler.waiting:
        for token in sampler.step():
            found[token.ticket].append(token)
    assert sampler.step() == []
    for (name, request), tokens in zip(requests, found.values(), strict=True):
        assert ids_of(tokens) == generated(exact.peft[name], request)
        assert [token.reason for token in tokens] == [None] * (len(tokens) - 1) + ["length"]
        check_logprobs(exact.peft[name], request, tokens)


def test_logprobs_are_of_the_tempered_distribution_and_of_the_prompt_as_whole_forwards_give_them(exact: Case) -> None:
    requests = []
    for name, number in exact.numbers.items():
        ids, targets = prompt(number + 50, 9), np.full((8, 2), -1)
        targets[2:, 0], targets[::3, 1] = 7, 300
        requests.append(
            (name, SampleRequest(ids, number, 6, 2, temperature=1.7, seed=number + 3, prompt_logprobs=True, top_prompt=3,
                                 top_sampled=2, prompt_targets=targets))
        )  # fmt: skip
    for (name, request), samples in zip(
        requests, sample(Sampler(exact.model, exact.attached), [one for _, one in requests]), strict=True
    ):
        assert ids_of(samples[0]) != ids_of(samples[1]), "samples of one prompt have generators of their own"
        for tokens in samples:
            check_logprobs(exact.peft[name], request, tokens)
            logp = own_logprobs(exact.peft[name], request, ids_of(tokens))
            for at, token in enumerate(tokens):
                values, ids = logp[at].topk(2)
                assert token.top is not None and token.top.ids.tolist() == [ids.tolist()]
                np.testing.assert_allclose(token.top.logprobs[0], values.float(), rtol=1e-6)
        (scores,) = (token.scores for tokens in samples for token in tokens if token.scores is not None)
        logp = full_logits(exact.peft[name], request.prompt)[:-1].log_softmax(-1)
        assert scores.logprobs is not None and scores.top is not None and scores.targets is not None
        want = logp[torch.arange(8), torch.tensor(request.prompt[1:])].float()
        assert np.isnan(scores.logprobs[0])
        np.testing.assert_allclose(scores.logprobs[1:], want, rtol=1e-6)
        np.testing.assert_allclose(scores.top.logprobs, logp.topk(3).values.float(), rtol=1e-6)
        assert scores.top.ids.tolist() == logp.topk(3).indices.tolist()
        named = request.prompt_targets
        assert named is not None and (np.isnan(scores.targets) == (named < 0)).all()
        np.testing.assert_allclose(scores.targets[2:, 0], logp[2:, 7].float(), rtol=1e-6)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.3), (20, 0.6), (1, 1.0)])
def test_tokens_are_drawn_from_those_that_transformers_filters_leave(exact: Case, top_k: int, top_p: float) -> None:
    request = SampleRequest(prompt(1, 5), 0, 12, 3, temperature=2.0, top_k=top_k, top_p=top_p, seed=4)
    others = SampleRequest(prompt(2, 9), 1, 12, 3, temperature=2.0, seed=4)
    whole = sample(Sampler(exact.model, exact.attached), [others])[0]
    samples, beside = sample(Sampler(exact.model, exact.attached), [request, others])
    assert [ids_of(tokens) for tokens in whole] == [ids_of(tokens) for tokens in beside]
    drawn = set[int]()
    for tokens in samples:
        logp = own_logprobs(exact.peft["lora"], request, ids_of(tokens))
        scores = logp if not top_k else TopKLogitsWarper(top_k)(None, logp)
        scores = scores if top_p == 1 else TopPLogitsWarper(top_p)(None, scores)
        for at, token in enumerate(tokens):
            assert scores[at, token.id] > -math.inf
            drawn.add(int((logp[at] > logp[at, token.id]).sum()))
        check_logprobs(exact.peft["lora"], request, tokens)
    assert max(drawn) > 0 or top_k == 1, "not the likeliest token alone is drawn"


def test_bits_of_a_sample_do_not_depend_on_its_neighbours(single: Case) -> None:
    """Alone, beside samples of other adapters, and beside more of its own; in batches of other sizes and other caches."""
    how: dict[str, Any] = {"max_tokens": 9, "top_sampled": 3, "prompt_logprobs": True}
    own = [SampleRequest(prompt(at, 3 + 5 * at), number, seed=at, **how) for at, number in enumerate((-1, 0, 1, 2))]
    alone = [sample(Sampler(single.model, single.attached), [request])[0] for request in own]
    others = [SampleRequest(prompt(90 + at, 2 + at % 30), at % 4 - 1, 3 + at, 1 + at % 3, seed=at) for at in range(24)]
    for before, rows in ((5, 64), (19, 16)):
        sampler = Sampler(single.model, single.attached, rows=rows)
        together = sample(sampler, [*others[:before], *own[::-1], *others[before:]])
        for want, got in zip(alone, together[before : before + 4][::-1], strict=True):
            for one, other in zip(want[0], got[0], strict=True):
                assert (one.id, one.logprob) == (other.id, other.logprob)
                assert one.top is not None and other.top is not None
                assert np.array_equal(one.top.logprobs, other.top.logprobs)
                if one.scores is not None:
                    assert other.scores is not None
                    assert np.array_equal(one.scores.logprobs, other.scores.logprobs, equal_nan=True)


def test_writes_of_which_each_has_its_place_are_not_put_in_order(single: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's torch must be deterministic, and sorts what it writes; on a GPU it may wait for it. The tokens are the same."""
    request, strict = SampleRequest(prompt(3, 20), 0, 4, 2, seed=5), list[bool]()
    want = sample(Sampler(single.model, single.attached), [request])
    real = KeyValueCache.of

    def of(cache: KeyValueCache, *given: Any) -> Any:
        strict.append(torch.are_deterministic_algorithms_enabled())
        return real(cache, *given)

    monkeypatch.setattr(KeyValueCache, "of", of)
    with deterministic():
        got = sample(Sampler(single.model, single.attached), [request])
        assert torch.are_deterministic_algorithms_enabled()
    assert ids_of(got[0][0]) == ids_of(want[0][0])
    assert strict and not any(strict)


def test_samples_of_a_prompt_share_one_prefill_and_sample_0_is_that_of_one_sample(single: Case) -> None:
    rows: list[int] = []
    hook = single.model.get_input_embeddings().register_forward_hook(lambda _m, _a, out: rows.append(out.shape[-2]))
    request = SampleRequest(prompt(3, 60), 0, 4, 40, seed=5)
    sampler = Sampler(single.model, single.attached)
    (samples,) = sample(sampler, [request])
    hook.remove()
    assert rows == [60, 40, 40, 40]
    assert len({tuple(ids_of(tokens)) for tokens in samples}) > 30
    (((*one,),),) = sample(sampler, [SampleRequest(request.prompt, 0, 4, 1, seed=5)])
    assert [(token.id, token.logprob) for token in one] == [(token.id, token.logprob) for token in samples[0]]
    many = sample(Sampler(single.model, single.attached, rows=7), [request])[0]  # more samples than slots
    assert [ids_of(tokens) for tokens in many] == [ids_of(tokens) for tokens in samples]


def test_samples_end_at_stop_tokens_and_at_stop_strings_across_tokens(single: Case, tokenizer: Any) -> None:
    sampler = Sampler(single.model, single.attached, tokenizer)
    ids = prompt(8, 6)
    ((tokens,),) = sample(sampler, [SampleRequest(ids, 1, 40, **GREEDY)])
    whole = ids_of(tokens)
    at = next(n for n in range(9, 40) if whole[n] not in whole[:n])
    stopped = SampleRequest(ids, 1, 40, stop_tokens=frozenset({whole[at], 5}), **GREEDY)
    ((tokens,),) = sample(sampler, [stopped])
    assert ids_of(tokens) == whole[: at + 1] == generated(single.peft["dora"], stopped)
    assert tokens[-1].reason == "stop" and all(token.reason is None for token in tokens[:-1])
    assert tokens[-1].text == "", "there are no stop strings"
    pieces = [tokenizer.decode([token]) for token in whole]
    at = next(n for n in range(5, 38) if all(pieces[n : n + 3]) and "\ufffd" not in "".join(pieces[n : n + 3]))
    stop = pieces[at][-1] + pieces[at + 1] + pieces[at + 2][0]  # of three tokens
    assert stop not in "".join(pieces[: at + 2]), "it lies here first"
    request = SampleRequest(ids, 1, 40, stop_strings=("never there", stop), **GREEDY)
    ((tokens,),) = sample(sampler, [request])
    assert ids_of(tokens) == whole[: at + 3] and tokens[-1].reason == "stop"
    assert "".join(token.text for token in tokens) == "".join(pieces[: at + 3])


@pytest.mark.parametrize("family", ["mistral", "qwen2-window", "qwen3", "gemma2", "gemma3", "qwen3_5"])
def test_each_family_samples_as_transformers_generates(family: str) -> None:
    """Windows, caps and norms go through the cache; recurrences through transformers' own generation, which is said. Layers are
    checkpointed, as in training; transformers gives such layers no cache."""
    model = tiny_model(family, torch.float64)
    requests = [SampleRequest(prompt(4 + at, length), max_tokens=14, **GREEDY) for at, length in enumerate((3, 12, 20))]
    want = [generated(model, request) for request in requests]
    own = own_probe(model)
    prepare_model(model, gradient_checkpointing=True)
    sampling, reason = sampler_for(model, Attached([]), own=own)
    if family == "qwen3_5":
        assert isinstance(sampling, LibrarySampler) and reason is not None and "recurrence" in reason
    else:
        assert isinstance(sampling, Sampler) and reason is None
    assert [ids_of(tokens) for (tokens,) in sample(sampling, requests)] == want
    assert any(module.training for module in model.modules()), "they are checkpointed no more"


def test_the_library_s_generation_draws_the_same_tokens(exact: Case) -> None:
    """Same seeds, stops, filters and scores on a model that both can sample."""
    requests = [
        SampleRequest(prompt(4, 8), 1, 9, 3, temperature=1.3, seed=2, prompt_logprobs=True, top_sampled=1),
        SampleRequest(prompt(5, 3), -1, 9, top_k=5, stop_tokens=frozenset(range(0, 320, 6)), seed=1),
        SampleRequest(prompt(6, 3), 3, 5, **GREEDY),
    ]
    before = exact.model.config._attn_implementation
    want = sample(LibrarySampler(exact.model, exact.attached), requests)
    assert exact.model.config._attn_implementation == before
    got = sample(Sampler(exact.model, exact.attached), requests)
    for own, others in zip(got, want, strict=True):
        for one, other in zip(own, others, strict=True):
            assert ids_of(one) == ids_of(other) and [t.reason for t in one] == [t.reason for t in other]
            np.testing.assert_allclose(
                [t.logprob for t in one], [t.logprob for t in other], rtol=1e-5, atol=2e-6
            )  # float32
    scores, own_scores = want[0][0][0].scores, got[0][0][0].scores
    assert scores is not None and own_scores is not None and scores.logprobs is not None
    np.testing.assert_allclose(scores.logprobs, own_scores.logprobs, rtol=1e-5, atol=2e-6)  # type: ignore[arg-type]


def test_an_adapter_that_is_not_finite_ends_its_own_samples_alone(single: Case) -> None:
    requests = [SampleRequest(prompt(at, 5 + at), at % 3 - 1 + (at % 3 == 1), 8, seed=at) for at in range(6)]
    bad = [SampleRequest(prompt(9, 11), 2, 8, seed=at) for at in range(3)]
    sampler = Sampler(single.model, single.attached, rows=9)
    want = sample(sampler, requests)
    weights = single.adapters[2].flat
    kept = weights.clone()
    try:
        tickets = [sampler.submit(request) for request in (*bad, *requests)]
        sampler.step()
        weights.fill_(float("nan"))  # between two steps
        found: dict[int, list[SampledToken]] = {ticket: [] for ticket in tickets}
        while sampler.waiting:
            for token in sampler.step():
                found[token.ticket].append(token)
        for ticket in tickets[:3]:
            (token,) = found[ticket]
            assert token.reason == "not finite" and math.isnan(token.logprob)
        for ticket, (tokens,) in zip(tickets[3:], want, strict=True):
            assert [(t.id, t.logprob) for t in found[ticket]] == [(t.id, t.logprob) for t in tokens[1:]]
        again = sample(sampler, requests)  # in the slots that the others had
        assert [[(t.id, t.logprob) for t in tokens] for (tokens,) in again] == [
            [(t.id, t.logprob) for t in tokens] for (tokens,) in want
        ]
    finally:
        weights.copy_(kept)


def test_tokens_follow_the_weights_as_they_are(exact: Case) -> None:
    request = SampleRequest(prompt(2, 6), 0, 6, **GREEDY)
    sampler = Sampler(exact.model, exact.attached)
    ticket = sampler.submit(request)
    other = sampler.submit(SampleRequest(prompt(2, 6), 1, 6, **GREEDY))
    tokens = [*sampler.step(), *sampler.step()]
    weights = exact.adapters[0].flat
    kept = weights.clone()
    try:
        weights.zero_()
        tokens += sampler.step()
        sampler.cancel(other)
        while sampler.waiting:
            tokens += sampler.step()
    finally:
        weights.copy_(kept)
    own = [token for token in tokens if token.ticket == ticket]
    assert len([token for token in tokens if token.ticket == other]) == 3, "it was cancelled"
    plain = generated(exact.peft["lora"], request)
    assert ids_of(own)[:2] == plain[:2] and ids_of(own) != plain


def test_memory_can_be_freed_and_a_prefill_can_fail_without_a_change_of_tokens(
    exact: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [SampleRequest(prompt(at, 4 + at), at - 1, 8, 2, seed=at) for at in range(4)]
    want = [
        [ids_of(tokens) for tokens in samples] for samples in sample(Sampler(exact.model, exact.attached), requests)
    ]
    sampler = Sampler(exact.model, exact.attached)
    found = {sampler.submit(request): [[], []] for request in requests}  # type: dict[int, list[list[int]]]
    steps = 0
    while sampler.waiting:
        steps += 1
        if steps == 3:
            sampler.free()
            assert not sampler._passes.cache.layers
        if steps in (1, 3):
            with monkeypatch.context() as patched:
                patched.setattr(exact.model, "forward", out_of_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    sampler.step()
        for token in sampler.step():
            found[token.ticket][token.sample].append(token.id)
    assert [*found.values()] == want


def out_of_memory(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(("where", "fails_at"), [("resize", 2), ("draw", 2), ("draw", 3), ("library", 4)])
def test_memory_that_runs_out_between_passes_costs_neither_scores_nor_tokens(
    where: str, fails_at: int, exact: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the cache grows for the second request, while tokens are drawn, and in the middle of transformers' generation."""
    requests = [SampleRequest(prompt(1, 5), 0, 8, seed=3, prompt_logprobs=True), SampleRequest(prompt(2, 70), 1, 8, 2)]
    kind = LibrarySampler if where == "library" else Sampler
    owner, name = (KeyValueCache, "resize") if where == "resize" else (inspect.getmodule(kind), "draw")
    own, calls = getattr(owner, name), itertools.count(1)

    def call(*given: Any) -> Any:
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError
        return own(*given)

    def found() -> tuple[dict[tuple[int, int], list[tuple[int, bool]]], int]:
        sampler: Any = kind(exact.model, exact.attached)
        for request in requests:
            sampler.submit(request)
        told: dict[tuple[int, int], list[tuple[int, bool]]] = {}
        failed = 0
        while sampler.waiting:
            try:
                for token in sampler.step():
                    told.setdefault((token.ticket, token.sample), []).append((token.id, token.scores is not None))
            except torch.OutOfMemoryError:
                failed += 1
        return told, failed

    want, _ = found()
    monkeypatch.setattr(owner, name, call)
    assert found() == (want, 1)
    assert want[0, 0][0][1], "its prompt was scored"


def test_requests_that_cannot_be_served_are_refused_in_words(exact: Case) -> None:
    sampler = Sampler(exact.model, exact.attached, context=64)
    ids = prompt(0, 5)
    for request, said in (
        (SampleRequest(()), "prompt: it has no tokens"),
        (SampleRequest((3, 320)), "0 to 319"),
        (SampleRequest(prompt(0, 64)), "the model's context 64"),
        (SampleRequest(ids, max_tokens=0), "max_tokens: 0"),
        (SampleRequest(ids, num_samples=0), "num_samples: 0"),
        (SampleRequest(ids, temperature=-1.0), "temperature: -1.0"),
        (SampleRequest(ids, temperature=math.nan), "temperature: nan"),
        (SampleRequest(ids, temperature=1e-38), "temperature: 1e-38 is neither 0 nor a number from 1e-30 on"),
        (SampleRequest(ids, top_p=0.0), "top_p: 0.0"),
        (SampleRequest(ids, stop_strings=("a",)), "stop_strings: there is no tokenizer"),
        (SampleRequest(ids, stop_strings=("",)), "stop_strings: a text is empty"),
        (SampleRequest(ids, top_sampled=-1), "top_sampled: must be 0 or more"),
        (SampleRequest(ids, prompt_targets=np.zeros((5, 1), np.int64)), "prompt_targets: must be int64 [4, K]"),
        (SampleRequest(ids, prompt_targets=np.full((4, 1), 320)), "prompt_targets: a token"),
    ):
        with pytest.raises(InputError) as refused:
            sampler.submit(request)
        assert said in str(refused.value)
    assert not sampler.waiting
    ((tokens,),) = sample(sampler, [SampleRequest(ids)])
    assert len(tokens) == 59, "as many as the context has room for"


def test_a_model_whose_cache_is_another_is_found_before_anything_is_sampled() -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    prepare_model(model, False)
    assert "rotary embedding" in str(why_not_cached(model))
    model = tiny_model("llama")
    prepare_model(model, False)
    assert why_not_cached(model) is None
    model.model.layers[1].self_attn.register_forward_hook(lambda _m, _a, out: (out[0].roll(1, 1), *out[1:]))
    assert "other logits than whole rows" in str(why_not_cached(model))


def test_passes_by_graphs_draw_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays that run again what was recorded, and kernels in the interpreter, stand in for a GPU. The second time adapters
    have stepped between two tokens."""
    case = case_of(tmp_path, ("lora", "dora", "some"), torch.float32, num_hidden_layers=1)
    for layer in adapted_layers(case.model).values():
        layer.chooser = Fixed(ROUTED)  # type: ignore[union-attr]
    monkeypatch.setattr(recorded_decode, "UNRECORDED", 1)
    requests = [SampleRequest(prompt(at, 3 + at), at % 4 - 1, 5 + at % 2, seed=at) for at in range(5)]

    def drawn(sampler: Sampler) -> list[list[list[Any]]]:
        first = sample(sampler, requests)
        found: list[list[list[Any]]] = [[[]] for _ in requests]
        tickets = {sampler.submit(request): number for number, request in enumerate(requests)}
        passes = 0
        while sampler.waiting:
            for token in sampler.step():
                found[tickets[token.ticket]][token.sample].append(token)
            if (passes := passes + 1) == 3:
                for adapter in case.adapters:
                    adapter.flat.mul_(1.25)
        for adapter in case.adapters:
            adapter.flat.div_(1.25)
        return [*first, *found]

    want = drawn(Sampler(case.model, case.attached))
    sampler = Sampler(case.model, case.attached)
    pretended = Pretended(torch.device("cpu"))
    passes = sampler._passes = GraphedPasses(Passes(case.model, case.attached), lambda device: pretended)
    got = drawn(sampler)
    assert passes.why_not is None and pretended.recorded == 1, "not for the last tokens, which fewer adapters own"
    for samples, others in zip(got, want, strict=True):
        assert ids_of(samples[0]) == ids_of(others[0])
        np.testing.assert_allclose([t.logprob for t in samples[0]], [t.logprob for t in others[0]], rtol=1e-3)


@pytest.mark.parametrize("times", [2, 3])
def test_memory_that_runs_out_in_a_graph_costs_graphs_for_a_while_and_for_good_the_third_time(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lacking(Pretended):
        def record(self, function: Callable[[], None]) -> Callable[[], None]:
            nonlocal left
            left -= 1
            if left >= 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().record(function)

    case, left = case_of(tmp_path, ("lora", "some"), torch.float32, num_hidden_layers=1), times
    for layer in adapted_layers(case.model).values():
        layer.chooser = Fixed(ROUTED)  # type: ignore[union-attr]
    monkeypatch.setattr(recorded_decode, "UNRECORDED", 2)
    sampler, requests = Sampler(case.model, case.attached), [SampleRequest(prompt(at, 4), at, 16) for at in range(2)]
    passes = sampler._passes = GraphedPasses(Passes(case.model, case.attached), Lacking)
    got, want = (sample(own, requests) for own in (sampler, Sampler(case.model, case.attached)))
    assert [[ids_of(one) for one in samples] for samples in got] == [
        [ids_of(one) for one in samples] for samples in want
    ]
    if times < 3:
        assert passes.why_not is None and any(body.is_recorded for body in passes._bodies.values())
    else:
        assert "out of memory" in str(passes.why_not) and not passes._bodies


def test_a_pass_that_has_no_graph_yet_goes_by_that_of_more_rows_and_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of two adapters alone, after the passes of all three have been recorded: the tokens of passes without graphs."""
    case = case_of(tmp_path, ("lora", "dora", "some"), torch.float32, num_hidden_layers=1)
    for layer in adapted_layers(case.model).values():
        layer.chooser = Fixed(ROUTED)  # type: ignore[union-attr]
    monkeypatch.setattr(recorded_decode, "UNRECORDED", 2)
    pretended, eager = Pretended(torch.device("cpu")), Passes(case.model, case.attached)
    sampler = Sampler(case.model, case.attached)
    passes = sampler._passes = GraphedPasses(eager, lambda device: pretended)
    sample(sampler, [SampleRequest(prompt(at, 4), at, recorded_decode.UNRECORDED + 4) for at in range(3)])
    assert pretended.recorded == 1
    fewer = [SampleRequest(prompt(at, 5), at % 2, 3, seed=at, temperature=0.0) for at in (7, 8)]
    with mock.patch.object(Passes, "decode", side_effect=AssertionError("without a graph")):
        got = sample(sampler, fewer)
    assert passes.why_not is None and pretended.recorded == 1
    for samples, others in zip(got, sample(Sampler(case.model, case.attached), fewer), strict=True):
        assert ids_of(samples[0]) == ids_of(others[0])
    single, all_ = (recorded_decode.Shape(32, 4, 64, adapters) for adapters in ((1,), (0, 1, 2)))
    assert all_.holds(single) and not single.holds(single._replace(adapters=())) and single.holds(single)
    assert not any(all_.holds(all_._replace(**more)) for more in ({"rows": 64}, {"slots": 2}, {"adapters": (0, 3)}))


def test_prompts_by_graphs_give_the_tokens_of_passes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of other lengths, owners and slots than those of the recording, of an adapter that has stepped, two samples of
    one prompt; a graph of three adapters serves two of them, and the base model beside them. Without: an adapter on the
    output layer, prompts whose own log-probabilities are asked for, and the first pass of a size."""
    case = case_of(tmp_path, ("lora", "dora", "some", "head"), torch.float32, num_hidden_layers=1)
    for layer in adapted_layers(case.model).values():
        layer.chooser = Fixed(ROUTED)  # type: ignore[union-attr]
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(KeyValueCache, "by_kernel", True)
    pretended, eager, without = Pretended(torch.device("cpu")), Passes(case.model, case.attached), list[bool]()
    prefill = Passes.prefill
    monkeypatch.setattr(Passes, "prefill", lambda *given: (without.append(True), prefill(*given))[1])
    sampler, want = Sampler(case.model, case.attached), Sampler(case.model, case.attached)
    passes = sampler._passes = GraphedPasses(eager, lambda device: pretended)

    def check(*requests: SampleRequest) -> tuple[int, int]:
        """Passes of prompts without a graph, and recordings so far."""
        without.clear()
        got, count = sample(sampler, requests), len(without)
        for samples, others in zip(got, sample(want, requests), strict=True):
            for own, other in zip(samples, others, strict=True):
                assert ids_of(own) == ids_of(other)
                np.testing.assert_allclose([t.logprob for t in own], [t.logprob for t in other], rtol=1e-3)
        assert passes.prompts.why_not is None
        return count, pretended.recorded

    def asked(*prompts: tuple[int, int], **how: Any) -> list[SampleRequest]:
        return [SampleRequest(prompt(7 * n, n), at, 2, seed=n, **how) for at, n in prompts]

    three = asked((0, 20), (1, 9), (2, 30))
    assert [check(*three) for _ in range(4)] == [(1, 0), (0, 0), (0, 1), (0, 1)]
    for adapter in case.adapters:
        adapter.flat.mul_(1.25)
    assert check(*asked((2, 33), (-1, 5), (0, 17))) == (0, 1)
    assert check(*asked((1, 21), num_samples=2)) == (0, 1)
    assert check(*asked((0, 50), prompt_logprobs=True)) == (1, 1)
    assert [check(*asked((3, 40))) for _ in range(3)] == [(1, 1)] * 3
    assert [check(*asked((0, 90), (1, 10))) for _ in range(3)] == [(1, 1), (0, 1), (0, 2)], "another size"
    sampler.free()
    assert [check(*asked((0, 12), (0, 8))) for _ in range(3)] == [(1, 2), (0, 2), (0, 3)]
    assert check(*asked((0, 12), (-1, 8))) == (1, 3), "a single adapter is given all tokens"


def drawn_by_graphs(
    case: Any, monkeypatch: pytest.MonkeyPatch, adapters: Sequence[int], turns: int = 4
) -> GraphedPasses:
    """The passes after prompts of these adapters have been sampled together some times, as without graphs."""
    attention_by_starts(monkeypatch)
    monkeypatch.setattr(KeyValueCache, "by_kernel", True)
    for layer in adapted_layers(case.model).values():
        if isinstance(layer, AdaptedLinear):
            layer.chooser = Fixed(ROUTED)
    want, sampler = Sampler(case.model, case.attached), Sampler(case.model, case.attached)
    passes = sampler._passes = GraphedPasses(Passes(case.model, case.attached), Pretended)
    for turn in range(turns):
        requests = [SampleRequest(prompt(turn + 9 * own, 20), own, 2, temperature=0.0) for own in adapters]
        for got, other in zip(sample(sampler, requests), sample(want, requests), strict=True):
            np.testing.assert_allclose([t.logprob for t in got[0]], [t.logprob for t in other[0]], rtol=1e-3)
    assert passes.why_not is None and passes.prompts.why_not is None
    return passes


def of_configs(*configs: dict[str, Any]) -> Case:
    """A tiny model with such adapters, of random values."""
    model = tiny_model("llama", torch.float32, num_hidden_layers=1)
    prepare_model(model, False)
    specs = {str(at): resolve(LoraConfig(task_type="CAUSAL_LM", **own), model, "a") for at, own in enumerate(configs)}
    attached, adapters = attach(model, specs, 0)
    torch.manual_seed(0)
    for parameter in (own for adapter in adapters for own in adapter.named_parameters().values()):
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return Case(model, attached, adapters)


def test_prompts_of_adapters_behind_the_decoder_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an output layer that one job has a copy of and another an adapter on; nor more adapters than a graph has tokens."""
    few: dict[str, Any] = {"r": 2, "target_modules": ["v_proj"]}
    head = few | {"target_modules": ["v_proj", "lm_head"]}
    case = of_configs(few | {"modules_to_save": ["lm_head"]}, head, few, few, few)
    assert not drawn_by_graphs(case, monkeypatch, (1, 2)).prompts._bodies
    assert len(drawn_by_graphs(case, monkeypatch, (2, 3)).prompts._bodies) == 1
    monkeypatch.setattr(recorded_prefill, "_rounded", lambda number: number)
    requests = [SampleRequest((5,), own, 2, temperature=0.0) for own in (2, 3)]
    sampler = Sampler(case.model, case.attached)
    passes = sampler._passes = GraphedPasses(Passes(case.model, case.attached), Pretended)
    for _ in range(4):
        sample(sampler, requests)
        passes.prompts._adapters = frozenset({2, 3, 4})
    assert passes.prompts.why_not is None and not passes.prompts._bodies


def test_graphs_keep_nothing_of_adapters_that_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with each snapshot of a service's model, whose adapter has a new number."""
    few: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    case, left = of_configs(few), list[weakref.ref[torch.Tensor]]()
    monkeypatch.setattr(recorded_decode, "UNRECORDED", 1)
    passes = drawn_by_graphs(case, monkeypatch, (0,))
    sampler = Sampler(case.model, case.attached)
    sampler._passes = passes
    spec = resolve(LoraConfig(task_type="CAUSAL_LM", **few), tiny_model("llama", num_hidden_layers=1), "a")
    for number in range(2, 6):
        choosers = dict.fromkeys(spec.modules, Fixed(ROUTED))
        adapter = attach_one(case.model, case.attached, str(number), number, spec, 0, choosers)
        left.append(weakref.ref(next(iter(adapter.named_parameters().values()))))
        for turn in range(3):
            sample(sampler, [SampleRequest(prompt(turn, 20), own, 4) for own in (0, number)])
        detach_one(case.model, number)
        del adapter
    assert [key.adapters for key in passes._bodies] == [(0, 5)]
    assert passes.why_not is None and passes.prompts.why_not is None and len(passes.prompts._bodies) == 1
    gc.collect()
    assert [own() is not None for own in left] == [False, False, False, True]
    sampler.forget(5)
    gc.collect()
    assert not passes._bodies and not passes.prompts._bodies and not any(own() is not None for own in left)


def test_graphs_know_no_passes_of_adapters_that_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One new adapter after the other, whose prompts are of two sizes once each, as a snapshot's proof and its samples are; and
    then any mixes of adapters."""
    few: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    case = of_configs(few)
    monkeypatch.setattr(recorded_decode, "SEEN", 4)
    monkeypatch.setattr(recorded_prefill, "SEEN", 4)
    passes, sampler = drawn_by_graphs(case, monkeypatch, (0,), 1), Sampler(case.model, case.attached)
    sampler._passes = passes
    spec = resolve(LoraConfig(task_type="CAUSAL_LM", **few), tiny_model("llama", num_hidden_layers=1), "a")
    choosers, prompts = dict.fromkeys(spec.modules, Fixed(ROUTED)), passes.prompts
    sample(sampler, [SampleRequest(prompt(0, 90), 0, 2)])  # the cache grows once
    for number in range(1, 24):
        attach_one(case.model, case.attached, str(number), number, spec, 0, choosers)
        for length in (20, 90):
            sample(sampler, [SampleRequest(prompt(number, length), number, 2)])
        if number > 3:
            detach_one(case.model, number - 3)
            sampler.forget(number - 3)
            assert prompts._adapters == {0, number - 2, number - 1, number} and len(prompts._seen) <= 4
            assert {own for shape in passes._seen for own in shape.adapters} <= prompts._adapters
    for mix in itertools.combinations((0, 21, 22, 23), 2):
        sample(sampler, [SampleRequest(prompt(1, 20), own, 2) for own in mix])
    assert passes.why_not is None and prompts.why_not is None
    assert len(passes._fits._values) == len(prompts._fitting._values) == 4


@pytest.mark.parametrize("vocabulary", [7, 512, 5000])
def test_sums_of_blocks_draw_the_tokens_of_a_running_sum(vocabulary: int) -> None:
    """And nothing of probability 0, whatever the number that it is drawn with."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(64, vocabulary, generator=generator)
    logits[:, ::3] = float("-inf")
    logp, u = logits.log_softmax(-1), torch.rand(64, dtype=torch.float64, generator=generator)
    u[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert torch.equal(inverse_in_blocks(logp, u), _inverse(logp, u))
    sums = logp.exp().double().cumsum(-1)
    wanted = [int((row <= own * row[-1]).sum()) for row, own in zip(sums, u, strict=True)]
    assert inverse_in_blocks(logp, u)[2:].tolist() == wanted[2:]
    assert logp[torch.arange(64), inverse_in_blocks(logp, torch.ones_like(u))].isfinite().all()
