"""HTTP: keys, bounded bodies, long polls, and errors in words.

Every POST of work is answered with a promise before its work is done. Whoever waits for a result holds a connection for at most
HOLD seconds; clients ask again at once, so this is what keeps them from asking without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packlora.errors import quoted, reason_of
from packlora.serve import openai
from packlora.serve.desk import Desk
from packlora.serve.errors import Refused
from packlora.serve.fields import text_of
from packlora.serve.logs import LOG
from packlora.serve.page import PAGE
from packlora.serve.rest import OPTIMIZER, Rest
from packlora.serve.served import ServedModels

API = "/api/v1"
HOLD = 20.0
"""Seconds for which a request for a result is held."""
CLIENTS = ((0, 38), (0, 39))
"""First release of the client that is served, and the first one that was not tried."""
TRAINING = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
LOOPBACK = ("127.0.0.1", "::1", "localhost", "testclient")
PROTOBUF = "application/x-protobuf"
STOPPING = "the service is stopping; it goes on when it is started again"


class Keys:
    """API keys, and the owner that each stands for.

    Args:
        keys: that are taken; None: every key is, and is an owner of its own.
    """

    def __init__(self, keys: list[str] | None = None) -> None:
        self._keys = None if keys is None else [key.encode() for key in keys]

    @property
    def is_closed(self) -> bool:
        """Whether there are keys, so that clients need not trust each other."""
        return self._keys is not None

    def owner(self, key: str | None, missing: str = "x-api-key: there is none; set TINKER_API_KEY") -> str:
        """Raises Refused. missing: what is said where there is no key."""
        given = (key or "").encode()
        if not given:
            raise Refused(missing, 401)
        # all are compared, so that the time tells nothing
        if self._keys is not None and not sum(hmac.compare_digest(given, own) for own in self._keys):
            raise Refused("api key: it is not one of this service's keys", 401)
        return hashlib.sha256(given).hexdigest()[:32]


class Door:
    """Handlers of the protocol's calls.

    Args:
        hold: see HOLD.
    """

    def __init__(self, desk: Desk, keys: Keys, hold: float = HOLD) -> None:
        self.desk, self.keys, self.hold, self.service = desk, keys, hold, desk.service
        self.rest = Rest(desk)
        self.is_closing = False

    def close(self) -> None:
        """Let everybody who waits go: the service is stopping. Any thread may call it."""
        self.is_closing = True
        self.service.tell_all()

    # --- bodies and errors -------------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Response:
        """Answer a call of the protocol."""
        try:
            answer = await self._answer(request)
        except Refused as error:
            answer = _refusal(request, error)
        except ClientDisconnect:
            answer = Response(status_code=499)
        except (sqlite3.OperationalError, OSError) as error:
            LOG.error("%s %s: %s", request.method, request.url.path, reason_of(error))
            answer = _refusal(request, Refused(f"nothing can be written down now: {reason_of(error)}", 429, 10))
        except Exception as error:
            LOG.exception("%s %s failed", request.method, request.url.path)
            answer = JSONResponse({"error": f"a defect of the service: {type(error).__name__}"}, 500)
        return answer

    async def _answer(self, request: Request) -> Response:
        path = request.path_params["path"]
        if path == "healthz":
            return self._health()
        owner = self.keys.owner(request.headers.get("x-api-key"))
        is_forward_backward = request.method == "POST" and path == "forward_backward"
        raw = await self._body(request, not is_forward_backward)
        if is_forward_backward:
            if request.headers.get("content-type", "").partition(";")[0] != PROTOBUF:
                raise Refused(f"content-type: forward_backward takes {PROTOBUF}, as tinker 0.38 sends it", 415)
            return JSONResponse({"request_id": await run_in_threadpool(self.desk.forward_backward, owner, raw)})
        body = _json(raw, self.desk.limits.json_depth)
        if request.method == "POST" and (call := CALLS.get(path)) is not None:
            return await call(self, owner, body, request)
        at, query, key = str(request.base_url), request.query_params, request.headers.get("x-idempotency-key")
        found = await run_in_threadpool(self.rest.answer, owner, request.method, path, body, query, at, key)
        return Response(status_code=204) if found is None else JSONResponse(found)

    def _health(self) -> Response:
        if self.service.failure is not None:
            return JSONResponse({"error": f"the service has failed: {reason_of(self.service.failure)}"}, 503)
        return JSONResponse({"status": "ok"})

    async def _body(self, request: Request, is_json: bool) -> bytes:
        """The body, which is never read further than the limit."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise Refused(f"content-encoding: {quoted(encoding)} is not taken; send the body as it is", 415)
        limits, size, chunks = self.desk.limits, 0, list[bytes]()
        name = "json_bytes" if is_json and limits.json_bytes < limits.body_bytes else "body_bytes"
        most = getattr(limits, name)
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise Refused(f"the body is larger than the limit {name} of {most}", 413)
            chunks.append(chunk)
        return b"".join(chunks)

    # --- calls -------------------------------------------------------------------------------------------------------------

    async def _config(self, owner: str, body: Any, request: Request) -> Response:
        _check_client(body.get("sdk_version"))
        return JSONResponse({})

    async def _dynamic_config(self, owner: str, body: Any, request: Request) -> Response:
        return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": False})

    async def _telemetry(self, owner: str, body: Any, request: Request) -> Response:
        return JSONResponse({"status": "accepted"})

    async def _create_session(self, owner: str, body: Any, request: Request) -> Response:
        _check_client(body.get("sdk_version"))
        key = request.headers.get("x-idempotency-key")
        session = await run_in_threadpool(self.desk.create_session, owner, body, key)
        return JSONResponse({"type": "create_session", "session_id": session})

    async def _heartbeat(self, owner: str, body: Any, request: Request) -> Response:
        await run_in_threadpool(self.desk.session, owner, body.get("session_id"))
        return JSONResponse({"type": "session_heartbeat"})

    async def _create_model(self, owner: str, body: Any, request: Request) -> Response:
        return JSONResponse({"request_id": await run_in_threadpool(self.desk.create_model, owner, body)})

    async def _load_weights(self, owner: str, body: Any, request: Request) -> Response:
        call = self.desk.load_as_new if body.get("model_id") is None else self._load_into
        return JSONResponse({"request_id": await run_in_threadpool(call, owner, body)})

    def _load_into(self, owner: str, body: Mapping[str, Any]) -> str:
        return self.desk.submit(owner, "load_weights", body)

    async def _get_info(self, owner: str, body: Any, request: Request) -> Response:
        tenant = await run_in_threadpool(self.desk.tenant, owner, body.get("model_id"))
        facts = tenant.host.facts
        is_near = request.client is not None and request.client.host in LOOPBACK
        data = {
            "arch": facts.architecture, "model_name": facts.name, "tokenizer_id": facts.path if is_near else facts.name,
        }  # fmt: skip
        return JSONResponse(
            {
                "type": "get_info", "model_id": tenant.id, "model_data": data, "is_lora": True, "lora_rank": tenant.wanted.rank,
                "model_name": facts.name, "optimizer_config": OPTIMIZER,
            }
        )  # fmt: skip

    async def _unload_model(self, owner: str, body: Any, request: Request) -> Response:
        return JSONResponse({"request_id": await run_in_threadpool(self.desk.unload, owner, body)})

    async def _create_sampling_session(self, owner: str, body: Any, request: Request) -> Response:
        sampler = await run_in_threadpool(self.desk.create_sampling_session, owner, body)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _asample(self, owner: str, body: Any, request: Request) -> Response:
        promise, samples = await run_in_threadpool(self.desk.asample, owner, body)
        return JSONResponse({"request_id": promise, "sample_sequence_ids": samples})

    async def _retrieve(self, owner: str, body: Any, request: Request) -> Response:
        """Wait for the result of a promise."""
        given, loop, told = body.get("request_id"), asyncio.get_running_loop(), asyncio.Event()
        promise, call = text_of(given), partial(wake, loop, told)
        self.service.listen(promise, call)
        try:
            row = self.desk.result(owner, given)
            if row is None and not self.is_closing:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(told.wait(), self.hold)
                row = self.desk.result(owner, given)
        finally:
            self.service.unlisten(promise, call)
        if row is None:
            return self._not_yet()
        is_protobuf = row["state"] == "done" and row["kind"] in ("forward_backward", "sample")
        return Response(row["result"], media_type=PROTOBUF if is_protobuf else "application/json")

    def _not_yet(self) -> Response:
        if self.service.failure is not None:
            raise Refused("the service has failed; start it again, and it goes on", 503, 5)
        if self.is_closing:
            raise Refused(STOPPING, 429, 2)
        return JSONResponse({"queue_state": "active"}, 408)


def wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event of a loop. Any thread may call it."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(event.set)


def _of_model(kind: str) -> Callable[[Door, str, Any, Request], Awaitable[Response]]:
    async def call(door: Door, owner: str, body: Any, request: Request) -> Response:
        return JSONResponse({"request_id": await run_in_threadpool(door.desk.submit, owner, kind, body)})

    return call


CALLS: Mapping[str, Callable[[Door, str, Any, Request], Awaitable[Response]]] = {
    "client/config": Door._config,
    "client/dynamic_config": Door._dynamic_config,
    "telemetry": Door._telemetry,
    "create_session": Door._create_session,
    "session_heartbeat": Door._heartbeat,
    "create_model": Door._create_model,
    "load_weights": Door._load_weights,
    "get_info": Door._get_info,
    "unload_model": Door._unload_model,
    "create_sampling_session": Door._create_sampling_session,
    "asample": Door._asample,
    "retrieve_future": Door._retrieve,
    **{kind: _of_model(kind) for kind in TRAINING},
}


def _json(raw: bytes, depth: int) -> dict[str, Any]:
    """Body of a call. Raises Refused where it is no object, or nested too deep."""
    if not raw:
        return {}
    try:
        found = json.loads(raw.decode("utf-8-sig"))
        if b"\\u" in raw:
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused(
            "the body has half of a surrogate pair (\\ud800 to \\udfff) in a text, which is no Unicode"
        ) from None
    except (ValueError, RecursionError):
        raise Refused("the body is no JSON") from None
    if not isinstance(found, dict):
        raise Refused(f"the body is {quoted(found)}, and must be a JSON object")
    level: list[Any] = [found]
    for _ in range(depth):
        inner = (own for value in level for own in (value.values() if isinstance(value, dict) else value))
        level = [own for own in inner if isinstance(own, dict | list)]
        if not level:
            return found
    raise Refused(f"the body is nested deeper than the limit json_depth of {depth}")


