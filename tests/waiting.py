"""What tests wait for: events, never a time that is supposed to be enough. No slow or busy machine fails them."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable

SECONDS = 300.0
"""After which something that should have come by itself has not."""
_ports = itertools.count(os.getpid() * 7)


def wait_for(comes: Callable[[], object], what: str = "it did not come") -> None:
    """Wait until something is true."""
    until = time.monotonic() + SECONDS
    while not comes():
        assert time.monotonic() < until, what
        time.sleep(0.002)


def own_port() -> int:
    """A port that is free, and stays so until it is used: the system gives none of these to whoever asks for any port."""
    while True:
        port = 20_000 + next(_ports) % 12_000
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
