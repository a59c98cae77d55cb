"""Results, which are committed before they are seen, and models that are put aside, in the thread that computes."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

from packlora.errors import reason_of
from packlora.serve.core import Core, result_bytes
from packlora.serve.errors import Failed
from packlora.serve.journal import drop_payloads, set_result
from packlora.serve.logs import LOG, log
from packlora.serve.queue import Lane, Request
from packlora.serve.retention import Retention
from packlora.serve.samplers import Samplers
from packlora.serve.saves import drop_expired
from packlora.serve.stores import Write
from packlora.serve.tenant import Tenant

IDLE_SECONDS = 60.0
"""Seconds without work after which a model is put aside."""


class Publisher(Core):
    """Writes and tells the results of requests, and puts models aside."""

    samplers: Samplers
    _expired: dict[str, float]
    """Checkpoints whose time is over, see drop_expired."""
    _retention: Retention

    def snapshot_of(self, tenant: Tenant) -> int:
        """Number of the last request of a model that its snapshot holds: promises up to it may be gone. Any thread may call
        it."""
        return tenant.snapshot or 0

    def _rewind(self, lane: Lane, tenant: Tenant, before: int | None) -> None:
        """Let a lane begin behind the snapshot of its model, which is not on the base. before: requests up to this number;
        None: all of the journal."""
        first = (tenant.snapshot or 0) + 1
        rows = self.journal.all(
            "select * from requests where model = ? and seq >= ? and seq < ? order by seq",
            tenant.id, first, 1 << 62 if before is None else before,
        )  # fmt: skip
        self.queue.rewind(lane, first, map(request_of, rows))

    # --- results -----------------------------------------------------------------------------------------------------------

    def finish(self, lane: Lane, request: Request, result: Any, also: Write | None = None) -> None:
        """A request was carried out. also: what is to be written with its result."""
        self._publish([(lane, request, result)], also)

    def _publish(self, results: list[tuple[Lane, Request, Any]], also: Write | None = None) -> None:
        """Commit results, then let them be seen. A result is bytes, a JSON object, or Failed."""
        snapshots, unloaded = dict[str, int](), list[Lane]()
        for at, (lane, request, found) in enumerate(results):
            tenant = self.tenants[lane.model]
            if isinstance(found, Failed) and request.kind == "forward_backward" and not request.forward_only:
                tenant.spoil(request.seq)
            is_load = request.kind == "load_weights" and not isinstance(found, Failed)
            is_step = request.kind == "optim_step" and not isinstance(found, Failed) and tenant.wants_snapshot
            if is_load or is_step:
                try:
                    tenant.write_snapshot(request.seq)
                    snapshots[tenant.id] = request.seq
                except OSError as error:
                    LOG.error("a snapshot of a model cannot be written: %s", reason_of(error))
                    if is_load:  # nothing but a snapshot says what was loaded, so it was not
                        why = f"load_weights {request.seq}: nothing was loaded: {reason_of(error)}"
                        results[at] = (lane, request, Failed(why, "server"))
                        unloaded.append(lane)
        new = [own for own in results if not own[1].is_replayed]
        if new or snapshots:
            names = bool(snapshots) or also is not None  # files, which clients may ask for, or in whose place others go
            self.commit(lambda db: _write(db, new, snapshots, also), waits=names, flush=names)
        for model, seq in snapshots.items():
            tenant = self.tenants[model]
            if tenant.snapshot is not None and tenant.snapshot != seq:
                tenant.drop_snapshot(tenant.snapshot)
            tenant.snapshot = seq
        for lane, request, _ in results:
            self.queue.pop(lane, request)
        self.tell([request.id for _, request, _ in new])
        for _, request, _ in new:
            self.figures.seconds.labels(request.kind).observe(time.monotonic() - request.arrived)
        for lane in unloaded:
            self._set_aside(lane)

    def _fail_first(self, lane: Lane, error: Failed) -> None:
        """Refuse the first request of a lane that waits, whatever is to be done again before it."""
        with self.queue.changed:
            waiting = [own for own in lane.requests.values() if not own.is_replayed]
            if not waiting:  # it was roused for samples, which say so themselves
                lane.is_roused = False
                return
        request = min(waiting, key=lambda own: own.seq)
        self.commit(lambda db: set_result(db, request.id, *result_bytes(error)))
        with self.queue.changed:
            lane.fail(request)
        self.tell([request.id])

    def _refuse(self, lane: Lane, request: Request, error: Exception) -> None:
        """A request has failed by itself. One whose result is known is part of what its model has become: the first one that
        waits behind it is refused, and the model begins at its snapshot again."""
        failed = Failed(f"{request.kind} {request.seq}: {reason_of(error)}", "server")
        if not request.is_replayed:
            self.finish(lane, request, failed)
            return
        if request.work is not None:
            request.logprobs.clear()
            request.begin(request.budget)
        self._fail_first(lane, Failed(f"the model cannot be made again: {failed.text}", "server"))
        self._set_aside(lane)

    # --- models without work -----------------------------------------------------------------------------------------------

    def _tidy(self) -> bool:
        """Remove what is over, and put a model aside. Returns whether there is more to do."""
        is_left = self._drop_old()
        return self._put_aside() or is_left

    def _put_aside(self) -> bool:
        """Put the model aside that has been without work for longest, if that is long. Returns whether there was one."""
        followed, now = self.samplers.followed(), time.monotonic()
        idle = [
            (tenant.used_at, model)
            for model, tenant in list(self.tenants.items())
            if tenant.is_awake and model not in followed
        ]
        for used, model in sorted(idle):
            if now - used <= IDLE_SECONDS:
                break
            lane = self.queue.lanes.get(model)
            if lane is not None and not lane.waiting:
                self._snapshot_before(lane, self.tenants[model])
                self._set_aside(lane)
                return True
        return False

    def _snapshot_before(self, lane: Lane, tenant: Tenant) -> None:
        seq = lane.next - 1
        if tenant.steps and not tenant.has_gradient and tenant.spoilt is None and seq > (tenant.snapshot or 0):
            with contextlib.suppress(OSError):
                tenant.write_snapshot(seq)
                self.commit(lambda db: _write(db, [], {tenant.id: seq}), flush=True)
                before, tenant.snapshot = tenant.snapshot, seq
                if before is not None:
                    tenant.drop_snapshot(before)

    def _set_aside(self, lane: Lane) -> None:
        """Take a model off its base; its next work begins at its snapshot."""
        tenant = self.tenants[lane.model]
        self.samplers.end_of(tenant.id, "the model was put back to its last good values; sample again")
        tenant.sleep()
        self._rewind(lane, tenant, lane.next)

    def _drop_old(self) -> bool:
        """Remove checkpoints whose time is over, and some promises that are old. Returns whether there may be more of these."""
        drop_expired(self, self._expired)
        return self._retention.look(self)

    def close_model(self, model: str) -> None:
        """A model is over: its lane, its files and what waits of it. In the thread that computes."""
        tenant = self.tenants.pop(model, None)
        if tenant is None:
            return
        left = self.queue.close(model)
        self.refuse_unloaded([own.id for own in left], model)
        self.samplers.end_of(model, "the model was unloaded")
        tenant.sleep()
        self.stores.tidy(tenant.folder)
        log("model closed", model=model, steps=tenant.steps, dropped=len(left))

    def _refuse_closed(self) -> None:
        """End models that are closed: the end of a process came between the promise to unload them and its work."""
        closed = "payload is not null and model in (select id from models where state = 'closed')"
        for own in self.journal.all(f"select distinct model from requests indexed by payloads where {closed}"):
            left = self.journal.all("select id from requests where model = ? and state = 'waiting'", own["model"])
            self.refuse_unloaded([row["id"] for row in left], own["model"])

    def refuse_unloaded(self, requests: Sequence[str], model: str | None = None) -> None:
        """Answer requests whose model is over. Any thread may call it. model: drops what was sent of all its requests."""
        text = json.dumps({"error": "the model was unloaded before this request", "category": "user"}).encode()

        def refuse(db: sqlite3.Connection) -> None:
            for own in requests:
                set_result(db, own, text, True)
            if model is not None:
                drop_payloads(db, model)

        self.commit(refuse)
        self.tell(list(requests))


def request_of(row: sqlite3.Row) -> Request:
    """A request of the journal."""
    return Request(
        row["id"], row["model"], row["seq"], row["kind"], row["payload"] or b"", row["budget"],
        "failed" if row["state"] == "refused" else row["state"],
        bool(row["forward_only"]),
    )  # fmt: skip


def _write(
    db: sqlite3.Connection, results: list[tuple[Lane, Request, Any]], snapshots: Mapping[str, int],
    also: Write | None = None,
) -> None:  # fmt: skip
    if also is not None:
        also(db)
    for _, request, found in results:
        set_result(db, request.id, *result_bytes(found))
    for model, seq in snapshots.items():
        db.execute("update models set snapshot = ? where id = ?", (seq, model))
        drop_payloads(db, model, seq)
