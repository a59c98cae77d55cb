"""Requests that clients leave half done, and those of a service that stops: no traceback, and nothing goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from waiting import SECONDS, wait_for

uvicorn = pytest.importorskip("uvicorn")

from packlora.serve import openai  # noqa: E402
from packlora.serve.app import STOPPING, _Counted  # noqa: E402
from packlora.serve.http import BoundedProtocol, ClosedStream  # noqa: E402

HALF = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"


class World:
    """A server of the endpoint's routes, of one that waits for its body, and of a stream without an end."""

    def __init__(self) -> None:
        self.begun, self.ended = 0, 0
        self.own = socket.socket()
        self.own.bind(("127.0.0.1", 0))
        self.own.listen(8)
        routes = [
            *openai.routes(None, lambda request: self._begin("owner")),  # type: ignore[arg-type]
            Route("/body", self.body, methods=["POST"]), Route("/stream", self.stream, methods=["POST"]),
        ]  # fmt: skip
        answers = Counter("answers", "of this test", ["status"], registry=CollectorRegistry())
        app = Starlette(routes=routes, middleware=[Middleware(_Counted, answers=answers)])
        config = uvicorn.Config(app, http=BoundedProtocol, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.own]}, daemon=True)
        self.thread.start()

    def _begin(self, owner: str) -> str:
        self.begun += 1
        return owner

    async def body(self, request: Request) -> Response:
        self.begun += 1
        return Response(await request.body())

    async def stream(self, request: Request) -> Response:
        async def tokens() -> AsyncGenerator[str]:
            try:
                while True:
                    yield "x" * 100_000
                    self.begun += 1
            finally:
                self.ended += 1
                await asyncio.sleep(0.05)  # as one that ends tasks and waits for them

        async def lines() -> AsyncGenerator[str]:
            async with contextlib.aclosing(tokens()) as found:
                async for token in found:
                    yield f"data: {token}\n\n"

        return ClosedStream(lines())

    def connection(self, sent: bytes) -> socket.socket:
        """A connection whose request has come."""
        before, own = self.begun, socket.create_connection(self.own.getsockname(), SECONDS)
        own.sendall(sent)
        wait_for(lambda: self.begun > before)
        return own

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> Iterator[World]:
    caplog.set_level(logging.INFO)
    found = World()
    yield found
    found.stop()
    said = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    assert not [record.getMessage() for record in said if record.exc_info]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/body"])
def test_a_client_that_leaves_in_the_middle_of_a_body_is_no_error(world: World, path: str) -> None:
    world.connection(HALF % path.encode()).close()
    wait_for(lambda: not world.server.server_state.tasks)


def test_a_body_that_has_not_come_whole_at_a_stop_is_answered_in_words(world: World) -> None:
    with contextlib.closing(world.connection(HALF % b"/body")) as own:
        world.stop()
        found = own.recv(1 << 16)
    assert found.startswith(b"HTTP/1.1 503") and STOPPING.encode() in found


def test_a_stream_that_is_not_read_at_a_stop_is_closed(world: World) -> None:
    with contextlib.closing(world.connection(HALF.replace(b"100", b"1") % b"/stream")):
        wait_for(lambda: any(own.flow.write_paused for own in world.server.server_state.connections))
        world.stop()
    assert world.begun and world.ended == 1
