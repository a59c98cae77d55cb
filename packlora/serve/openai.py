"""An OpenAI-style endpoint for the adapters that are served: models, chat and text completions, streamed or whole.

`routes(backend, owner_of)` are Starlette's; the backend samples, and nothing here waits for it but coroutines. Texts are made
here: tokens of prompts by the chat template, texts of answers token by token, cut before a stop string.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from packlora.data.prompts import prompt_ids
from packlora.engine.sampling import Likeliest, PromptScores, SampledToken, SampleRequest
from packlora.engine.text import TextStream
from packlora.errors import InputError, quoted
from packlora.serve.errors import Refused
from packlora.serve.http import ClosedStream
from packlora.serve.openai_fields import ChatFields, CompletionFields, Fields, refusal_of

MOST_BYTES = 8 << 20
"""Largest body of a request."""
LOOK_SECONDS = 1.0
"""Seconds between two looks whether a client that waits for a whole answer is still there."""
MOST_AHEAD = 256
"""Tokens that are kept for a client that reads slowly."""
F = TypeVar("F", bound=Fields)


@dataclass(frozen=True, slots=True)
class Served:
    """A model that answers. ends: tokens that end an answer. created: seconds since 1970."""

    name: str
    tokenizer: Any
    ends: frozenset[int]
    created: int = 0


class Backend(Protocol):
    """Adapters and base models that sample. An owner sees its own adapters and the base models. `models` and `served` may be
    called in any thread."""

    def models(self, owner: str) -> Sequence[Served]:
        """Models that an owner may name."""

    def served(self, owner: str, name: str) -> Served | None:
        """The model of a name: an adapter's, a tinker path or a base model's; None where the owner sees none."""

    def stream(self, owner: str, name: str, request: SampleRequest) -> AsyncGenerator[SampledToken]:
        """Tokens of all samples as they come; `adapter` of the request is the backend's to set. Closing it cancels them.

        Raises:
            InputError: the request cannot be served.
            Refused: nor can it, with an HTTP status.
        """


class _Problem(Exception):
    """An answer with an error. param: field of the request."""

    def __init__(self, text: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.body = {
            "error": {"message": text, "type": _TYPES.get(status, "server_error"), "param": param, "code": code}
        }
        self.status = status


_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error", 413: "invalid_request_error",
    429: "rate_limit_error",
}  # fmt: skip


def routes(backend: Backend, owner_of: Callable[[Request], str]) -> list[Route]:
    """The endpoint's routes.

    Args:
        owner_of: the owner that a request's key names; what it raises is the application's to answer.
    """

    def answered(call: Callable[[str, Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await _answered(lambda: call(owner_of(request), request))

        return answer

    async def models(owner: str, request: Request) -> Response:
        found = await run_in_threadpool(backend.models, owner)
        return JSONResponse({"object": "list", "data": [_card(one) for one in found]})

    async def model(owner: str, request: Request) -> Response:
        return JSONResponse(_card(await _served(backend, owner, request.path_params["name"])))

    async def chat(owner: str, request: Request) -> Response:
        return await _chat(backend, owner, request)

    async def completions(owner: str, request: Request) -> Response:
        return await _completions(backend, owner, request)

    return [
        Route("/v1/models", answered(models), methods=["GET"]),
        Route("/v1/models/{name:path}", answered(model), methods=["GET"]),
        Route("/v1/chat/completions", answered(chat), methods=["POST"]),
        Route("/v1/completions", answered(completions), methods=["POST"]),
    ]


async def _answered(answer: Callable[[], Awaitable[Response]]) -> Response:
    try:
        return await answer()
    except _Problem as problem:
        return JSONResponse(problem.body, problem.status)
    except Refused as error:
        return JSONResponse(_problem_of(error).body, error.status, headers=dict(error.headers))
    except InputError as error:
        return JSONResponse(_Problem(str(error), param=_field(str(error))).body, 400)


def _problem_of(error: Refused) -> _Problem:
    return _Problem(error.text, error.status, _field(error.text))


def _field(text: str) -> str | None:
    """The field that an error names."""
    name, colon, _ = text.partition(":")
    return name if colon and " " not in name else None


async def _while_there(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Wait for work, and end it where its client has left."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=LOOK_SECONDS)
            if not task.done() and await request.is_disconnected():
                raise _Problem("the client has left", 499)
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _card(model: Served) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "packlora"}


async def _served(backend: Backend, owner: str, name: str) -> Served:
    found = await run_in_threadpool(backend.served, owner, name)
    if found is None:
        raise _Problem(
            f"model: {quoted(name)} is not served; GET /v1/models lists those that are", 404, "model", "model_not_found"
        )
    return found


async def _fields(request: Request, kind: type[F]) -> F:
    """The fields of a request. Raises _Problem."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise _Problem(f"the body has more than {MOST_BYTES} bytes", 413)
    try:
        return await run_in_threadpool(kind.model_validate_json, bytes(body))
    except ValidationError as error:
        raise _Problem(*refusal_of(error)) from None