def _check_client(version: Any) -> None:
    parts = str(version).split(".")
    known = len(parts) > 1 and all(part.isdecimal() and len(part) < 6 for part in parts[:2])
    if not known or not CLIENTS[0] <= tuple(map(int, parts[:2])) < CLIENTS[1]:
        low, high = (".".join(map(str, own)) for own in CLIENTS)
        raise Refused(
            f"sdk_version: tinker {quoted(version)} was not tried with this service; use tinker>={low},<{high}"
        )


def _refusal(request: Request, error: Any) -> Response:
    """Answer with a Refused."""
    return JSONResponse({"error": error.text}, error.status, headers=dict(error.headers))


def bearer(keys: Keys, request: Request) -> str:
    """The owner of a request of the OpenAI-style endpoint. Raises Refused."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    own = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key")
    return keys.owner(own, "authorization: there is no key; send 'Bearer tml-...', which OPENAI_API_KEY sets")


class _Counted:
    """The application, with a counter of its answers by status. What its clients leave half done is no error."""

    def __init__(self, app: ASGIApp, answers: Counter) -> None:
        self.app, self.answers = app, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def counting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                self.answers.labels(message["status"]).inc()
                begun = True
            await send(message)

        try:
            await self.app(scope, receive, counting)
        except ClientDisconnect:  # in the middle of a body
            pass
        except asyncio.CancelledError:  # the service has stopped, and the client neither sends on nor reads on
            if not begun:
                await JSONResponse({"error": STOPPING}, 503, {"retry-after": "2"})(scope, receive, counting)


def application(desk: Desk, keys: Keys, hold: float = HOLD) -> Starlette:
    """The service as an ASGI application."""
    door = Door(desk, keys, hold)

    async def metrics(request: Request) -> Response:
        return Response(await run_in_threadpool(desk.service.metrics), media_type="text/plain; version=0.0.4")

    async def status(request: Request) -> Response:
        key = request.headers.get("x-api-key")
        owner = keys.owner(key) if key and keys.is_closed else None
        found = await run_in_threadpool(desk.service.status, owner)
        if keys.is_closed and owner is None:
            found["training"] = []
        return JSONResponse(found)

    async def page(request: Request) -> Response:
        return Response(PAGE, media_type="text/html")

    async def file(request: Request) -> Response:
        return await run_in_threadpool(door.rest.file, request.path_params["ticket"], request.path_params["name"])

    methods = ["GET", "POST", "PUT", "DELETE"]
    routes = [
        Route("/", page), Route("/metrics", metrics), Route("/status", status), Route("/files/{ticket}/{name}", file),
        Route(API + "/{path:path}", door.handle, methods=methods),
        *openai.routes(ServedModels(desk, lambda: door.is_closing), lambda request: bearer(keys, request)),
    ]  # fmt: skip
    counted = Middleware(_Counted, answers=desk.service.figures.answers)
    app = Starlette(routes=routes, middleware=[counted], exception_handlers={Refused: _refusal})
    app.state.door = door
    return app
