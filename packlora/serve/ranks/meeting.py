"""How the ranks of a service find one another.

Rank 0 listens on the loopback address, and writes the port and a fresh key into the state folder, for its owner alone to read.
The other ranks prove that they know the key, and connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from packlora.errors import InputError, ProcessError, plural
from packlora.files import TEMPORARY
from packlora.serve.ranks.channel import Channel

FILE = "ranks.json"
"""Where the others find rank 0, in the state folder, while they meet."""
SECONDS = 120.0
"""Seconds after which a rank that does not come is given up."""
TENSOR = "parallel.tensor"
"""Key of the run file by which all ranks hold a base model together."""
PAUSE = 0.05
"""Seconds between two looks for rank 0."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process among those that torchrun started. local: its number on this host. tensor: processes that hold a base model
    together; 1: each holds it whole."""

    rank: int = 0
    size: int = 1
    local: int = 0
    tensor: int = 1

    def settings(self, given: Sequence[str]) -> list[str]:
        """Keys of the run file, KEY=VALUE, with the device of this rank and without TENSOR. Raises InputError where there is no
        device."""
        given = [setting for setting in given if setting.partition("=")[0] != TENSOR]
        if self.size == 1:
            return given
        import torch

        device = "auto"
        for setting in given:
            key, _, value = setting.partition("=")
            device = value if key == "device" else device
        if device not in ("auto", "cuda", "cpu"):
            raise InputError(
                f"--set device={device}: each of {self.size} ranks has a device of its own; give cuda or cpu, or leave it out"
            )
        if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
            return given
        if self.local >= (here := torch.cuda.device_count()):
            raise InputError(
                f"--nproc-per-node {self.size}: this machine has {plural(here, 'usable GPU')}, and each rank needs its "
                f"own; start {max(here, 1)}, or give --set device=cpu"
            )
        return [*given, f"device=cuda:{self.local}"]


def place_of(environment: Mapping[str, str], settings: Sequence[str]) -> Place:
    """This process's place, as torchrun says it. settings: keys of the run file that were given. Raises InputError."""
    size = int(environment.get("WORLD_SIZE", "1"))
    tensor = _tensor(size, settings)
    if size == 1:
        return Place()
    if environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]:
        raise InputError(
            f"WORLD_SIZE={size}: packlora serve runs on one host; start one service a host, behind a proxy (docs/serve.md)"
        )
    return Place(int(environment["RANK"]), size, int(environment["LOCAL_RANK"]), tensor)


def _tensor(size: int, settings: Sequence[str]) -> int:
    """Processes that hold a base model together, out of those that were started. Raises InputError."""
    tensor = 1
    for setting in settings:
        key, _, value = setting.partition("=")
        if key.partition(".")[0] != "parallel":
            continue
        if key != TENSOR:
            raise InputError(
                f"--set {setting}: {key} is not served; of the keys of parallel {TENSOR} is, which cuts the base model over "
                "all processes that torchrun starts"
            )
        if value not in ("1", str(size)):
            started = f"{size} processes were" if size > 1 else "1 process was"
            raise InputError(
                f"--set {setting}: {started} started, and a base model is whole on each or cut over all; give "
                f"{TENSOR}={size}, or another number to torchrun --standalone --nproc-per-node N -m packlora serve"
            )
        tensor = int(value)
    return tensor


@contextlib.contextmanager
def gathered(place: Place, state: Path, seconds: float = SECONDS) -> Iterator[dict[int, Channel]]:
    """Channels to the other ranks, by rank, which are closed at the end. Raises ProcessError where not all come in time."""
    found: dict[int, Channel] = {}
    try:
        with _listening(state) as arrived:
            until = time.monotonic() + seconds
            while len(found) < place.size - 1:
                try:
                    channel = arrived.get(timeout=max(until - time.monotonic(), 0))
                    found[channel.read()[1]["rank"]] = channel
                except (queue.Empty, EOFError):
                    if time.monotonic() >= until:
                        missing = sorted({*range(1, place.size)} - {*found})
                        raise ProcessError(
                            f"rank 0 has waited {seconds:g} s for the others; these have not come: {missing}"
                        ) from None
        yield found
    finally:
        for channel in found.values():
            channel.send("stop")
            channel.close()


@contextlib.contextmanager
def _listening(state: Path) -> Iterator[queue.SimpleQueue[Channel]]:
    """Connections of ranks that know the key."""
    key, arrived = secrets.token_bytes(32), queue.SimpleQueue[Channel]()
    with Listener(("127.0.0.1", 0), backlog=64, authkey=key) as listener:

        def accept() -> None:
            while True:
                try:
                    arrived.put(Channel(listener.accept()))
                except (AuthenticationError, EOFError, ConnectionError):
                    continue
                except OSError:  # the listener is closed
                    return

        threading.Thread(target=accept, name="packlora-meeting", daemon=True).start()
        file = state / FILE
        _write(file, {"port": listener.address[1], "key": key.hex()})
        try:
            yield arrived
        finally:
            file.unlink(missing_ok=True)


def _write(file: Path, found: Any) -> None:
    """Write what only the owner of the file may read."""
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=file.parent)
    with open(handle, "w", encoding="utf-8") as out:
        json.dump(found, out)
    os.replace(name, file)


def joined(place: Place, state: Path, seconds: float = SECONDS) -> Channel:
    """The channel to rank 0. Raises ProcessError where it is not there in time."""
    until = time.monotonic() + seconds
    while True:
        try:
            found = json.loads((state / FILE).read_bytes())
            channel = Channel(Client(("127.0.0.1", found["port"]), authkey=bytes.fromhex(found["key"])))
        except (OSError, ValueError, EOFError, AuthenticationError):
            if time.monotonic() >= until:
                raise ProcessError(
                    f"rank {place.rank} has waited {seconds:g} s for rank 0, which has not come"
                ) from None
            time.sleep(PAUSE)
        else:
            channel.send("hello", rank=place.rank)
            return channel
