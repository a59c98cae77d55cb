"""Sampling: who samples with which weights, and the samples that run.

A snapshot never changes: its adapter is a folder of its own, and is put onto the base when it is first sampled, and held
against what its trainer has found (proof.py). An inflight sampler has a model's adapter as it is. Samples of all tenants run
in one batch (engine/generate.py); what one draws depends on its seed, which the journal keeps.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from packlora.adapters.attach import Adapter
from packlora.engine.memory import free_memory
from packlora.engine.rows import NO_ADAPTER
from packlora.engine.sampling import PromptScores, SampledToken, SampleRequest
from packlora.errors import InputError, reason_of
from packlora.runtime.continued import resolve_folder
from packlora.serve.core import Core, result_bytes
from packlora.serve.errors import Failed, Refused
from packlora.serve.host import Host
from packlora.serve.journal import set_result
from packlora.serve.logs import LOG, log
from packlora.serve.messages import Sequence_, sample_response
from packlora.serve.proof import Scored, read_scores
from packlora.serve.queue import Shares
from packlora.serve.sampling_requests import request_of
from packlora.serve.values import read_folder

ROWS = 64
"""Samples that run at once; more requests wait for their owners' turns."""
ATTACHED = 16
"""Adapters of snapshots that stay on a base without being sampled."""


@dataclass(frozen=True, slots=True)
class Source:
    """Weights that sample: a snapshot's in a folder, a model's as they are, or the base's alone.

    key: names what the folder holds, and is another one when the folder holds something else.
    """

    host: Host
    model: str | None = None
    folder: Path | None = None
    key: str = ""


class Running(Protocol):
    """Samples of a request. source: the weights that they are drawn by."""

    owner: str
    source: Source

    def take(self, token: SampledToken) -> bool:
        """Add a token. Returns whether the request has ended."""

    def fail(self, why: Failed) -> None:
        """The request has ended without its samples."""


@dataclass(slots=True)
class _Snapshot:
    """An adapter of a snapshot on a base. waiting: what is to be called once it was held against its trainer; None: it was.
    apart: why it is not used, and then it is on no base. is_final: whether it will not be tried again."""

    adapter: Adapter | None
    waiting: list[Callable[[], None]] | None
    apart: str | None = None
    is_final: bool = True


@dataclass(slots=True)
class _Waiting:
    """A request that waits for room. again: what is called if its adapter is not ready in its turn."""

    request: SampleRequest
    again: Callable[[], None]


@dataclass(slots=True)
class _Turn:
    """An owner's turn."""

    owner: str
    model: str = ""


@dataclass(slots=True)
class _OnHost:
    """Samples of a base that run, by ticket, and those that wait for room, by owner. attached: snapshots, that which was used
    last at the end."""

    running: dict[int, Running] = field(default_factory=dict)
    waiting: dict[str, dict[Running, _Waiting]] = field(default_factory=dict)
    shares: Shares = field(default_factory=Shares)
    attached: dict[str, _Snapshot] = field(default_factory=dict)

    @property
    def all(self) -> list[Running]:
        """Requests that run or wait."""
        return [*self.running.values(), *(own for some in self.waiting.values() for own in some)]

    def pop(self, running: Running) -> _Waiting | None:
        """Take a request from those that wait."""
        own = self.waiting.get(running.owner, {})
        found = own.pop(running, None)
        if not own:
            self.waiting.pop(running.owner, None)
        return found

    def next(self) -> Running:
        """The first request of the owner that was given the fewest tokens."""
        first = self.shares.order(_Turn(owner) for owner in self.waiting)[0]
        return next(iter(self.waiting[first.owner]))