# --- answers as they grow ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Choice:
    """One answer. text: all of it so far, told: how much of it has been sent, which leaves out what may begin a stop string."""

    stream: TextStream
    stops: Sequence[str]
    text: str = ""
    told: int = 0
    tokens: list[SampledToken] = field(default_factory=list)
    """Tokens without one that ends the answer."""
    sampled: int = 0
    finish: str | None = None

    def newest(self, token: SampledToken) -> list[SampledToken]:
        """The newest token, unless it ends the answer."""
        return [token] if self.tokens and self.tokens[-1] is token else []

    def take(self, token: SampledToken, ends: frozenset[int]) -> str:
        """The text that can be sent with a new token."""
        self.sampled += 1
        is_end = token.reason == "stop" and token.id in ends
        if not is_end:
            self.tokens.append(token)
            self.text += self.stream.push(token.id)
        if token.reason is not None:
            self.finish = "length" if token.reason == "length" else "stop"
        cuts = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
        self.text = self.text[: min(cuts)] if cuts else self.text
        held = 0 if self.finish is not None else max((_overlap(self.text, stop) for stop in self.stops), default=0)
        new = self.text[self.told : len(self.text) - held]
        self.told += len(new)
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string begins."""
    end = text[max(len(text) - len(stop) + 1, 0) :]
    begins = (at for at, letter in enumerate(end) if letter == stop[0])
    return next((len(end) - at for at in begins if stop.startswith(end[at:])), 0)


@dataclass(slots=True)
class _Asked:
    """A request on its way: prompts with their token ids, and what is sampled of each. scores: of prompts, by number."""

    model: Served
    prompts: Sequence[Sequence[int]]
    fields: Fields
    choices: list[_Choice] = field(default_factory=list)
    scores: dict[int, PromptScores] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, int]:
        asked = sum(map(len, self.prompts))
        made = 0 if self.fields.max_tokens == 0 else sum(choice.sampled for choice in self.choices)
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}

    async def run(self, backend: Backend, owner: str) -> AsyncGenerator[tuple[int, SampledToken, str]]:
        """Number of the choice, its new token, and the text that can be sent with it. All prompts are sampled at once."""
        own, tokenizer = self.fields, self.model.tokenizer
        self.choices = [_Choice(TextStream(tokenizer, True), own.stops) for _ in range(own.n * len(self.prompts))]
        streams = [backend.stream(owner, self.model.name, self._request(number)) for number in range(len(self.prompts))]
        async with contextlib.aclosing(_merged(streams)) as tokens:
            async for number, token in tokens:
                if token.reason == "not finite":
                    raise _Problem(f"model: {self.model.name!r} gives logits that are not finite", 500, "model")
                if token.scores is not None:
                    self.scores[number] = token.scores
                at = number * own.n + token.sample
                yield at, token, self.choices[at].take(token, self.model.ends)

    def _request(self, number: int) -> SampleRequest:
        own = self.fields
        return SampleRequest(
            tuple(self.prompts[number]), max_tokens=own.most_tokens, num_samples=own.n, temperature=own.temperature,
            top_k=own.top_k, top_p=own.top_p, seed=(own.own_seed + number) % (1 << 63), stop_tokens=self.model.ends,
            stop_strings=tuple(own.stops), prompt_logprobs=own.scores_prompt, top_sampled=own.likeliest,
        )  # fmt: skip

    async def whole(self, backend: Backend, owner: str) -> None:
        """Sample all choices to their ends."""
        async with contextlib.aclosing(self.run(backend, owner)) as tokens:
            async for _ in tokens:
                pass


async def _merged(streams: Sequence[AsyncGenerator[SampledToken]]) -> AsyncGenerator[tuple[int, SampledToken]]:
    """Tokens of several streams as they come, each with the number of its stream."""
    found: asyncio.Queue[tuple[int, SampledToken | BaseException | None]] = asyncio.Queue(MOST_AHEAD)

    async def pass_on(number: int, stream: AsyncGenerator[SampledToken]) -> None:
        last: BaseException | None = None
        try:
            async with contextlib.aclosing(stream):
                async for token in stream:
                    await found.put((number, token))
        except Exception as error:
            last = error
        await found.put((number, last))

    tasks = [asyncio.ensure_future(pass_on(*own)) for own in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, own = await found.get()
            if isinstance(own, BaseException):
                raise own
            if own is None:
                left -= 1
            else:
                yield number, own
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _as_text(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))


def _chat_logprobs(tokenizer: Any, tokens: Sequence[SampledToken]) -> dict[str, Any]:
    def line(token: int, logprob: float) -> dict[str, Any]:
        text = _as_text(tokenizer, token)
        return {"token": text, "logprob": float(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}

    content = [
        line(token.id, token.logprob) | {"top_logprobs": [line(*pair) for pair in _pairs(token.top)]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _pairs(top: Likeliest | None) -> list[tuple[int, float]]:
    return [] if top is None else list(zip(top.ids[0].tolist(), top.logprobs[0].tolist(), strict=True))


async def _events(bodies: AsyncGenerator[dict[str, Any]]) -> Response:
    """Server-sent events. An error before the first is raised; a later one is an event."""
    first = await anext(bodies)

    async def lines() -> AsyncIterator[str]:
        yield f"data: {json.dumps(first)}\n\n"
        try:
            async for body in bodies:
                yield f"data: {json.dumps(body)}\n\n"
        except (_Problem, Refused) as error:
            problem = error if isinstance(error, _Problem) else _problem_of(error)
            yield f"data: {json.dumps(problem.body)}\n\n"
        finally:
            await bodies.aclose()
        yield "data: [DONE]\n\n"

    return ClosedStream(lines(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


# --- chat --------------------------------------------------------------------------------------------------------------------


async def _chat(backend: Backend, owner: str, request: Request) -> Response:
    fields = await _fields(request, ChatFields)
    model = await _served(backend, owner, fields.model)
    if not model.tokenizer.chat_template:
        raise _Problem(f"model: {model.name!r} has no chat template; use /v1/completions", 400, "model")
    ids = await run_in_threadpool(fields.ids, model.tokenizer)
    asked = _Asked(model, [ids], fields)
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": fields.model}
    if fields.stream:
        return await _events(_chat_chunks(asked, head | {"object": "chat.completion.chunk"}, backend, owner))
    await _while_there(request, asked.whole(backend, owner))
    choices = [
        {
            "index": at, "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(model.tokenizer, choice.tokens) if fields.logprobs else None,
            "finish_reason": choice.finish,
        }
        for at, choice in enumerate(asked.choices)
    ]  # fmt: skip
    return JSONResponse(head | {"object": "chat.completion", "choices": choices, "usage": asked.usage})


async def _chat_chunks(
    asked: _Asked, head: Mapping[str, Any], backend: Backend, owner: str
) -> AsyncGenerator[dict[str, Any]]:
    fields = asked.fields
    begun = set[int]()
    async for at, token, text in asked.run(backend, owner):
        choice = asked.choices[at]
        delta: dict[str, Any] = {"content": text} if text or at not in begun else {}
        if at not in begun:
            delta["role"] = "assistant"
            begun.add(at)
        logprobs = _chat_logprobs(asked.model.tokenizer, choice.newest(token)) if fields.logprobs else None
        body = {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": choice.finish}
        yield {**head, "choices": [body]}
    if fields.tells_usage:
        yield {**head, "choices": [], "usage": asked.usage}


# --- text --------------------------------------------------------------------------------------------------------------------


async def _completions(backend: Backend, owner: str, request: Request) -> Response:
    fields = await _fields(request, CompletionFields)
    model = await _served(backend, owner, fields.model)
    prompts = [
        one if isinstance(one, list) else await run_in_threadpool(prompt_ids, one, model.tokenizer)
        for one in fields.prompts
    ]
    asked = _Asked(model, prompts, fields)
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()), "model": fields.model,
    }  # fmt: skip
    if fields.stream:
        return await _events(_text_chunks(asked, head, backend, owner))
    await _while_there(request, asked.whole(backend, owner))
    choices = [_text_choice(asked, at, fields) for at in range(len(asked.choices))]
    return JSONResponse(head | {"choices": choices, "usage": asked.usage})


def _text_choice(asked: _Asked, at: int, fields: CompletionFields) -> dict[str, Any]:
    choice, ids, tokenizer = asked.choices[at], asked.prompts[at // fields.n], asked.model.tokenizer
    first = asked.scores.get(at // fields.n)
    keeps = fields.max_tokens != 0
    rows: list[tuple[int, float | None, Likeliest | None]] = []
    if fields.echo:
        known = None if first is None else first.logprobs
        own = [None] * len(ids) if known is None else [None, *known[1:].tolist()]
        rows = [(token, logprob, None) for token, logprob in zip(ids, own, strict=True)]
    rows += [(token.id, token.logprob, token.top) for token in choice.tokens if keeps]
    text = (str(tokenizer.decode(ids)) if fields.echo else "") + (choice.text if keeps else "")
    return {
        "index": at, "text": text, "finish_reason": choice.finish if keeps else "length",
        "logprobs": _text_logprobs(tokenizer, rows, 0) if fields.logprobs is not None else None,
    }  # fmt: skip


def _text_logprobs(
    tokenizer: Any, rows: Sequence[tuple[int, float | None, Likeliest | None]], start: int
) -> dict[str, Any]:
    texts = [_as_text(tokenizer, token) for token, _, _ in rows]
    stream = TextStream(tokenizer)  # a character of several tokens is one of the text
    offsets = [*accumulate((len(stream.push(token)) for token, _, _ in rows), initial=start)][: len(rows)]
    top = [
        {_as_text(tokenizer, token): logprob for token, logprob in _pairs(likeliest)} or None
        for _, _, likeliest in rows
    ]
    return {"tokens": texts, "token_logprobs": [one for _, one, _ in rows], "top_logprobs": top, "text_offset": offsets}


async def _text_chunks(
    asked: _Asked, head: Mapping[str, Any], backend: Backend, owner: str
) -> AsyncGenerator[dict[str, Any]]:
    fields = asked.fields
    async for at, token, text in asked.run(backend, owner):
        choice = asked.choices[at]
        rows = [(one.id, one.logprob, one.top) for one in choice.newest(token)]
        logprobs = (
            _text_logprobs(asked.model.tokenizer, rows, choice.told - len(text))
            if fields.logprobs is not None
            else None
        )
        yield {**head, "choices": [{"index": at, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}]}
    if fields.tells_usage:
        yield {**head, "choices": [], "usage": asked.usage}
