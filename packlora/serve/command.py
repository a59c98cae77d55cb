"""The `packlora serve` command: from its options to a service on a port."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packlora.errors import InputError, needed
from packlora.files import lock_folder, make_folder
from packlora.serve.ranks.meeting import Place, place_of
from packlora.terminal import say, show

if TYPE_CHECKING:
    from packlora.config import Run
    from packlora.serve.host import Host
    from packlora.serve.ranks.channel import Channel
    from packlora.serve.service import Service

DEMO = "smollm2-135m"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def bases_of(given: Sequence[str]) -> dict[str, str]:
    """Names of base models with their folders or hub ids; with nothing given, the packaged model. Raises InputError."""
    found: dict[str, str] = {}
    for text in given or [f"{DEMO}={DEMO}"]:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise InputError(f"--base {text}: give NAME=PATH, the name that clients ask for and a folder or hub id")
        if name in found:
            raise InputError(f"--base {text}: the name {name!r} is given twice")
        found[name] = path
    return found


def keys_of(file: Path | None, host: str) -> list[str] | None:
    """API keys of a file, one a line; None: every key is taken. Raises InputError where a key is needed."""
    if file is None:
        if host not in LOOPBACK:
            raise InputError(f"--host {host}: other machines can reach it, so give --keys FILE; or leave --host out")
        return None
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"--keys {file}: it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InputError(f"--keys {file}: it has no key; write one a line, each begins with tml-")
    if wrong := next(
        (number for number, key in enumerate(keys, 1) if not key.startswith("tml-") or len(key) < 12), None
    ):
        raise InputError(f"--keys {file}: key {wrong} does not begin with tml-, or has less than 12 characters")
    return keys


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises InputError where the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small answers at once only where the protocol is named: else each waits 40 ms for the client's receipt
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(128)  # two sockets can be bound to a port until one listens
    except OSError as error:
        found.close()
        wrong = "--host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "--port"
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}; give another {wrong}") from None
    return found


def make_state(state: Path) -> None:
    """Make the state folder where there is none. Raises InputError."""
    if state.exists() and not state.is_dir():
        raise InputError(f"--state {state}: it is a file; give a folder")
    try:
        make_folder(state)
    except OSError as error:
        raise InputError(
            f"--state {state}: it cannot be made: {error.strerror or error}; give another folder"
        ) from None


def serve(
    bases: Sequence[str], state: Path, host: str, port: int, keys: Path | None, quantization: str | None,
    settings: Sequence[str], max_wait_ms: float, context: int,
) -> None:  # fmt: skip
    """Serve until a signal. Raises InputError."""
    names, known = bases_of(bases), keys_of(keys, host)
    place = place_of(os.environ, settings)
    runs = partial(_runs, names, place, settings, quantization, state)
    if place.rank:
        _work(place, state, runs, context, max_wait_ms / 1000)
        return
    at = listening(host, port)
    try:
        import uvicorn

        from packlora.serve.app import Keys, application
        from packlora.serve.http import BoundedProtocol
    except ImportError as error:
        raise needed(str(error.name), "serve", "packlora serve") from None
    from packlora.serve.desk import Desk
    from packlora.serve.host import freeze
    from packlora.serve.logs import begin_logging, log
    from packlora.serve.ranks.meeting import gathered

    begin_logging()
    make_state(state)
    with (
        lock_folder(state),
        gathered(place, state) as channels,
        _service(place, channels, runs, context, state, max_wait_ms / 1000) as service,
    ):
        hosts = service.hosts
        app = application(Desk(service), Keys(known))
        how: dict[str, Any] = {"log_config": None, "lifespan": "off", "timeout_graceful_shutdown": 5}
        server = _Server(uvicorn.Config(app, http=BoundedProtocol, **how), app)
        service.on_failure = server.end
        log("service started", bases=",".join(hosts), models=len(service.tenants), waiting=service.queue.waiting)
        freeze()
        service.start()
        address = f"http://{f'[{host}]' if ':' in host else host}:{at.getsockname()[1]}"
        key = f"one of {keys}" if known else "tml-local"
        show(f"TINKER_BASE_URL={address} TINKER_API_KEY={key}")
        show(f"OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={key}")
        show(
            f"serving {', '.join(hosts)} from {state}{f' on {place.size} ranks' if channels else ''}; figures at {address}/, "
            "Ctrl-C ends it and the next start goes on"
        )
        server.run(sockets=[at])
        waiting = service.stop()
        say(f"stopped; {waiting} requests wait for the next start" if waiting else "stopped; nothing waits")
        if service.failure is not None:
            raise service.failure


def _runs(
    names: Mapping[str, str], place: Place, settings: Sequence[str], quantization: str | None, state: Path
) -> dict[str, Run]:
    """Settings of base models on this process's device, by name. Raises InputError."""
    from packlora.serve.host import run_of

    own = place.settings(settings)
    return {name: run_of(path, own, quantization, state, place.tensor) for name, path in names.items()}