class Samplers:
    """Samples of a service. All but `begin_later` and `forget` is for the thread that computes."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._on: dict[str, _OnHost] = {name: _OnHost() for name in core.hosts}
        self._used: dict[str, float] = {}
        """When a snapshot was last sampled, by key, seconds of a monotonic clock."""

    def restore(self) -> None:
        """Draw again what an earlier process did not finish."""
        query = "select id from requests where kind = 'sample' and state = 'waiting' order by rowid"
        for row in self.core.journal.all(query):
            self.begin_later(row["id"])

    def begin_later(self, promise: str) -> None:
        """Begin an asample of the journal, soon."""
        self.core.queue.call(lambda: self.begin(promise))

    # --- samples -----------------------------------------------------------------------------------------------------------

    def begin(self, promise: str) -> None:
        """Begin an asample of the journal, unless it is done."""
        row, sampler = self.rows_of(promise)
        if row is None or row["state"] != "waiting":
            return
        body = json.loads(row["payload"])
        try:
            if sampler is None or sampler["state"] != "open":
                raise Failed(
                    "sampling_session_id: the sampling session is over, or its base model is not served now; make another one"
                )
            host = self.core.hosts[sampler["base"]]
            request = request_of(body, host.facts, self.core.limits)
            name = sampler["folder"]
            folder = None if name is None else self.core.stores.sampler_folder(name)
            source = Source(host, sampler["model"], folder, name or "")
            last = body.get("prompt_logprobs_last_n")
            running = Promised(self.core, promise, row["owner"], source, request, last)
            self.enter(request, running, lambda: self.begin_later(promise))
        except sqlite3.Error:
            raise
        except Exception as error:
            _finish(self.core, promise, _failed(error))

    def rows_of(self, promise: str) -> tuple[sqlite3.Row | None, sqlite3.Row | None]:
        """An asample of the journal, and its sampling session where its base model is served."""
        row, journal = self.core.journal.one("select * from requests where id = ?", promise), self.core.journal
        if row is None or row["payload"] is None:
            return row, None
        id = json.loads(row["payload"])["sampling_session_id"]
        sampler = journal.one("select * from samplers where id = ?", id)
        return row, None if sampler is None or sampler["base"] not in self.core.hosts else sampler

    def enter(self, request: SampleRequest, running: Running, again: Callable[[], None]) -> None:
        """Let the samples of a request run once there is room. Where its adapter is not ready then, the request is forgotten,
        and `again` is called once it is."""
        on = self._on[running.source.host.facts.name]
        on.waiting.setdefault(running.owner, {})[running] = _Waiting(request, again)

    def leave(self, running: Running) -> None:
        """Forget a request."""
        host = running.source.host
        on = self._on[host.facts.name]
        on.pop(running)
        for ticket in [ticket for ticket, own in on.running.items() if own is running]:
            del on.running[ticket]
            host.sampling.cancel(ticket)

    def _admit(self, host: Host, on: _OnHost) -> None:
        """Let requests run while there is room for their samples: in turns of owners, by the tokens that these were given."""
        while on.waiting and host.samples < ROWS:
            waiting = on.pop(running := on.next())
            assert waiting is not None
            try:
                number = self._adapter(running.source, waiting.again)
                if number is not None:
                    on.running[host.sampling.submit(replace(waiting.request, adapter=number))] = running
                    on.shares.charge(_Turn(running.owner), len(waiting.request.prompt))
            except sqlite3.Error:
                raise
            except Exception as error:
                running.fail(_failed(error))

    def step(self, host: Host) -> bool:
        """Draw the next token of all samples of a base. Returns whether there are any."""
        on = self._on[host.facts.name]
        self._admit(host, on)
        if not on.running:
            return False
        try:
            tokens = host.sampling.step()
        except Exception as error:
            self._give_up(host, error)
            return True
        self.core.figures.drew(len(tokens))
        drawn = Counter[str]()
        for token in tokens:
            running = on.running.get(token.ticket)
            if running is None:
                continue
            drawn[running.owner] += 1
            if self._take(host, running, token):
                del on.running[token.ticket]
        for owner, count in drawn.items():
            on.shares.charge(_Turn(owner), count)
        return True

    def _take(self, host: Host, running: Running, token: SampledToken) -> bool:
        """Give a request its token. Returns whether it has ended."""
        try:
            ended, is_cut = running.take(token), token.reason == "not finite"
        except sqlite3.Error:
            raise
        except Exception as error:
            running.fail(_failed(error))
            ended = is_cut = True
        if ended and is_cut:
            host.sampling.cancel(token.ticket)
        return ended

    def _give_up(self, host: Host, error: Exception) -> None:
        """A pass failed: all samples that run end, and the service goes on."""
        LOG.error("samples of %s failed: %s", host.facts.name, reason_of(error))
        on = self._on[host.facts.name]
        running, on.running = on.running, {}
        for ticket, own in running.items():
            host.sampling.cancel(ticket)
            own.fail(Failed(f"the samples that ran failed: {reason_of(error)}", "server"))
        host.sampling.free()
        free_memory(host.device)

    def end_of(self, model: str, why: str) -> None:
        """A model leaves its base: samples that follow it end."""
        for on in self._on.values():
            for running in on.all:
                if running.source.model == model:
                    self.leave(running)
                    running.fail(Failed(why, "server"))

    def followed(self) -> set[str]:
        """Models whose adapter, as it is, samples are drawn of."""
        return {own.source.model for on in self._on.values() for own in on.all if own.source.model is not None}

    # --- whose weights -----------------------------------------------------------------------------------------------------

    def _adapter(self, source: Source, again: Callable[[], None]) -> int | None:
        """Number of the adapter of a source; None where it is not ready yet, and `again` is called later."""
        if source.model is not None:
            number = self._follow(source.model)
            if number is None:  # its model is brought up to date first
                self.core.queue.call(again)
            return number
        return NO_ADAPTER if source.folder is None else self._snapshot(source, again)

    def _snapshot(self, source: Source, again: Callable[[], None]) -> int | None:
        on, host, key = self._on[source.host.facts.name], source.host, source.key
        snapshot, self._used[key] = on.attached.pop(key, None), time.monotonic()
        if snapshot is None:
            snapshot = self._attach(source)
        on.attached[key] = snapshot
        used = {running.source.key for running in on.all} | {key} if len(on.attached) > ATTACHED else set()
        for old in [own for own in on.attached if own not in used][: max(len(on.attached) - ATTACHED, 0)]:
            self._drop(host, old)
        if snapshot.apart is not None:
            if not snapshot.is_final:
                del on.attached[key]
            raise Failed(snapshot.apart, "server")
        if snapshot.waiting is not None:
            snapshot.waiting.append(again)
            return None
        assert snapshot.adapter is not None
        return snapshot.adapter.number

    def _drop(self, host: Host, key: str) -> None:
        """Take a snapshot off its base."""
        snapshot = self._on[host.facts.name].attached.pop(key, None)
        if snapshot is not None and snapshot.adapter is not None:
            host.detach(snapshot.adapter)

    def make_room(self, owner: str) -> None:
        """Close unnamed samplers of an owner that were sampled longest ago, above the limit `samplers`."""
        query = (
            "select id, base, folder from samplers where owner = ? and state = 'open' and path is null and folder is not "
            "null order by rowid"
        )
        rows = self.core.journal.all(query, owner)
        running = self._keys()
        idle = sorted(
            (row for row in rows[:-1] if row["folder"] not in running),
            key=lambda row: self._used.get(row["folder"], 0.0),
        )
        for row in idle[: max(len(rows) - self.core.limits.samplers, 0)]:
            self.core.commit(lambda db, id=row["id"]: _close(db, id))  # type: ignore[misc]
            if (host := self.core.hosts.get(row["base"])) is not None:
                self._drop(host, row["folder"])
            self.forget(row["folder"])
            self.core.stores.tidy(self.core.stores.sampler_folder(row["folder"]))
            log("sampler closed", sampler=row["id"], why="the limit samplers")

    def forget(self, key: str) -> None:
        """A snapshot is over. Any thread may call it."""
        self._used.pop(key, None)

    def _keys(self) -> set[str]:
        """Snapshots by which requests are drawn that run or wait."""
        return {own.source.key for on in self._on.values() for own in on.all}

    def _attach(self, source: Source) -> _Snapshot:
        """Put a snapshot onto its base, and begin to hold it against its trainer."""
        host, folder = source.host, source.folder
        assert folder is not None
        scores = read_scores(folder)
        adapter = host.attach("a sampler", resolve_folder(folder, host.skeleton, "a sampler"), 0)
        try:
            host.take(adapter, None, read_folder(folder, adapter, optimizer=False))
            snapshot = _Snapshot(adapter, None)
            if scores is not None:
                request = SampleRequest(
                    tuple(scores.ids.tolist()), adapter.number, max_tokens=1, temperature=0.0, prompt_logprobs=True
                )
                ticket = host.sampling.submit(request)
                self._on[host.facts.name].running[ticket] = _Proof(self, source, snapshot, scores)
                snapshot.waiting = []
        except BaseException:
            host.detach(adapter)
            raise
        return snapshot

    def proved(self, source: Source, snapshot: _Snapshot, apart: str | None) -> None:
        """A snapshot was held against its trainer. apart: how they differ, or why that is not known."""
        waiting, snapshot.waiting = snapshot.waiting or [], None
        if apart is not None:
            log("sampler refused", logging.ERROR, why=apart, base=source.host.facts.name, snapshot=source.key)
            assert snapshot.adapter is not None
            source.host.detach(snapshot.adapter)
            snapshot.adapter, snapshot.apart = None, apart
        for again in waiting:
            self.core.queue.call(again)

    def _follow(self, model: str) -> int | None:
        tenant, lane = self.core.tenants.get(model), self.core.queue.lanes.get(model)
        if tenant is None or lane is None:
            raise Failed("sampling_session_id: the model of the sampling session was unloaded")
        adapter, _ = tenant.wake()
        first = lane.requests.get(lane.next)
        lane.is_roused = first is not None and first.is_replayed
        return None if lane.is_roused else adapter.number


class Promised:
    """An asample, whose result goes into the journal. last: places of the prompt whose log-probabilities are wanted."""

    def __init__(
        self, core: Core, promise: str, owner: str, source: Source, request: SampleRequest, last: int | None
    ) -> None:
        self.core, self.promise, self.owner, self.source, self.last = core, promise, owner, source, last
        self.prompt, self.left = len(request.prompt), request.num_samples
        self.sequences = [Sequence_([], [], False, []) for _ in range(request.num_samples)]
        self.scores: PromptScores | None = None

    def take(self, token: SampledToken) -> bool:
        """See Running."""
        own = self.sequences[token.sample]
        own.tokens.append(token.id)
        own.logprobs.append(token.logprob)
        own.reached = token.reason == "stop"
        if token.top is not None:
            own.top.append(token.top)
        self.scores = token.scores or self.scores
        if token.reason == "not finite":
            self.fail(Failed("the model's logits are not finite with this adapter"))
            return True
        self.left -= token.reason is not None
        if not self.left:
            found = sample_response(self.sequences, self.scores, self.last, self.prompt)
            _finish(self.core, self.promise, found)
        return not self.left

    def fail(self, why: Failed) -> None:
        """See Running."""
        _finish(self.core, self.promise, why)


@dataclass(slots=True, eq=False)
class _Proof:
    """The seat belt: log-probabilities by the sampler of tokens that the trainer has scored when the snapshot was made."""

    samplers: Samplers
    source: Source
    snapshot: _Snapshot
    scores: Scored
    owner: str = ""

    def take(self, token: SampledToken) -> bool:
        """See Running."""
        assert token.scores is not None and token.scores.logprobs is not None
        apart = self.scores.why_apart(token.scores.logprobs[1:], self.source.host.base.model.dtype)
        advice = "; save the weights again, or report it"
        self.samplers.proved(self.source, self.snapshot, None if apart is None else apart + advice)
        return True

    def fail(self, why: Failed) -> None:
        """See Running."""
        self.snapshot.is_final = False
        self.samplers.proved(self.source, self.snapshot, why.text)


def _close(db: sqlite3.Connection, sampler: str) -> None:
    db.execute("update samplers set state = 'closed' where id = ?", (sampler,))


def _failed(error: Exception) -> Failed:
    """Words for a request that ends by an error, which is logged where it is none of the known ones."""
    if isinstance(error, Failed):
        return error
    if not isinstance(error, Refused | InputError | OSError | MemoryError):
        LOG.error("a request for samples failed", exc_info=error)
    return Failed(error.text if isinstance(error, Refused) else reason_of(error), "server")


def _finish(core: Core, promise: str, found: bytes | Failed) -> None:
    core.commit(lambda db: set_result(db, promise, *result_bytes(found)), waits=False)
    core.tell([promise])
