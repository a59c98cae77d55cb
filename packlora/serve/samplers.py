"""Sampling: who samples with which weights, and the samples that run.

A snapshot never changes: its adapter is a folder of its own, and is put onto the base when it is first sampled. An inflight
sampler has a model's adapter as it is. Samples of all tenants run in one batch (engine/generate.py); what one draws depends on
its seed, which the journal keeps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from packlora.adapters.attach import Adapter
from packlora.adapters.files import load_adapter
from packlora.engine.rows import NO_ADAPTER
from packlora.engine.sampling import PromptScores, SampledToken
from packlora.errors import InputError, reason_of
from packlora.runtime.continued import resolve_folder
from packlora.serve.core import Core, result_bytes
from packlora.serve.errors import Failed, Refused
from packlora.serve.host import Host
from packlora.serve.journal import set_result
from packlora.serve.messages import Sequence_, sample_response
from packlora.serve.sampling_requests import request_of

ATTACHED = 16
"""Adapters of snapshots that stay on a base without being sampled."""


@dataclass(slots=True)
class _Running:
    """An asample on its way. key: of the adapter of a snapshot that it uses."""

    promise: str
    last: int | None
    prompt: int
    sequences: list[Sequence_]
    left: int
    key: str | None
    scores: PromptScores | None = None


@dataclass(slots=True)
class _OnHost:
    """Samples of a base. attached: adapters of snapshots, that which was used last at the end."""

    running: dict[int, _Running] = field(default_factory=dict)
    attached: dict[str, Adapter] = field(default_factory=dict)


class Samplers:
    """Samples of a service. All but `begin_later` is for the thread that computes."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._on: dict[str, _OnHost] = {name: _OnHost() for name in core.hosts}

    def restore(self) -> None:
        """Draw again what an earlier process did not finish."""
        query = "select id from requests where kind = 'sample' and state = 'waiting' order by created"
        for row in self.core.journal.all(query):
            self.begin_later(row["id"])

    def begin_later(self, promise: str) -> None:
        """Begin an asample of the journal, soon."""
        self.core.queue.call(lambda: self._begin(promise))

    # --- samples -----------------------------------------------------------------------------------------------------------

    def _begin(self, promise: str) -> None:
        journal = self.core.journal
        row = journal.one("select * from requests where id = ?", promise)
        if row is None or row["state"] != "waiting":
            return
        body = json.loads(row["payload"])
        sampler = journal.one("select * from samplers where id = ?", body["sampling_session_id"])
        try:
            if sampler is None or sampler["state"] != "open":
                raise Failed("sampling_session_id: the sampling session is over; make another one")
            host = self.core.hosts[sampler["base"]]
            number, key = self._adapter(host, sampler)
            if number is None:  # its model is brought up to date first
                self.begin_later(promise)
                return
            request = request_of(body, host.facts, self.core.limits, number)
            ticket = host.sampling.submit(request)
        except (InputError, Refused, Failed, OSError, MemoryError) as error:
            own = error if isinstance(error, Failed) else Failed(reason_of(error), "server")
            self._finish(promise, own)
            return
        sequences = [Sequence_([], [], False, []) for _ in range(request.num_samples)]
        last = body.get("prompt_logprobs_last_n")
        running = _Running(promise, last, len(request.prompt), sequences, request.num_samples, key)
        self._on[sampler["base"]].running[ticket] = running

    def _adapter(self, host: Host, sampler: Any) -> tuple[int | None, str | None]:
        """Number of the adapter of a sampler, and the key under which it is kept; None where it is not ready yet."""
        if sampler["model"] is not None:
            return self._follow(sampler["model"]), None
        if sampler["folder"] is None:
            return NO_ADAPTER, None
        on, key = self._on[host.facts.name], sampler["folder"]
        adapter = on.attached.pop(key, None)
        if adapter is None:
            folder = self.core.stores.state / "samplers" / key
            adapter = host.attach("a sampler", resolve_folder(folder, host.skeleton, "a sampler"), 0)
            load_adapter(folder, adapter)
        on.attached[key] = adapter
        used = {running.key for running in on.running.values()} | {key}
        for old in [own for own in on.attached if own not in used][: max(len(on.attached) - ATTACHED, 0)]:
            host.detach(on.attached.pop(old))
        return adapter.number, key

    def _follow(self, model: str) -> int | None:
        tenant, lane = self.core.tenants.get(model), self.core.queue.lanes.get(model)
        if tenant is None or lane is None:
            raise Failed("sampling_session_id: the model of the sampling session was unloaded")
        adapter, _ = tenant.wake()
        lane.is_roused = any(request.is_replayed for request in lane.requests.values())
        return None if lane.is_roused else adapter.number

    def step(self, host: Host) -> bool:
        """Draw the next token of all samples of a base. Returns whether there are any."""
        on = self._on[host.facts.name]
        if not on.running:
            return False
        tokens = host.sampling.step()
        self.core.figures.sampled.inc(len(tokens))
        for token in tokens:
            running = on.running.get(token.ticket)
            if running is not None and self._take(host, running, token):
                del on.running[token.ticket]
        return True

    def _take(self, host: Host, running: _Running, token: SampledToken) -> bool:
        """Add a token. Returns whether its request has ended."""
        own = running.sequences[token.sample]
        own.tokens.append(token.id)
        own.logprobs.append(token.logprob)
        own.reached = token.reason == "stop"
        if token.top is not None:
            own.top.append(token.top)
        running.scores = token.scores or running.scores
        if token.reason == "not finite":
            host.sampling.cancel(token.ticket)
            self._finish(running.promise, Failed("the model's logits are not finite with this adapter"))
            return True
        running.left -= token.reason is not None
        if not running.left:
            self._finish(
                running.promise, sample_response(running.sequences, running.scores, running.last, running.prompt)
            )
        return not running.left

    def _finish(self, promise: str, found: bytes | Failed) -> None:
        self.core.commit(lambda db: set_result(db, promise, *result_bytes(found)))
        self.core.tell([promise])

    def model_closed(self, model: str) -> None:
        """A model is over: samples with its adapter end."""
        tenant_samplers = {row["id"] for row in self.core.journal.all("select id from samplers where model = ?", model)}
        for name, on in self._on.items():
            for ticket, running in list(on.running.items()):
                row = self.core.journal.one("select payload from requests where id = ?", running.promise)
                if row is not None and json.loads(row["payload"])["sampling_session_id"] in tenant_samplers:
                    self.core.hosts[name].sampling.cancel(ticket)
                    del on.running[ticket]
                    self._finish(running.promise, Failed("the model was unloaded"))
