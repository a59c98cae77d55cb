"""Saves and loads of models, in the thread that computes."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from packlora.errors import quoted
from packlora.serve.core import Core
from packlora.serve.errors import Failed
from packlora.serve.journal import as_json, insert
from packlora.serve.logs import log
from packlora.serve.queue import Request
from packlora.serve.stores import EXTERNAL, KINDS, TRAINING, TinkerPath, Write
from packlora.serve.tenant import Tenant


def carry_out(core: Core, tenant: Tenant, request: Request) -> tuple[Any, Write]:
    """Do what a request of a model asks for that is neither rows nor a step. Raises Failed.

    Returns:
        Its result, and what is to be written with it.
    """
    body = json.loads(request.payload)
    if request.kind == "load_weights":
        return _load(core, tenant, body), lambda db: None
    if request.kind == "save_weights_for_sampler" and body.get("path") is None:
        return _save_for_session(core, tenant, request.id, body)
    return _save(core, tenant, request, body)


def _save(core: Core, tenant: Tenant, request: Request, body: Mapping[str, Any]) -> tuple[Any, Write]:
    kind = KINDS[request.kind]
    name = body.get("path") or f"auto-{request.seq}"
    path = str(TinkerPath(tenant.id, kind, name))
    if not body.get("overwrite") and core.journal.one("select 1 from checkpoints where path = ?", path):
        raise Failed(f"path: there is a checkpoint {name!r} already; give another name, or overwrite")
    size = tenant.save(core.stores.checkpoint(path), tenant.host.facts.name, kind == TRAINING)
    ttl, now = body.get("ttl_seconds"), time.time()
    row = (
        path, tenant.owner, tenant.id, kind, name, tenant.host.facts.name, now, size, 0, None if ttl is None else now + ttl,
        as_json(body.get("user_metadata")), as_json(tenant.wanted.as_dict()),
    )  # fmt: skip
    log("checkpoint saved", path=path, bytes=size, steps=tenant.steps)
    result = {"path": path, "type": request.kind} | ({"size_bytes": size} if kind == EXTERNAL else {})
    return result, lambda db: insert(db, "checkpoints", row)


def _save_for_session(core: Core, tenant: Tenant, promise: str, body: Mapping[str, Any]) -> tuple[Any, Write]:
    """A sampling session of a model's present weights, or one that follows them."""
    sampler, follows = f"{tenant.session}:sampler:{promise}", body.get("kind") == "inflight"
    folder = None
    if not follows:
        tenant.save(core.stores.sampler(sampler), tenant.host.facts.name, optimizer=False)
        folder = core.stores.sampler(sampler).name
    row = (
        sampler, tenant.owner, tenant.session, tenant.host.facts.name, tenant.id if follows else None, None, folder,
        "inflight" if follows else "snapshot", time.time(), "open",
    )  # fmt: skip
    result = {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}

    def write(db: sqlite3.Connection) -> None:
        insert(db, "samplers", row)
        ended = "(select ended from sessions where id = ?) is not null"  # while it was saved
        db.execute(f"update samplers set state = 'closed' where id = ? and {ended}", (sampler, tenant.session))

    return result, write


GRACE = 600.0
"""Seconds of a monotonic clock for which a checkpoint's time must be over: one that jumps ahead and back takes none away."""


def drop_expired(core: Core, over: dict[str, float]) -> None:
    """Remove checkpoints whose time is over, files first: what ends in between is done at the next look.

    Args:
        over: since when they are, by path, seconds of a monotonic clock; the caller keeps it from look to look.
    """
    now, clock = time.time(), time.monotonic()
    rows = core.journal.all("select path, expires from checkpoints where expires < ?", now)
    for path in over.keys() - {row["path"] for row in rows}:
        del over[path]
    for row in rows:
        if clock - over.setdefault(row["path"], clock) < GRACE:
            continue
        folder = core.stores.checkpoint(row["path"])
        if folder.is_dir() and folder.stat().st_mtime > row["expires"]:  # another rank writes it anew, and then its row
            continue
        if not core.stores.tidy(folder):
            over[row["path"]] = clock  # it is tried again as long after
            continue
        core.commit(lambda db, path=row["path"]: _drop(db, path, now))  # type: ignore[misc]
        log("checkpoint expired", path=row["path"])


def _drop(db: sqlite3.Connection, path: str, now: float) -> None:
    db.execute("delete from checkpoints where path = ? and expires < ?", (path, now))


def _load(core: Core, tenant: Tenant, body: Mapping[str, Any]) -> Any:
    query = "select * from checkpoints where path = ? and (owner = ? or public)"
    row = core.journal.one(query, body["path"], tenant.owner)
    if row is None or not (folder := core.stores.checkpoint(row["path"])).is_dir():
        raise Failed(f"path: there is no checkpoint {quoted(body['path'])} of yours")
    tenant.wake()
    tenant.load(folder, bool(body.get("optimizer")))
    return {"path": body["path"], "type": "load_weights"}
