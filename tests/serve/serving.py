"""A service on a thread of the test process, and parts of it, on tiny random models."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from packlora.serve.app import Keys, application
from packlora.serve.desk import Desk
from packlora.serve.host import Host, run_of
from packlora.serve.limits import Limits
from packlora.serve.service import Service

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""What the tiny model is served as: a name that the public client's cookbook knows."""


def host_of(folder: str, state: Path, *settings: str, name: str = NAME, budget: int | None = None) -> Host:
    run = run_of(folder, ["device=cpu", *settings], None, state)
    return Host(name, run, 256, budget)


@contextlib.contextmanager
def served(host: Host, state: Path, keys: list[str] | None = None, limits: Limits | None = None) -> Iterator[Any]:
    """Address of a service, and the service."""
    state.mkdir(parents=True, exist_ok=True)
    service = Service({host.facts.name: host}, state, limits)
    app = application(Desk(service), Keys(keys), hold=2.0)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    service.start()
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", service
    finally:
        app.state.door.close()
        server.should_exit = True
        thread.join(10)
        service.stop()
        for tenant in service.tenants.values():
            tenant.sleep()
