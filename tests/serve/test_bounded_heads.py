"""Requests whose heads, sizes of chunks or trailers do not end, and those that come before earlier ones were answered: the
connection is closed, and others are served."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")

from packlora.serve import http  # noqa: E402
from packlora.serve.http import AHEAD, MOST, BoundedProtocol  # noqa: E402

PIECE = 1 << 16
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "value": (b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"a" * PIECE),
    "many": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"X: a\r\n" * (PIECE // 6)),
    "address": (b"GET /", b"a" * PIECE),
    "trailer": (CHUNKED + b"1\r\na\r\n0\r\nX: ", b"a" * PIECE),
    "extension": (CHUNKED + b"1;x=", b"a" * PIECE),
}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(str(size)))]})
    await send({"type": "http.response.body", "body": str(size).encode()})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    own = socket.socket()
    own.bind(("127.0.0.1", 0))
    own.listen(8)
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [own]}, daemon=True)
    thread.start()
    yield own.getsockname()
    server.should_exit = True
    thread.join(300)


def asked(connection: socket.socket, request: bytes) -> bytes:
    """The body of an answer."""
    connection.sendall(request)
    found = b""
    while b"\r\n\r\n" not in found or not found.partition(b"\r\n\r\n")[2]:
        found += connection.recv(PIECE)
    assert found.startswith(b"HTTP/1.1 200")
    return found.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_does_not_end_is_ended(kind: str, address: tuple[str, int]) -> None:
    begin, piece = ENDLESS[kind]
    with socket.create_connection(address, timeout=300) as connection:
        connection.sendall(begin)
        with pytest.raises(OSError):
            connection.sendall(piece * (64 * MOST // len(piece)))


def test_bodies_and_later_requests_of_a_connection_do_not_count(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=300) as connection:
        for _ in range(3):
            size = 3 * MOST
            head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\nX: {'a' * (MOST // 2)}\r\n\r\n".encode()
            assert asked(connection, head + bytes(size)) == str(size).encode()
            chunk = b"%x\r\n" % PIECE + bytes(PIECE) + b"\r\n"
            chunks = b"".join([CHUNKED, *[chunk] * 40, b"0\r\n\r\n"])
            assert asked(connection, chunks) == str(40 * PIECE).encode()


def test_requests_before_an_answer_are_answered_in_turn_and_are_not_many(address: tuple[str, int]) -> None:
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na"
    with socket.create_connection(address, timeout=300) as connection:
        connection.sendall(request * AHEAD)
        found = b""
        while found.count(b"200 OK") < AHEAD:
            found += connection.recv(PIECE)
    with socket.create_connection(address, timeout=300) as connection:
        connection.sendall(request * 1000)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(PIECE):
                found += piece
    assert found.count(b"200 OK") <= AHEAD and b"at most 16 requests of a connection" in found


@pytest.mark.parametrize("sent", [b"", b"POST / HT", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHo"])
def test_a_head_that_does_not_come_is_not_waited_for(
    sent: bytes, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.5)
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(sent)
        found = b""
        while piece := connection.recv(PIECE):
            found += piece
    assert found.count(b"200 OK") == sent.count(b"\r\n\r\n")
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")
        time.sleep(1)  # a body that comes later than heads may
        assert asked(connection, b"a") == b"2"


def test_an_empty_line_behind_an_answer_holds_no_connection(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.5)
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na"
    with socket.create_connection(address, timeout=60) as connection:
        assert asked(connection, request) == b"1"
        connection.sendall(b"\r\n")
        time.sleep(0.1)
        assert asked(connection, request) == b"1"  # one that comes in time is answered
        connection.sendall(b"\r\n")
        connection.settimeout(10)
        assert connection.recv(PIECE) == b""
