"""A rank other than 0: a service of the models that rank 0 gives it, with rank 0's journal.

It gets its requests over a channel, in the order in which they were promised; the journal holds them too, so that one that
comes by both ways is taken once. Rank 0 says when it ends; signals are left to rank 0.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from packlora.errors import ProcessError, reason_of
from packlora.serve.host import Host, freeze
from packlora.serve.queue import Request
from packlora.serve.ranks.channel import Channel
from packlora.serve.ranks.remote import ANSWERS, LOST, Recorder, RemoteFigures, RemoteJournal
from packlora.serve.ranks.streams import Streamed, request_from
from packlora.serve.samplers import Samplers, Source
from packlora.serve.service import Service
from packlora.serve.stores import Write
from packlora.serve.tenant import Tenant

REPORT_SECONDS = 0.5
"""Seconds between two reports of how models stand, while there is work."""


class _Samplers(Samplers):
    """Samples of a rank. What is kept of an owner's samplers is rank 0's to decide, since they are drawn on all ranks."""

    def __init__(self, core: RankService) -> None:
        super().__init__(core)
        self._channel = core.channel
        self._streams: dict[int, Streamed] = {}
        self._tokens: list[list[Any]] = []
        """Tokens of streams that were not sent."""
        self.given: dict[str, tuple[Any, Any]] = {}
        """Rows of asamples without results, by promise, as rank 0 has sent them."""

    def rows_of(self, promise: str) -> tuple[Any, Any]:
        """See Samplers."""
        return self.given.get(promise) or super().rows_of(promise)

    # --- samples of the endpoint -------------------------------------------------------------------------------------------

    def stream(self, key: int, owner: str, base: str, folder: str | None, name: str, request: dict[str, Any]) -> None:
        """Draw a request of rank 0. folder, name: of its snapshot; see Source."""
        wanted = request_from(request)
        source = Source(self.core.hosts[base], None, None if folder is None else Path(folder), name)
        running = Streamed(self._channel, key, owner, source, wanted.num_samples, self._tokens)
        self._streams[key] = running

        def enter() -> None:
            if key in self._streams:
                self.enter(wanted, running, enter)

        enter()

    def leave_stream(self, key: int) -> None:
        """Rank 0 wants no more of a request, or all of it is drawn."""
        if (running := self._streams.pop(key, None)) is not None:
            self.leave(running)

    def step(self, host: Host) -> bool:
        """See Samplers."""
        did = super().step(host)
        if self._tokens:
            self._channel.send("tokens", tokens=self._tokens)
            self._tokens.clear()
        return did

    def make_room(self, owner: str) -> None:
        """See Samplers."""
        self._channel.send("make_room", owner=owner)


class RankService(Service):
    """The service of a rank. Arguments as of Service.

    Args:
        channel: to rank 0. Messages are taken by `take`, in any thread.
    """

    journal: RemoteJournal
    samplers: _Samplers

    def __init__(self, hosts: Mapping[str, Host], state: Path, channel: Channel, max_wait: float = 0.0) -> None:
        self.channel = channel
        super().__init__(hosts, state, max_wait=max_wait)
        self.figures: RemoteFigures = RemoteFigures(channel)
        self._told: dict[str, list[Any]] = {}
        self._samples_told, self._told_at = 0, 0.0
        self._handlers: dict[str, Callable[..., None]] = {
            "open": self._open, "put": self._put, "close": self.close_model, "sample": self._sample,
            "stream": self.samplers.stream, "leave": self.samplers.leave_stream,
        }  # fmt: skip

    def _open_journal(self) -> RemoteJournal:
        return RemoteJournal(self.channel)

    def _make_samplers(self) -> Samplers:
        return _Samplers(self)

    def _check_bases(self) -> None:
        """See Service; rank 0 checks."""

    def _restore(self) -> None:
        """See Service; rank 0 says what is restored here."""

    def _drop_old(self) -> bool:
        """See Service; rank 0 does."""
        return False

    # --- messages ----------------------------------------------------------------------------------------------------------

    def take(self, kind: str, values: Mapping[str, Any]) -> None:
        """Take a message of rank 0."""
        if kind in ANSWERS:
            self.journal.answer(kind, values)
        elif kind == "start":
            self.start()
        elif kind == "stop":
            self.end()
        else:
            self.queue.call(partial(self._handlers[kind], **values))

    def end(self) -> None:
        """End the thread that computes after its present turn."""
        self.stopping = True
        with self.queue.changed:
            self.queue.changed.notify_all()

    def _open(self, model: str) -> None:
        row = self.journal.one("select * from models where id = ?", model)  # one that is closed already is closed next
        if row is not None:
            self.add_tenant(row, self.hosts[row["base"]])

    def _put(self, request: Mapping[str, Any]) -> None:
        """Add a request, unless it came with the journal's."""
        own = Request(**request)
        lane = self.queue.lanes.get(own.model)
        if lane is not None and own.seq >= lane.next and own.seq not in lane.requests:
            own.budget = min(own.budget, self.tenants[lane.model].host.budget.tokens)
            self.queue.put(own)

    def _sample(self, promise: str, row: Any, sampler: Any) -> None:
        self.samplers.given[promise] = row, sampler
        self.samplers.begin(promise)

    # --- what rank 0 is told -----------------------------------------------------------------------------------------------

    def commit(self, write: Write, waits: bool = True, flush: bool = False) -> None:
        """See Core."""
        if waits:
            super().commit(write, flush=flush)
        else:
            self.channel.send("commit", statements=Recorder.of(write))

    def tell(self, promises: list[str]) -> None:
        """See Core."""
        for promise in promises:
            self.samplers.given.pop(promise, None)
        if promises:
            self.channel.send("done", promises=promises)

    def tell_all(self) -> None:
        """See Core; rank 0 lets everybody look once this rank has failed."""

    def turn(self) -> bool:
        """See Service."""
        did = super().turn()
        if not did or time.monotonic() - self._told_at > REPORT_SECONDS:
            self._report()
        return did

    def _report(self) -> None:
        """Tell how models stand that have changed."""
        self._told_at = time.monotonic()
        now = {model: _standing(tenant) for model, tenant in self.tenants.items()}
        changed = {model: own for model, own in now.items() if own != self._told.get(model)}
        if changed or self.figures.drawn or self._samples != self._samples_told:
            self._told, self._samples_told = now, self._samples
            self.channel.send("standing", models=changed, samples=self._samples, drawn=self.figures.drawn)
            self.figures.drawn = 0

    def _run(self) -> None:
        super()._run()
        if self.failure is not None:
            self.channel.send("failed", reason=_described(self.failure))
        self.channel.send("stopped")


