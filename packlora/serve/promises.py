"""Sessions of clients and the promises that they are given, each written down before it is answered."""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from packlora.errors import quoted
from packlora.serve.core import result_bytes
from packlora.serve.errors import Refused
from packlora.serve.fields import metadata_of, text_of
from packlora.serve.journal import add_request, as_json, insert, set_result
from packlora.serve.logs import log
from packlora.serve.service import Service
from packlora.serve.stores import new_id

WAIT = 2.0
"""Seconds after which a client that is refused for too much work tries again."""
SILENCE = 3600.0
"""Seconds without a heartbeat after which a session may be ended for a new one, or a new model, of its owner."""
FIELDS = {"make": "model_seq_id", "sampler": "sampling_session_seq_id"}
"""Fields that number requests, by the kinds of keys, where it is not seq_id."""
REFUSED = "refused"
"""State of a number whose request was refused: later ones do not wait for it."""


class Promises:
    """Sessions and promises of a service."""

    def __init__(self, service: Service) -> None:
        self.service, self.journal, self.limits = service, service.journal, service.limits
        name = self.journal.fact("engine")
        if name is None:
            name = secrets.token_hex(3)
            self.journal.set_fact("engine", name)
        self.engine = name
        """What every id begins with."""
        self._heard: dict[str, float] = {}
        self._began = time.monotonic()
        self.copying = threading.Lock()
        """Is held while a checkpoint is copied for a promise: the same request at the same moment writes no folder twice."""

    def _id(self) -> str:
        return f"{self.engine}-{new_id()}"

    # --- sessions ----------------------------------------------------------------------------------------------------------

    def create_session(self, owner: str, body: Mapping[str, Any], key: str | None) -> str:
        """Open a session. key: by which a retry is known."""
        metadata_of(body, self.limits.metadata_bytes)
        for field in ("display_name", "project_id"):
            if not isinstance(body.get(field), str | None):
                raise Refused(f"{field}: {quoted(body[field])} is no text")
        if (size := len(as_json(dict(body)))) > 2 * self.limits.metadata_bytes:
            raise Refused(f"the body has {size} bytes, above twice the limit metadata_bytes: leave tags or names out")
        known = None if key is None else f"{owner}:{key}"
        if (found := self._session_of(known)) is not None:
            return found
        self._make_room(owner)
        session = self._id()
        row = (session, owner, known, time.time(), None, as_json(dict(body)))
        try:
            with self.journal.write() as db:
                db.execute("insert into sessions values (?, ?, ?, ?, ?, ?)", row)
        except sqlite3.IntegrityError:  # the same request at the same moment
            if (found := self._session_of(known)) is None:
                raise
            return found
        self._heard[session] = time.monotonic()
        log("session opened", session=session, owner=owner[:8])
        return session

    def _session_of(self, key: str | None) -> str | None:
        row = self.journal.one("select id from sessions where key = ?", key)
        return None if row is None else str(row["id"])

    def _make_room(self, owner: str) -> None:
        """End the oldest session of an owner that was silent for long, where there are too many. Raises Refused."""
        rows = self.journal.all("select id from sessions where owner = ? and ended is null order by rowid", owner)
        if len(rows) >= self.limits.sessions and not self._end_silent(owner, [row["id"] for row in rows]):
            raise Refused(f"{len(rows)} open sessions, the limit sessions; close some", 429, 60)

    def _end_silent(self, owner: str, sessions: Iterable[str]) -> bool:
        """End the first of some sessions that was silent for long. Returns whether there was one."""
        now = time.monotonic()
        for session in sessions:
            if now - self._heard.get(session, self._began) > SILENCE:
                self.finish_session(owner, session, "silent")
                return True
        return False

    def session(self, owner: str, session: Any, ended: bool = False) -> sqlite3.Row:
        """A session of an owner. ended: whether one that has ended is wanted too. Raises Refused."""
        row = self.journal.one("select * from sessions where id = ? and owner = ?", text_of(session), owner)
        if row is None:
            raise Refused(f"session_id: there is no session {quoted(session)} of yours", 404)
        if row["ended"] is None:
            self._heard[session] = time.monotonic()
        elif not ended:
            raise Refused(f"session_id: the session {session} has ended ({row['ended']}); open another one", 410)
        return row

    def _unless_ended(self, session: str, table: str, row: Sequence[Any]) -> Callable[[sqlite3.Connection], None]:
        """A write of a row of a session, which raises Refused where the session has ended since it was looked at."""

        def make(db: sqlite3.Connection) -> None:
            if db.execute("select ended from sessions where id = ?", (session,)).fetchone()["ended"] is not None:
                raise Refused(f"session_id: the session {session} has ended; open another one", 410)
            insert(db, table, row)

        return make

    def finish_session(self, owner: str, session: str, reason: str) -> None:
        """End a session and unload its models; its checkpoints stay."""
        row = self.session(owner, session, ended=True)
        if row["ended"] is not None:
            return
        with self.journal.write() as db:
            models = self.journal.all("select id from models where session = ? and state = 'open'", session)
            db.execute("update sessions set ended = ? where id = ?", (reason, session))
            db.execute("update models set state = 'closed' where session = ?", (session,))
            db.execute("update samplers set state = 'closed' where session = ?", (session,))
        for row in self.journal.all("select folder from samplers where session = ? and folder is not null", session):
            self.service.stores.tidy(self.service.stores.sampler_folder(row["folder"]))
            self.service.samplers.forget(row["folder"])
        self._heard.pop(session, None)
        log("session ended", session=session, reason=reason, models=len(models))
        for model in models:
            self.service.queue.call(partial(self.service.close_model, model["id"]))

    # --- promises ----------------------------------------------------------------------------------------------------------

    def _known(self, owner: str, key: str, digest: bytes) -> str | None:
        """The promise that was given for a number, if any. Raises Refused where it was given for something else."""
        answer = f"case when state = '{REFUSED}' then result end as result"
        row = self.journal.committed(f"select id, owner, digest, state, {answer} from requests where key = ?", key)
        if row is None:
            return None
        if row["owner"] != owner:
            raise Refused("there is no such model or session of yours", 404)
        if row["digest"] != digest:
            kind, number = key.partition(":")[0], key.rpartition(":")[2]
            field = FIELDS.get(kind, "seq_id")
            raise Refused(f"{field}: number {number} was used for another request; count on from the last one")
        if row["state"] == REFUSED:
            found = json.loads(row["result"])
            raise Refused(found["error"], found.get("status", 400))
        return str(row["id"])

    def promise(
        self, owner: str, key: str, kind: str, digest: bytes, payload: bytes, result: Any = None,
        make: Callable[[sqlite3.Connection], None] | None = None, **more: Any,
    ) -> tuple[str, bool]:  # fmt: skip
        """Write a promise, unless it was given already.

        Args:
            result: where it is known at once.
            make: what is to be written with it.

        Returns:
            The promise, and whether it is new.
        """
        promise = self._id()

        def write(db: sqlite3.Connection) -> None:
            add_request(db, promise, owner, key, kind, digest, payload, **more)
            if make is not None:
                make(db)
            if result is not None:
                set_result(db, promise, *result_bytes(result))

        try:
            self.journal.add(write)
        except sqlite3.IntegrityError:
            if (known := self._known(owner, key, digest)) is None:
                raise
            return known, False
        return promise, True

    def result(self, owner: str, promise: Any) -> sqlite3.Row | None:
        """The result of a promise; None: there is none yet. Raises Refused where it is unknown."""
        query = "select kind, state, result from requests where id = ? and owner = ?"
        row = self.journal.committed(query, text_of(promise), owner)
        if row is None or row["state"] == REFUSED:
            raise Refused(
                f"request_id: there is no promise {quoted(promise)} of yours; results are kept for a day", 410
            )
        return None if row["state"] == "waiting" else row


def digest_of(body: Mapping[str, Any]) -> bytes:
    """Digest that tells one request from another under the same number."""
    return hashlib.sha256(as_json(dict(body)).encode()).digest()
