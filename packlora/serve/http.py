"""HTTP as uvicorn speaks it by httptools, which reads heads of any size for any time: here what is beside bodies is bounded."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST = 1 << 20
"""Bytes of a request beside its body at most: its head, sizes of chunks, and what follows them."""
AHEAD = 16
"""Requests of a connection at most that wait for the answer to an earlier one."""
HEAD_SECONDS = 60.0
"""Seconds at most from the begin of a connection, or of a later request, until its head has come."""


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection that sends more, before anybody has shown a key."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self._beside = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the first head."""
        super().connection_made(transport)
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        self._wait(None)

    def _wait(self, seconds: float | None) -> None:
        """End the connection after so many seconds; None: do not."""
        if self._late is not None:
            self._late.cancel()
        self._late = None if seconds is None else self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        """Wait for a head."""
        super().on_message_begin()
        self._wait(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Count bytes as they come."""
        self._beside += len(data)
        super().data_received(data)
        if self._late is None and self.cycle is not None and self.cycle.response_complete:
            self._wait(HEAD_SECONDS)  # what begins no request, as an empty line does, has ended the wait for one
        if self._beside > MOST and not self.transport.is_closing():
            self.send_400_response(f"a request has at most {MOST} bytes beside its body")

    def on_headers_complete(self) -> None:
        """Take a request. Raises ValueError, which ends the connection, where many wait already."""
        self._wait(None)
        if len(self.pipeline) >= AHEAD:
            raise ValueError
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """End the connection with words."""
        is_full = len(self.pipeline) >= AHEAD
        super().send_400_response(f"at most {AHEAD} requests of a connection wait for an answer" if is_full else msg)

    def on_body(self, body: bytes) -> None:
        """Leave out bytes of the body, which the service bounds."""
        self._beside -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Begin anew: the next request of the connection follows."""
        self._beside = 0
        super().on_message_complete()


class ClosedStream(StreamingResponse):
    """A streamed answer that ends what makes it, also where its client does not read on. content: an asynchronous generator."""

    async def stream_response(self, send: Send) -> None:
        """See StreamingResponse."""
        body: Any = self.body_iterator
        async with contextlib.aclosing(body):
            await super().stream_response(send)