def _standing(tenant: Tenant) -> list[Any]:
    """Figures of a model for the page; see leader.RemoteTenant."""
    return [tenant.steps, list(tenant.losses), tenant.trained_at, tenant.is_awake]


def _described(error: BaseException) -> str:
    return reason_of(error) or type(error).__name__


def work(channel: Channel, hosts_of: Callable[[], Mapping[str, Host]], state: Path, max_wait: float) -> None:
    """Serve as a rank until rank 0 says that it is over.

    Args:
        hosts_of: loads the base models.

    Raises:
        ProcessError: rank 0 has ended, or this rank has failed and rank 0 says why.
    """
    channel.send("process", pid=os.getpid())
    try:
        service = RankService(hosts_of(), state, channel, max_wait=max_wait)
    except BaseException as error:
        channel.send("failed", reason=_described(error))
        channel.close()
        raise _unspoken(error) from error
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 gets them too, and lets the others end their turn
            signal.signal(number, signal.SIG_IGN)
        freeze()
    channel.send("ready", device=str(next(iter(service.hosts.values())).device))
    follow(service)


def follow(service: RankService) -> None:
    """Take messages until rank 0 closes the channel. Raises as work."""
    is_over = False
    while True:
        try:
            kind, values = service.channel.read()
        except EOFError:
            break
        is_over |= kind == "stop"
        service.take(kind, values)
    service.end()
    service.journal.lose()
    if service.failure is not None:
        raise _unspoken(service.failure)
    if not is_over:
        raise ProcessError(f"{LOST}; the same command goes on")


def _unspoken(error: BaseException) -> ProcessError:
    """The error of a rank, which rank 0 has said."""
    found = ProcessError(_described(error))
    found.is_news = False
    return found
