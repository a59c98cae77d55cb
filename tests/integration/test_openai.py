"""The OpenAI-style endpoint, spoken to in this process by the public client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from sampling_cases import Case, case_of, full_logits, ids_of

from packlora.engine.generate import Sampler, sample
from packlora.engine.sampling import SampledToken, SampleRequest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")
pytest.importorskip("starlette")

from starlette.applications import Starlette  # noqa: E402
from starlette.exceptions import HTTPException  # noqa: E402

from packlora.serve.openai import Served, routes  # noqa: E402

PICTURE = {"type": "image_url", "image_url": {"url": "http://x"}}
TALK = [{"role": "user", "content": "the quick fox"}]


class Stepping:
    """Samples in the loop of whoever waits: all requests that wait take part in each step."""

    def __init__(self, case: Case, tokenizer: Any) -> None:
        self.case, self.tokenizer = case, tokenizer
        self.sampler = Sampler(case.model, case.attached, tokenizer)
        self.found: dict[int, list[SampledToken]] = {}
        self.most, self.together = 0, 1

    def models(self, owner: str) -> Sequence[Served]:
        return [self.served(owner, name) for name in ("base", "tinker://run:train:0/weights/lora")]  # type: ignore[misc]

    def served(self, owner: str, name: str) -> Served | None:
        own = {"base", "tinker://run:train:0/weights/lora"} if owner == "me" else {"base"}
        return Served(name, self.tokenizer, frozenset({2, 5}), 7) if name in own else None

    async def stream(self, owner: str, name: str, request: SampleRequest) -> AsyncGenerator[SampledToken]:
        adapter = -1 if name == "base" else 0
        ticket = self.sampler.submit(replace(request, adapter=adapter))
        own, going = self.found.setdefault(ticket, []), request.num_samples
        self.most = max(self.most, len(self.found))
        try:
            async with asyncio.timeout(120):
                while self.most < self.together:
                    await asyncio.sleep(0)
            while going:
                if not own:
                    for token in self.sampler.step():
                        self.found[token.ticket].append(token)
                while own:
                    token = own.pop(0)
                    going -= token.reason is not None
                    yield token
                await asyncio.sleep(0)
        finally:
            self.sampler.cancel(ticket)
            del self.found[ticket]


Run = Callable[[Callable[[Any], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Stepping:
    return Stepping(case_of(tmp_path_factory.mktemp("openai"), ("lora",), torch.float64), tokenizer)


@pytest.fixture(scope="module")
def run(backend: Stepping) -> Run:
    def owner_of(request: Any) -> str:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in ("me", "you"):
            raise HTTPException(401, "no such key")
        return str(key)

    app = Starlette(routes=routes(backend, owner_of))

    def call(ask: Callable[[Any], Coroutine[Any, Any, Any]], key: str = "me") -> Any:
        async def go() -> Any:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
                return await ask(
                    openai.AsyncOpenAI(base_url="http://packlora/v1", api_key=key, http_client=http, max_retries=0)
                )

        return asyncio.run(go())

    return call


LORA = "tinker://run:train:0/weights/lora"


def own_sample(backend: Stepping, ids: Sequence[int], **how: Any) -> list[SampledToken]:
    request = SampleRequest(tuple(ids), stop_tokens=frozenset({2, 5}), **how)
    ((tokens,),) = sample(backend.sampler, [request])
    return tokens


def chat_ids(backend: Stepping) -> list[int]:
    text = backend.tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    ids: list[int] = backend.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_models_are_those_that_the_owner_sees(run: Any) -> None:
    found = run(lambda client: client.models.list())
    assert [model.id for model in found.data] == ["base", LORA]
    assert run(lambda client: client.models.retrieve(LORA)).created == 7
    with pytest.raises(openai.NotFoundError, match="is not served"):
        run(lambda client: client.models.retrieve(LORA), key="you")
    with pytest.raises(openai.AuthenticationError):
        run(lambda client: client.models.list(), key="nobody")


@pytest.mark.parametrize("model", ["base", LORA])
def test_a_chat_is_answered_whole_and_streamed_alike(run: Run, backend: Stepping, model: str) -> None:
    how: dict[str, Any] = {
        "model": model, "messages": TALK, "max_tokens": 12, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = run(lambda client: client.chat.completions.create(**how))
    ids = chat_ids(backend)
    want = own_sample(backend, ids, adapter=-1 if model == "base" else 0, max_tokens=12, seed=3)
    kept = [token for token in want if token.reason != "stop"]
    choice = whole.choices[0]
    assert choice.message.content == backend.tokenizer.decode(ids_of(kept), skip_special_tokens=True)
    assert choice.finish_reason == want[-1].reason
    for token, line in zip(kept, choice.logprobs.content, strict=True):
        assert math.isclose(line.logprob, token.logprob, rel_tol=1e-9) and len(line.top_logprobs) == 2
        assert line.token == backend.tokenizer.decode([token.id])
        assert line.bytes == (None if "\ufffd" in line.token else list(line.token.encode())), "no bytes of a part"
    logits = full_logits(backend.case.peft["" if model == "base" else "lora"], [*ids, *ids_of(kept)])
    own = logits[len(ids) - 1 : -1].log_softmax(-1)[torch.arange(len(kept)), torch.tensor(ids_of(kept))]
    assert torch.allclose(own, torch.tensor([line.logprob for line in choice.logprobs.content]).double(), rtol=1e-6)
    assert whole.usage.prompt_tokens == len(ids) and whole.choices[1].message.content != choice.message.content

    async def streamed(client: Any) -> Any:
        how["stream_options"] = {"include_usage": True}
        return [chunk async for chunk in await client.chat.completions.create(stream=True, **how)]

    chunks = run(streamed)
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    for at in (0, 1):
        own_chunks = [one for chunk in chunks for one in chunk.choices if one.index == at]
        assert (
            own_chunks[0].delta.role == "assistant" and own_chunks[-1].finish_reason == whole.choices[at].finish_reason
        )
        assert "".join(one.delta.content or "" for one in own_chunks) == whole.choices[at].message.content
        lines = [line for one in own_chunks for line in one.logprobs.content]
        assert lines == whole.choices[at].logprobs.content


def test_a_text_ends_before_a_stop_string_that_no_chunk_has_begun_to_show(run: Run, backend: Stepping) -> None:
    how: dict[str, Any] = {"model": LORA, "prompt": "the lazy", "max_tokens": 30, "temperature": 0}
    text = run(lambda client: client.completions.create(**how)).choices[0].text
    at = next(n for n in range(4, len(text) - 4) if text[n : n + 3] not in text[: n + 2])
    stop = text[at : at + 3]
    want = text[: text.find(stop)]
    found = run(lambda client: client.completions.create(**how, stop=["never there", stop])).choices[0]
    assert (found.text, found.finish_reason) == (want, "stop")

    async def streamed(client: Any) -> list[str]:
        return [c.choices[0].text async for c in await client.completions.create(**how, stop=stop, stream=True)]

    pieces = run(streamed)
    assert "".join(pieces) == want and len(pieces) > 1


def test_prompts_as_texts_or_tokens_with_echo_and_their_logprobs(run: Run, backend: Stepping) -> None:
    ids = backend.tokenizer("the quick brown", add_special_tokens=False)["input_ids"]
    how: dict[str, Any] = {"model": LORA, "max_tokens": 3, "temperature": 0, "logprobs": 1, "echo": True}
    one, two = run(lambda client: client.completions.create(prompt=[ids, ids[:2]], **how)).choices
    logp = full_logits(backend.case.peft["lora"], ids).log_softmax(-1)
    assert one.logprobs.token_logprobs[0] is None and len(one.logprobs.tokens) == len(ids) + 3
    for at, token in enumerate(ids[1:], 1):
        assert math.isclose(one.logprobs.token_logprobs[at], float(logp[at - 1, token]), rel_tol=1e-6)
    assert one.text.startswith("the quick brown") and one.text == "".join(one.logprobs.tokens)
    assert one.logprobs.text_offset[1] == len(one.logprobs.tokens[0])
    again = run(lambda client: client.completions.create(prompt="the quick brown", **how)).choices[0]
    assert again.text == one.text and two.text != one.text
    scored = run(lambda client: client.completions.create(prompt=ids, **how | {"max_tokens": 0})).choices[0]
    assert scored.text == "the quick brown" and len(scored.logprobs.tokens) == len(ids)


def test_requests_of_many_clients_share_batches_and_a_client_that_leaves_is_cancelled(
    run: Run, backend: Stepping
) -> None:
    how: dict[str, Any] = {"messages": TALK, "max_tokens": 8, "seed": 1}

    async def together(client: Any) -> list[Any]:
        return await asyncio.gather(*(client.chat.completions.create(model=m, **how) for m in ("base", LORA, "base")))

    backend.most, backend.together = 0, 3
    found = run(together)
    backend.together = 1
    assert backend.most == 3 and found[0].choices[0].message == found[2].choices[0].message
    tokens = backend.stream("me", "base", SampleRequest((7, 8), max_tokens=50))

    async def leave() -> None:
        await anext(tokens)
        assert backend.sampler.waiting == 1
        await tokens.aclose()

    asyncio.run(leave())
    assert backend.sampler.waiting == 0


def test_what_is_not_served_is_refused_naming_the_field(run: Run) -> None:
    chat: dict[str, Any] = {"model": "base", "messages": TALK}
    for more, status, said in (
        ({"model": "other"}, 404, "model: 'other' is not served"),
        ({"messages": []}, 400, "messages: "),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, 400, "'image_url'"),
        ({"messages": [{"role": "king", "content": "a"}]}, 400, "messages.0.role: "),
        ({"temperature": -1}, 400, "temperature: "),
        ({"n": 1000}, 400, "n: "),
        ({"max_tokens": 0}, 400, "max_tokens: "),
        ({"presence_penalty": 1.0}, 400, "presence_penalty: 1.0 is not served"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools: "),
        ({"top_logprobs": 40, "logprobs": True}, 400, "top_logprobs: "),
        ({"messages": [{"role": "user", "content": "the fox " * 200}]}, 400, "the model's context 256"),
        ({"messages": [{"role": "user", "content": "the fox " * 200}], "stream": True}, 400, "the model's context 256"),
    ):  # fmt: skip
        with pytest.raises(openai.APIStatusError) as refused:
            run(lambda client, how=chat | more: client.chat.completions.create(**how))  # type: ignore[misc]
        assert refused.value.status_code == status and said in str(refused.value), (more, refused.value)
    with pytest.raises(openai.BadRequestError, match="echo"):
        run(lambda client: client.completions.create(model="base", prompt="a", echo=True, stream=True))
    with pytest.raises(openai.BadRequestError, match="not one of the vocabulary"):
        run(lambda client: client.completions.create(model="base", prompt=[5, 999]))
