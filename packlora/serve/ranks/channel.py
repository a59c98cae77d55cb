"""Messages between two processes: a kind, JSON values, and bytes among them. No object is pickled.

    head length (4 bytes, big endian)   head: JSON [kind, values]   bytes

Where a value is bytes, the head has an object with their place behind it.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

PLACE = "bytes at"
"""Key of the object in a head that stands for bytes: [start, stop]."""
Message = tuple[str, dict[str, Any]]


def array_values(array: np.ndarray) -> list[Any]:
    """An array as values of a message."""
    return [array.dtype.str, array.shape, array.tobytes()]


def array_from(values: Sequence[Any]) -> np.ndarray:
    """The array of `array_values`, which cannot be written to."""
    return np.frombuffer(values[2], values[0]).reshape(values[1])


def packed(kind: str, values: Mapping[str, Any]) -> bytes:
    """A message as bytes."""
    blobs, size = list[bytes](), 0

    def apart(value: Any) -> dict[str, list[int]]:
        nonlocal size
        if not isinstance(value, bytes):
            raise TypeError(f"{type(value).__name__} is no value of a message")
        start, size = size, size + len(value)
        blobs.append(value)
        return {PLACE: [start, size]}

    head = json.dumps([kind, values], default=apart).encode()
    return b"".join([len(head).to_bytes(4, "big"), head, *blobs])


def unpacked(data: bytes) -> Message:
    """A message from its bytes."""
    begin = 4 + int.from_bytes(data[:4], "big")

    def whole(value: dict[str, Any]) -> Any:
        if value.keys() != {PLACE}:
            return value
        start, stop = value[PLACE]
        return data[begin + start : begin + stop]

    kind, values = json.loads(data[4:begin], object_hook=whole)
    return kind, values


class Channel:
    """One end of a connection. Any thread sends, and never waits for the other process; one thread reads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="packlora-channel", daemon=True)
        self._writer.start()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message after those that were sent before. It is lost where the other process has ended."""
        self.pass_on(packed(kind, values))

    def pass_on(self, data: bytes) -> None:
        """Send a message that is packed already; see `send`."""
        self._outbox.put(data)

    def read(self) -> Message:
        """Wait for the next message. Raises EOFError where the other process has closed its end, or has ended."""
        try:
            data = self._connection.recv_bytes()
        except (OSError, TypeError) as error:  # TypeError: `_write` has closed it meanwhile
            raise EOFError(str(error)) from None
        return unpacked(data)

    def close(self) -> None:
        """Send what was given to be sent, and close this end."""
        self._outbox.put(None)
        self._writer.join()

    def _write(self) -> None:
        with contextlib.suppress(OSError), self._connection as connection:
            while (data := self._outbox.get()) is not None:
                connection.send_bytes(data)
