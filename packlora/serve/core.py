"""State that the parts of a service share: bases, the journal, the queue, models, and who waits for results."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from packlora.errors import ProcessError, WriteError, reason_of
from packlora.serve.errors import Failed
from packlora.serve.figures import Figures
from packlora.serve.host import Host
from packlora.serve.journal import Journal
from packlora.serve.limits import Limits
from packlora.serve.logs import LOG
from packlora.serve.queue import Queue
from packlora.serve.stores import Stores, Write
from packlora.serve.tenant import Tenant

MOST_SHOWN = 50
"""Models that the page and the status list."""
RETRY_SECONDS = 1.0
"""Seconds between two tries to write the journal, where the disk is full."""


class Core:
    """State of a service. hosts: base models by the name that clients ask for. state: folder of the journal and all files."""

    def __init__(self, hosts: Mapping[str, Host], state: Path, limits: Limits | None = None) -> None:
        self.hosts, self.state, self.limits = hosts, state, limits or Limits()
        self.journal, self.queue = self._open_journal(), Queue()
        self.stores, self.figures = Stores(state), Figures()
        self.tenants: dict[str, Tenant] = {}
        self.stopping = False
        self.failure: BaseException | None = None
        """What ended the service."""
        self.on_failure: Callable[[], None] = lambda: None
        """Is called, in any thread, once a service of several processes has failed."""
        self.trouble: str | None = None
        """What all work waits for, such as space on a disk."""
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self._lock = threading.RLock()
        """Of the listeners. A signal may let everybody look while its thread holds it."""

    def _open_journal(self) -> Journal:
        """Open the file of promises and their results."""
        return Journal(self.state / "journal.db")

    def commit(self, write: Write, waits: bool = True, flush: bool = False) -> None:
        """Write results. A disk that is full is waited for: results in memory are not lost.

        Args:
            waits: whether they have to be written when it returns. If not, another rank than 0 goes on; they are written before
                anybody sees them.
            flush: to the disk, before it returns: what they name in the place of files that are removed next.
        """
        while True:
            try:
                with self.journal.write(flush) as db:
                    write(db)
                self.trouble = None
                return
            except sqlite3.OperationalError as error:
                self.trouble = f"the journal cannot be written: {error}"
                LOG.error("%s; all work waits for it", self.trouble)
                if self.stopping:
                    raise WriteError(f"{self.state}: {self.trouble}; the next start computes it again") from None
                time.sleep(RETRY_SECONDS)

    def listen(self, promise: str, call: Callable[[], None]) -> None:
        """Call back once a result can be read, from another thread."""
        with self._lock:
            self._listeners.setdefault(promise, []).append(call)

    def unlisten(self, promise: str, call: Callable[[], None]) -> None:
        """Do not call back."""
        with self._lock:
            # by value: a bound method is another object each time
            left = [own for own in self._listeners.pop(promise, ()) if own != call]
            if left:
                self._listeners[promise] = left

    def tell(self, promises: list[str]) -> None:
        """Results can be read."""
        with self._lock:
            calls = [call for promise in promises for call in self._listeners.pop(promise, ())]
        for call in calls:
            call()

    def tell_all(self) -> None:
        """Let everybody who waits look."""
        with self._lock:
            promises = list(self._listeners)
        self.tell(promises)

    def end_by(self, error: BaseException) -> None:
        """The thread that computes has ended by an error, which is being handled."""
        self.failure = error
        self.tell_all()
        LOG.exception("the thread that computes has ended")

    def fail(self, why: str) -> None:
        """End the service, since another rank has ended: nobody else has its part. The first reason counts. Any thread may call
        it."""
        if self.failure is None:
            self.failure = ProcessError(why)
            LOG.error("%s", why)
        self.stopping = True
        self.tell_all()
        self.on_failure()

    def status(self, owner: str | None = None) -> dict[str, Any]:
        """Figures that `packlora serve status` and the live page show. No id and no key is in it.

        Args:
            owner: whose models are listed; None: all are.
        """
        sessions = self.journal.one("select count(*) as n from sessions where ended is null")
        tenants = list(self.tenants.values())
        return (
            {
                "status": "failed" if self.failure is not None else "ok" if self.trouble is None else "waits",
                "failure": self.trouble if self.failure is None else reason_of(self.failure),
                "bases": {name: host.facts.path for name, host in self.hosts.items()},
                "sessions": 0 if sessions is None else sessions["n"],
                "models": len(tenants),
                "models_on_the_base": sum(tenant.is_on_the_base for tenant in tenants),
                "waiting_requests": self.queue.waiting,
                "samples": self._samples,
            }
            | self.figures.status()
            | {"training": self._training(owner)}
        )

    @property
    def _samples(self) -> int:
        return sum(host.samples for host in self.hosts.values())

    def _training(self, owner: str | None) -> list[dict[str, Any]]:
        """Models, the one first that trained last."""
        lanes = dict(self.queue.lanes)
        own = [tenant for tenant in list(self.tenants.values()) if owner is None or tenant.owner == owner]
        return [
            {
                "base": tenant.host.facts.name, "method": tenant.method, "rank": tenant.wanted.rank, "steps": tenant.steps,
                "losses": [round(loss, 4) for loss in list(tenant.losses)],
                "waiting": lanes[tenant.id].waiting if tenant.id in lanes else 0, "on_the_base": tenant.is_on_the_base,
            }
            for tenant in sorted(own, key=lambda tenant: tenant.trained_at, reverse=True)[:MOST_SHOWN]
        ]  # fmt: skip

    def metrics(self) -> bytes:
        """Figures in Prometheus' format."""
        awake = sum(tenant.is_on_the_base for tenant in list(self.tenants.values()))
        sessions = self.journal.one("select count(*) as n from sessions where ended is null")
        self.figures.sessions.set(0 if sessions is None else sessions["n"])
        self.figures.waiting.set(self.queue.waiting)
        self.figures.samples.set(self._samples)
        devices = {host.device for host in self.hosts.values() if host.device.type == "cuda"}
        self.figures.memory.set(sum(map(torch.cuda.memory_allocated, devices)))
        sizes = [host.graphs.sizes for host in self.hosts.values() if host.graphs is not None]
        self.figures.graphs.set(sum(own.recorded for own in sizes))
        self.figures.padding.set(sum(own.padding for own in sizes))
        self.figures.models.labels("on the base").set(awake)
        self.figures.models.labels("put aside").set(len(self.tenants) - awake)
        return self.figures.text()


def result_bytes(found: Any) -> tuple[bytes, bool]:
    """A result as the journal holds it, and whether it is a failure. found: bytes, a JSON object, or Failed."""
    if isinstance(found, Failed):
        return json.dumps({"error": found.text, "category": found.category}).encode(), True
    return (found, False) if isinstance(found, bytes) else (json.dumps(found).encode(), False)