def _hosts(runs: Mapping[str, Run], context: int) -> dict[str, Host]:
    """Base models that this process holds whole. Raises InputError."""
    from packlora.serve.host import Host

    return {name: Host(name, run, context) for name, run in runs.items()}


@contextlib.contextmanager
def _service(
    place: Place, channels: Mapping[int, Channel], runs: Callable[[], Mapping[str, Run]], context: int, state: Path,
    max_wait: float,
) -> Iterator[Service]:  # fmt: skip
    """The service of this process, and of the other ranks where there are some. Raises InputError, ProcessError."""
    from packlora.serve.service import Service

    if place.tensor > 1:
        from packlora.serve.group.leader import led

        with led(channels, runs(), context, state, max_wait) as service:
            yield service
        return
    hosts = _hosts(runs(), context)
    if not channels:
        yield Service(hosts, state, max_wait=max_wait)
        return
    from packlora.serve.ranks.leader import Leader
    from packlora.serve.ranks.records import Rank

    ranks = [Rank(number, channels[number]).ready() for number in sorted(channels)]
    yield Leader(hosts, state, ranks, max_wait=max_wait)


def _work(place: Place, state: Path, runs: Callable[[], Mapping[str, Run]], context: int, max_wait: float) -> None:
    """Be another rank than 0, until the service ends."""
    from packlora.serve.logs import begin_logging
    from packlora.serve.ranks.meeting import joined

    begin_logging(rank=place.rank)
    channel = joined(place, state)
    try:
        if place.tensor > 1:
            from packlora.serve.group.follower import work as follow

            follow(channel, place.size, runs, context)
        else:
            from packlora.serve.ranks.worker import work

            work(channel, lambda: _hosts(runs(), context), state, max_wait)
    finally:
        channel.close()


class _Server:
    """uvicorn's server, which lets go of who waits for a result before it closes."""

    def __init__(self, config: Any, app: Any) -> None:
        import uvicorn

        class Server(uvicorn.Server):
            def handle_exit(self, sig: int, frame: Any) -> None:
                app.state.door.close()
                super().handle_exit(sig, frame)
                self._captured_signals.clear()  # it would send itself the signal again once it has stopped

        server = Server(config)
        self.run = server.run

        def end() -> None:
            app.state.door.close()
            server.should_exit = True

        self.end = end
        """End it, from any thread."""


def status(host: str, port: int) -> None:
    """Print how a service stands, with the models of the key in TINKER_API_KEY. Raises InputError where none answers."""
    address, key = f"http://{host}:{port}/status", os.environ.get("TINKER_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InputError("TINKER_API_KEY: it has a character that no key has, such as the end of a line; give one key")
    try:
        asked = urllib.request.Request(address, headers={"x-api-key": key})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            found = json.load(answer)
        models = found.pop("training")
    except urllib.error.HTTPError as error:
        raise InputError(f"{address}: {error.read(1000).decode(errors='replace')}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException) as error:
        raise InputError(f"{address}: no packlora serve answers: {getattr(error, 'reason', error)}") from None
    for key, value in found.items():
        if value not in (None, [], ""):
            text = ", ".join(map(str, value)) if isinstance(value, list | dict) else value
            show(f"{key.replace('_', ' '):<22}{text}")
    for number, own in enumerate(models, 1):
        loss = f", loss {own['losses'][-1]:g}" if own["losses"] else ""
        waits = f", {own['waiting']} requests wait" if own["waiting"] else ""
        show(
            f"{f'model {number}':<22}{own['method']} r {own['rank']} on {own['base']}, {own['steps']} steps{loss}{waits}"
        )
