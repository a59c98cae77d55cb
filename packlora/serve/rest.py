"""Listings, and what is done to checkpoints: the calls of the protocol that address things by URL."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from starlette.responses import FileResponse, Response

from packlora.errors import quoted
from packlora.serve.desk import Desk
from packlora.serve.errors import Refused
from packlora.serve.fields import seconds_of
from packlora.serve.journal import insert
from packlora.serve.search import PROJECT, REASONS, found_sessions, iso, status_of, texts_of
from packlora.serve.stores import EXTERNAL, SAMPLER, TRAINING, TinkerPath, new_id

TYPES = {TRAINING: "training", SAMPLER: "sampler", EXTERNAL: "external"}
EXPIRES = 3600.0
"""Seconds for which the address of a file is good."""
FILES = ("adapter_config.json", "adapter_model.safetensors")
OPTIMIZER = {"type": "adamw"}
"""Optimizer of every model, as the protocol names it."""
PAGE = 1000
"""Most things of one listing."""


class Rest:
    """Listings of an owner's sessions, runs and checkpoints."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.journal, self.stores = desk, desk.journal, desk.service.stores
        self._secret = secrets.token_bytes(32)

    def answer(
        self, owner: str, method: str, path: str, body: Mapping[str, Any], query: Mapping[str, str], base: str,
        key: str | None = None,
    ) -> Any:  # fmt: skip
        """Answer a call; None: there is nothing to say. key: by which a retry is known. Raises Refused."""
        match method, path.split("/"):
            case "GET", ["get_server_capabilities"]:
                return self._capabilities()
            case "GET", ["samplers", sampler]:
                row = self.desk.sampler(owner, sampler)
                more = {} if row["path"] is None else {"model_path": row["path"]}
                return {"sampler_id": sampler, "base_model": row["base"], **more}
            case "POST", ["sessions", session, "finish"]:
                return self.desk.finish_session(owner, session, _reason(body.get("reason")))
            case "GET", ["sessions"]:
                rows = self._page("sessions", owner, query)
                return {"sessions": [row["id"] for row in rows]}
            case "POST", ["sessions", "search"]:
                return self._search(owner, body)
            case "GET", ["sessions", session]:
                return self._session(owner, session)
            case "POST", ["weights_info"]:
                return self._weights_info(self.desk.checkpoint(owner, body.get("tinker_path"), "tinker_path"))
            case "POST", ["copy_weights"]:
                return self._copy(owner, body, key)
            case "GET", ["checkpoints"]:
                return {
                    "checkpoints": [_checkpoint(row) for row in self._page("checkpoints", owner, query)],
                    "cursor": self._cursor("checkpoints", owner, query),
                }
            case "GET", ["training_runs"]:
                return {
                    "training_runs": [self._run(row) for row in self._page("models", owner, query)],
                    "cursor": self._cursor("models", owner, query),
                }
            case _, ["training_runs", run, *rest]:
                return self._of_run(owner, method, run, rest, body, base)
        raise Refused(f"{method} {quoted(path)} is not served", 404)

    def _capabilities(self) -> Any:
        hosts = self.desk.service.hosts.items()
        models = [
            {"model_name": name, "max_context_length": host.facts.context, "trainable": True, "sampleable": True}
            for name, host in hosts
        ]
        return {"supported_models": models}

    # --- listings ----------------------------------------------------------------------------------------------------------

    def _page(self, table: str, owner: str, query: Mapping[str, str]) -> list[sqlite3.Row]:
        offset, limit = _place(query)
        return self.journal.all(
            f"select * from {table} where owner = ? order by rowid desc limit ? offset ?", owner, limit, offset
        )

    def _cursor(self, table: str, owner: str, query: Mapping[str, str]) -> Mapping[str, int]:
        offset, limit = _place(query)
        row = self.journal.one(f"select count(*) as n from {table} where owner = ?", owner)
        return {"offset": offset, "limit": limit, "total_count": 0 if row is None else row["n"]}

    def _session(self, owner: str, session: str) -> Any:
        row = self.desk.session(owner, session, ended=True)
        body = json.loads(row["body"])
        models = self.journal.all("select id from models where session = ?", session)
        samplers = self.journal.all("select id from samplers where session = ?", session)
        return {
            "training_run_ids": [own["id"] for own in models], "sampler_ids": [own["id"] for own in samplers],
            "user_metadata": texts_of(body.get("user_metadata")), "display_name": body.get("display_name"),
        }  # fmt: skip

    def _search(self, owner: str, body: Mapping[str, Any]) -> Any:
        rows = self.journal.all("select * from sessions where owner = ? order by rowid desc", owner)
        found, cursor = found_sessions(rows, owner, body)
        return {"sessions": [self._found(owner, row) for row in found], "next_cursor": cursor}

    def _found(self, owner: str, row: sqlite3.Row) -> Any:
        count = self.journal.one(
            "select count(*) as n from checkpoints where model in (select id from models where session = ?)", row["id"]
        )
        body = json.loads(row["body"])
        return {
            "session_id": row["id"], "created_at": iso(row["created"]), "owner": owner, "project_id": PROJECT,
            "checkpoints_count": 0 if count is None else count["n"], "status": status_of(row),
            "user_metadata": texts_of(body.get("user_metadata")), "display_name": body.get("display_name"),
        }  # fmt: skip

    def _run(self, row: sqlite3.Row) -> Any:
        spec = json.loads(row["spec"])
        last = {
            f"last_{'' if kind == TRAINING else 'sampler_'}checkpoint": _checkpoint(found)
            for kind in (TRAINING, SAMPLER)
            if (found := self._newest(row["id"], kind)) is not None
        }
        return {
            "training_run_id": row["id"], "base_model": row["base"], "model_owner": row["owner"], "is_lora": True,
            "lora_rank": spec["adapter"]["r"], "last_request_time": iso(row["used"]), "corrupted": False,
            "user_metadata": texts_of(json.loads(row["metadata"])), **last,
        }  # fmt: skip

    def _newest(self, model: str, kind: str) -> sqlite3.Row | None:
        return self.journal.one(
            "select * from checkpoints where model = ? and kind = ? order by rowid desc limit 1", model, kind
        )

    # --- one run -----------------------------------------------------------------------------------------------------------

    def _of_run(self, owner: str, method: str, run: str, rest: list[str], body: Mapping[str, Any], base: str) -> Any:
        match method, rest:
            case "GET", []:
                return self._run(self._row_of(owner, run))
            case "GET", ["checkpoints"]:
                rows = self.journal.all(
                    "select * from checkpoints where model = ? and owner = ? order by rowid", run, owner
                )
                if not rows:
                    self._row_of(owner, run)
                return {"checkpoints": [_checkpoint(row) for row in rows]}
            case _, ["checkpoints", kind, name, *tail]:
                path = f"tinker://{run}/{kind}/{name}"
                row = self.desk.checkpoint(owner, path)
                if row["owner"] != owner and (method, tail) != ("GET", ["external_weights_urls"]):
                    raise Refused(f"there is no checkpoint {quoted(path)} of yours", 404)
                return self._of_checkpoint(method, row, tail, body, base)
        raise Refused(f"{method} training_runs/{quoted(run)}/{quoted('/'.join(rest))} is not served", 404)

    def _row_of(self, owner: str, run: str) -> sqlite3.Row:
        row = self.journal.one("select * from models where id = ? and owner = ?", run, owner)
        if row is None:
            raise Refused(f"there is no training run {quoted(run)} of yours", 404)
        return row

    def _of_checkpoint(self, method: str, row: sqlite3.Row, tail: list[str], body: Mapping[str, Any], base: str) -> Any:
        path = row["path"]
        match method, tail:
            case "DELETE", []:
                self.stores.remove(self.stores.checkpoint(path))  # files first: what ends in between is asked for again
                with self.journal.write() as db:
                    db.execute("delete from checkpoints where path = ? and created = ?", (path, row["created"]))
            case "POST" | "DELETE", ["publish"]:
                with self.journal.write() as db:
                    db.execute("update checkpoints set public = ? where path = ?", (method == "POST", path))
            case "PUT", ["ttl"]:
                seconds = seconds_of(body)
                until = None if seconds is None else time.time() + seconds
                with self.journal.write() as db:
                    db.execute("update checkpoints set expires = ? where path = ?", (until, path))
            case "GET", ["external_weights_urls"]:
                until = int(time.monotonic() + EXPIRES)  # a clock that is set ends no download
                ticket = f"{self.stores.checkpoint(path).name}.{until}"
                ticket = f"{ticket}.{self._signed(ticket)}"
                urls = {name: f"{base}files/{ticket}/{name}" for name in FILES}
                return {"urls": urls, "expires": iso(time.time() + EXPIRES)}
            case _:
                raise Refused(f"{method} {quoted('/'.join(tail))} of a checkpoint is not served", 404)
        return None

    def _signed(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode(), "sha256").hex()

    def file(self, ticket: str, name: str) -> Response:
        """A file of a checkpoint, whose address was handed out. Raises Refused."""
        text, _, signature = ticket.rpartition(".")
        folder, _, until = text.partition(".")
        if not hmac.compare_digest(signature.encode(), self._signed(text).encode()) or name not in FILES:
            raise Refused("there is no such file, or its address is of an earlier start of the service", 404)
        file = self.stores.state / "checkpoints" / folder / name
        if int(until) < time.monotonic() or not file.exists():
            raise Refused("the address has expired, or the checkpoint was deleted", 410)
        return FileResponse(file, media_type="application/octet-stream")

    def _weights_info(self, row: sqlite3.Row) -> Any:
        spec = json.loads(row["spec"])
        return {
            "base_model": row["base"], "is_lora": True, "lora_rank": spec["adapter"]["r"], "optimizer_config": OPTIMIZER,
            **spec["parts"],
        }  # fmt: skip

    def _copy(self, owner: str, body: Mapping[str, Any], key: str | None) -> Any:
        """A copy of a checkpoint under a run of its own, which a retry finds by its name."""
        seconds = seconds_of(body)
        row = self.desk.checkpoint(owner, body.get("source_path"), "source_path")
        own = new_id() if key is None else hashlib.sha256(f"{owner}:{key}:{row['path']}".encode()).hexdigest()[:24]
        path = str(TinkerPath(f"{self.desk.engine}-{own}", row["kind"], row["name"]))
        with self.desk.copying:
            if self.journal.one("select path from checkpoints where path = ?", path) is None:
                self._make_copy(owner, row, path, seconds)
        return {"tinker_path": path}

    def _make_copy(self, owner: str, row: sqlite3.Row, path: str, seconds: int | None) -> None:
        self.desk.check_checkpoints(owner)
        self.stores.copy(self.stores.checkpoint(row["path"]), self.stores.checkpoint(path))
        copied = dict(row) | {
            "path": path, "owner": owner, "model": TinkerPath.of(path).model, "created": time.time(), "public": 0,
            "expires": None if seconds is None else time.time() + seconds,
        }  # fmt: skip
        with self.journal.write() as db:
            insert(db, "checkpoints", tuple(copied.values()))


def _place(query: Mapping[str, str]) -> tuple[int, int]:
    try:
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", 20))
    except ValueError:
        raise Refused("offset, limit: they are no whole numbers") from None
    if not (0 <= offset < 2**62 and 0 <= limit <= PAGE):
        raise Refused(f"offset: from 0 on; limit: 0 to {PAGE}")
    return offset, limit


def _checkpoint(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{row['kind']}/{row['name']}", "checkpoint_type": TYPES[row["kind"]], "time": iso(row["created"]),
        "tinker_path": row["path"], "size_bytes": row["bytes"], "public": bool(row["public"]),
        "user_metadata": None if row["metadata"] is None else texts_of(json.loads(row["metadata"])),
        "expires_at": None if row["expires"] is None else iso(row["expires"]),
    }  # fmt: skip


def _reason(given: Any) -> str:
    """Reason for which a session ends. Raises Refused."""
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind is not None and kind not in REASONS:
        raise Refused(f"reason.type: {quoted(kind)} is none of {', '.join(REASONS)}")
    return kind or "finished"
