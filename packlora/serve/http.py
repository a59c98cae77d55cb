"""HTTP as uvicorn speaks it by httptools, which reads heads of any size: here what is beside bodies is bounded."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST = 1 << 20
"""Bytes of a request beside its body at most: its head, sizes of chunks, and what follows them."""


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose request has more, before anybody has shown a key."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self._beside = 0

    def data_received(self, data: bytes) -> None:
        """Count bytes as they come."""
        self._beside += len(data)
        super().data_received(data)
        if self._beside > MOST and not self.transport.is_closing():
            self.send_400_response(f"a request has at most {MOST} bytes beside its body")

    def on_body(self, body: bytes) -> None:
        """Leave out bytes of the body, which the service bounds."""
        self._beside -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Begin anew: the next request of the connection follows."""
        self._beside = 0
        super().on_message_complete()
