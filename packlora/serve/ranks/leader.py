"""Rank 0: the service that clients talk to, which gives models and samples to all ranks, and computes as one of them.

A model of another rank has a record here, and a lane that passes its requests on. Its results come back through the journal.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packlora.engine.sampling import SampleRequest
from packlora.errors import reason_of
from packlora.serve.adapters import Wanted
from packlora.serve.errors import Failed
from packlora.serve.host import Host
from packlora.serve.logs import log
from packlora.serve.publisher import request_of
from packlora.serve.ranks.records import Rank, Recent, RemoteLane, RemoteTenant, number_of, waiting_tokens
from packlora.serve.ranks.remote import answered, execute
from packlora.serve.ranks.streams import request_values, token_from
from packlora.serve.samplers import Promised, Running, Samplers
from packlora.serve.service import Service
from packlora.serve.slots import Outcome
from packlora.serve.tenant import Tenant


@dataclass(slots=True)
class _Sample:
    """An asample that is drawn by a rank. tokens: at most. key: of its snapshot."""

    rank: int
    tokens: int
    key: str


@dataclass(slots=True)
class _Stream:
    """A request of the endpoint that a rank draws."""

    rank: int
    running: Running


class _Samplers(Samplers):
    """Samples of a service, which are drawn by the ranks with the least load; those of a model as it is, by its own rank."""

    def __init__(self, core: Leader) -> None:
        super().__init__(core)
        self.leader = core
        self._streams: dict[int, _Stream] = {}
        """Requests of the endpoint, until they leave."""
        self._keys_of_streams = itertools.count()
        self.placed: dict[str, _Sample] = {}
        """Samples without results, by promise."""

    def begin_later(self, promise: str) -> None:
        """See Samplers."""
        row, sampler = self.rows_of(promise)
        number = 0
        if row is not None and sampler is not None:  # else it ends here, with words
            with self.leader.placing:
                number = (self.placed.get(promise) or self._place(promise, json.loads(row["payload"]), sampler)).rank
        if number:
            rows = {"row": dict(row or {}), "sampler": dict(sampler or {})}
            self.leader.ranks[number - 1].channel.send("sample", promise=promise, **rows)
        else:
            super().begin_later(promise)

    # --- samples of the endpoint -------------------------------------------------------------------------------------------

    def enter(self, request: SampleRequest, running: Running, again: Callable[[], None]) -> None:
        """See Samplers. What is of the endpoint may be drawn by another rank."""
        if isinstance(running, Promised) or any(own.running is running for own in self._streams.values()):
            super().enter(request, running, again)
            return
        with self.leader.placing:
            key, number = next(self._keys_of_streams), self.leader.least()
            self._streams[key] = _Stream(number, running)
            most = request.max_tokens or running.source.host.facts.context
            self.placed[f"stream {key}"] = _Sample(number, most * request.num_samples, running.source.key)
        if number == 0:
            super().enter(request, running, again)
            return
        source = running.source
        self.leader.ranks[number - 1].channel.send(
            "stream", key=key, owner=running.owner, base=source.host.facts.name, name=source.key,
            folder=None if source.folder is None else str(source.folder), request=request_values(request),
        )  # fmt: skip

    def leave(self, running: Running) -> None:
        """See Samplers."""
        for key, own in [*self._streams.items()]:
            if own.running is running:
                self._forget(key)
                if own.rank:
                    self.leader.ranks[own.rank - 1].channel.send("leave", key=key)
        super().leave(running)

    def _forget(self, key: int) -> None:
        self._streams.pop(key, None)
        self.placed.pop(f"stream {key}", None)

    def take_tokens(self, tokens: Sequence[Sequence[Any]]) -> None:
        """Another rank has drawn tokens of streams, each with the stream's key."""
        for key, *values in tokens:
            if (own := self._streams.get(key)) is not None:
                own.running.take(token_from(values))

    def refuse(self, key: int, text: str, category: str) -> None:
        """Another rank does not draw a stream."""
        if (own := self._streams.get(key)) is not None:
            own.running.fail(Failed(text, category))

    # --- where samples are drawn -------------------------------------------------------------------------------------------

    def _place(self, promise: str, body: Mapping[str, Any], sampler: Mapping[str, Any] | sqlite3.Row) -> _Sample:
        most = body["sampling_params"].get("max_tokens") or self.leader.hosts[sampler["base"]].facts.context
        key = sampler["folder"] or ""
        self._used[key] = time.monotonic()
        rank = self.leader.least() if sampler["model"] is None else self.leader.rank_of(sampler["model"])
        found = self.placed[promise] = _Sample(rank, most * (body.get("num_samples") or 1), key)
        return found

    def _keys(self) -> set[str]:
        return super()._keys() | {own.key for own in [*self.placed.values()]}


class Leader(Service):
    """The service of rank 0. Arguments as of Service.

    Args:
        ranks: the others, in their order, with the base models loaded.
    """

    samplers: _Samplers

    def __init__(self, hosts: Mapping[str, Host], state: Path, ranks: Sequence[Rank], max_wait: float = 0.0) -> None:
        self.ranks, self.placing = ranks, threading.RLock()
        self.recent = [Recent() for _ in range(1 + len(ranks))]
        self._readers = [threading.Thread(target=self._read_all, args=(rank,), daemon=True) for rank in ranks]
        super().__init__(hosts, state, max_wait=max_wait)

    def _make_samplers(self) -> Samplers:
        return _Samplers(self)

    # --- placing -----------------------------------------------------------------------------------------------------------

    def loads(self) -> list[tuple[int, int]]:
        """Load of each rank, in the order of what counts: tokens that it has trained in the last minute or is to compute, and
        its models."""
        tokens, models = [own.tokens for own in self.recent], [0] * len(self.recent)
        with self.queue.changed:
            for lane in self.queue.lanes.values():
                tokens[number_of(lane)] += waiting_tokens(lane)
                models[number_of(lane)] += 1
        for sample in [*self.samplers.placed.values()]:
            tokens[sample.rank] += sample.tokens
        return list(zip(tokens, models, strict=True))

    def least(self) -> int:
        """Number of the rank with the least load, the first of several."""
        loads = self.loads()
        return loads.index(min(loads))

    def rank_of(self, model: str) -> int:
        """Number of the rank that has a model; 0 where it is over."""
        lane = self.queue.lanes.get(model)
        return 0 if lane is None else number_of(lane)

    def add_tenant(self, row: Any, host: Host) -> None:
        """See Service: on the rank with the least load."""
        with self.placing:
            number = self.least()
            if number == 0:
                super().add_tenant(row, host)
                return
            rank = self.ranks[number - 1]
            wanted, folder = Wanted.of_dict(json.loads(row["spec"])), self.stores.model(row["id"])
            tenant = RemoteTenant(host, row["id"], row["owner"], row["session"], wanted, folder, None)
            tenant.rank = number
            lane = RemoteLane(row["owner"], row["id"], host.facts.name, rank)
            query = "select * from requests where model = ? and state = 'waiting' order by seq"
            for own in self.journal.all(query, row["id"]):
                lane.expect(request_of(own))
            self.tenants[tenant.id] = tenant
            self.queue.open(lane)
            rank.channel.send("open", model=row["id"])
        log("model placed", model=row["id"], rank=number)

    def snapshot_of(self, tenant: Tenant) -> int:
        """See Publisher; the journal says it of a model of another rank."""
        if not isinstance(tenant, RemoteTenant):
            return super().snapshot_of(tenant)
        row = self.journal.committed("select snapshot from models where id = ?", tenant.id)
        return 0 if row is None else row["snapshot"] or 0

    def close_model(self, model: str) -> None:
        """See Publisher."""
        if not isinstance(tenant := self.tenants.get(model), RemoteTenant):
            super().close_model(model)
            return
        del self.tenants[model]
        self.queue.close(model)
        self.ranks[tenant.rank - 1].channel.send("close", model=model)

    # --- start and end -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Let the other ranks compute, and take their messages from now on."""
        for rank, reader in zip(self.ranks, self._readers, strict=True):
            rank.channel.send("start")
            reader.start()

    def start(self) -> None:
        """See Service."""
        self.begin()
        super().start()

    def stop(self) -> int:
        """See Service; all ranks end their present turn."""
        self.stopping = True
        for rank in self.ranks:
            rank.channel.send("stop")
        for reader in self._readers:
            reader.join()
        return super().stop()

    def _run(self) -> None:
        super()._run()
        if self.failure is not None:
            self.on_failure()

    # --- messages of the other ranks ---------------------------------------------------------------------------------------

    def _read_all(self, rank: Rank) -> None:
        while not rank.is_stopped:
            try:
                kind, values = rank.channel.read()
                self._take_message(rank, kind, values)
            except EOFError:
                self.fail(rank.lost)
                return
            except Exception as error:
                self.fail(f"what {rank} has computed cannot be kept: {reason_of(error)}")
                return

    def _take_message(self, rank: Rank, kind: str, values: Mapping[str, Any]) -> None:
        if kind in ("read", "write"):
            answer, found = answered(self, kind, values)
            rank.channel.send(answer, **found)
        elif kind == "commit":
            self.commit(lambda db: execute(db, values["statements"]))
        elif kind == "done":
            self._done(rank, values["promises"])
        elif kind == "slot":
            self.recent[rank.number].add(sum(values["by_owner"].values()))
            self.figures.slot(**values)
        elif kind == "tokens":
            self.samplers.take_tokens(**values)
        elif kind == "refuse":
            self.samplers.refuse(**values)
        elif kind == "standing":
            self._take_standing(rank, **values)
        elif kind == "make_room":
            self.queue.call(lambda: self.samplers.make_room(values["owner"]))
        elif kind == "failed":
            self.fail(f"{rank} has failed: {values['reason']}; start again, and the service goes on")
        else:
            rank.is_stopped = kind == "stopped"

    def _done(self, rank: Rank, promises: list[str]) -> None:
        """Results of a rank are in the journal."""
        for promise in promises:
            found = rank.away.pop(promise, None)
            if found is not None and self.queue.lanes.get(found[0].model) is found[0]:
                self.queue.pop(*found)
                self.figures.seconds.labels(found[1].kind).observe(time.monotonic() - found[1].arrived)
        self.tell(promises)

    def _take_standing(self, rank: Rank, models: Mapping[str, list[Any]], samples: int, drawn: int) -> None:
        rank.samples = samples
        self.figures.drew(drawn)
        for model, own in models.items():
            tenant = self.tenants.get(model)
            if isinstance(tenant, RemoteTenant):
                tenant.take(*own)

    # --- what one process has too ------------------------------------------------------------------------------------------

    def tell(self, promises: list[str]) -> None:
        """See Core."""
        for promise in promises:
            self.samplers.placed.pop(promise, None)
        super().tell(promises)

    def _take(self, outcome: Outcome) -> None:
        self.recent[0].add(sum(outcome.tokens.values()))
        super()._take(outcome)

    @property
    def _samples(self) -> int:
        return super()._samples + sum(rank.samples for rank in self.ranks)

    def status(self, owner: str | None = None) -> dict[str, Any]:
        """See Core, with a line a rank."""
        names = [f"rank 0 ({next(iter(self.hosts.values())).device})", *map(str, self.ranks)]
        ranks = [
            f"{name}: {models} models, load {tokens}"
            for name, (tokens, models) in zip(names, self.loads(), strict=True)
        ]
        return super().status(owner) | {"ranks": ranks}
