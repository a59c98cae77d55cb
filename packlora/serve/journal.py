"""Promises of the service, on disk: sessions, models, requests with their results, samplers and checkpoints.

An embedded database (SQLite, WAL). A promise is committed, and flushed to the disk, before it is answered. Results are
committed before anybody sees them; but for those that name files (snapshots, what was saved) they are not flushed, since a
service that starts again computes what it lost anew.

    models      one row a model; `snapshot` is the number of the request up to which its snapshot holds
    requests    one row a promise; key is what makes a retry the same request: model and seq_id, session and number; created is
                when it was given, and once it has a result, when that came

Every write is one transaction, so a process that is killed at any moment leaves the state before or after it. Promises that
are given at the same moment share one, for a flush takes as long as a disk takes (`Journal.add`).
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packlora.errors import InputError

VERSION = 1
TABLES = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists sessions (
    id text primary key, owner text not null, key text unique, created real not null, ended text, body text not null);
create table if not exists models (
    id text primary key, owner text not null, session text not null, base text not null, created real not null,
    used real not null, spec text not null, metadata text not null, start text, snapshot integer,
    state text not null default 'open');
create table if not exists requests (
    id text primary key, owner text not null, key text not null unique, model text, seq integer, kind text not null,
    digest blob not null, payload blob, state text not null, result blob, created real not null, budget integer not null,
    forward_only integer not null);
create index if not exists requests_of_models on requests (model, seq);
create index if not exists requests_by_state on requests (state, created);
create index if not exists payloads on requests (model, seq) where payload is not null;
create table if not exists samplers (
    id text primary key, owner text not null, session text not null, base text not null, model text, path text, folder text,
    kind text not null, created real not null, state text not null default 'open');
create table if not exists checkpoints (
    path text primary key, owner text not null, model text not null, kind text not null, name text not null, base text not null,
    created real not null, bytes integer not null, public integer not null default 0, expires real, metadata text,
    spec text not null);
create index if not exists open_sessions on sessions (owner) where ended is null;
create index if not exists open_models on models (owner) where state = 'open';
create index if not exists models_of_sessions on models (session);
create index if not exists open_samplers on samplers (owner) where state = 'open';
create index if not exists samplers_of_sessions on samplers (session);
create index if not exists checkpoints_of_owners on checkpoints (owner, name);
create index if not exists checkpoints_of_models on checkpoints (model);
create index if not exists checkpoints_that_expire on checkpoints (expires) where expires is not null;
"""
"""What a request asks for is found by an index: most rows are of what is over, and stay."""


@dataclass(slots=True, eq=False)
class Entry:
    """A write that shares its transaction. error: what it has raised, or the transaction."""

    write: Callable[[sqlite3.Connection], None]
    is_over: bool = False
    error: BaseException | None = None

    def carry_out(self, db: sqlite3.Connection) -> None:
        """Write; an error leaves nothing of it. Raises sqlite3.Error where it has ended the transaction."""
        db.execute("savepoint entry")
        try:
            self.write(db)
        except Exception as error:
            if not db.in_transaction:
                raise
            self.error = error
            db.execute("rollback to entry")
        db.execute("release entry")


class Journal:
    """The database of a state folder. Any thread may call it."""

    def __init__(self, file: Path) -> None:
        """Raises InputError where the file is of another version, or none of ours."""
        self._file, self._lock = file, threading.RLock()
        self._entries = deque[Entry]()
        """Writes that wait for a transaction."""
        self._readers: list[sqlite3.Connection] = []
        """Connections that nobody reads by now."""
        self._db = self._connection()
        try:
            self._check_version(file)
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = full")
            self._db.executescript(TABLES)
            self.set_fact("version", str(VERSION))
        except sqlite3.OperationalError as error:
            self._db.close()
            raise InputError(f"{file} cannot be written: {error}") from None
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise InputError(f"{file} is no journal of packlora serve: {error}; give another --state") from None

    def _connection(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._file, check_same_thread=False, isolation_level=None, timeout=30)
        db.row_factory = sqlite3.Row
        return db

    def _check_version(self, file: Path) -> None:
        """Raises InputError before anything is written into what is of another version, or none of ours."""
        tables = {row["name"] for row in self._db.execute("select name from sqlite_master where type = 'table'")}
        if not tables:
            return
        found = self.fact("version") if "facts" in tables else None
        if found != str(VERSION):
            self._db.close()
            raise InputError(
                f"{file} is of version {found} of the journal, and this packlora has {VERSION}; give another --state, or "
                "the packlora that made it"
            )

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()
        while self._readers:
            self._readers.pop().close()

    @contextmanager
    def write(self, flush: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction. flush: to the disk, before it returns. An error in the block leaves nothing of it."""
        with self._lock:
            self._db.execute(f"pragma synchronous = {'full' if flush else 'normal'}")
            self._db.execute("begin immediate")
            try:
                yield self._db
                self.commits()
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have ended it
                    self._db.execute("rollback")
                raise

    def add(self, write: Callable[[sqlite3.Connection], None]) -> None:
        """Write, and flush to the disk before it returns, in one transaction with what other threads add meanwhile.

        Args:
            write: runs in the thread of one of them. What it raises is raised here, and nothing of it is left.
        """
        own = Entry(write)
        self._entries.append(own)
        with self._lock:
            if not own.is_over:
                self._write_entries()
        if not own.is_over:
            raise sqlite3.OperationalError("the thread that wrote for several was ended")
        if own.error is not None:
            raise own.error

    def _write_entries(self) -> None:
        entries = [self._entries.popleft() for _ in range(len(self._entries))]
        try:
            with self.write() as db:
                for entry in entries:
                    entry.carry_out(db)
        except BaseException as error:
            for entry in entries:
                entry.error = error
        for entry in entries:
            entry.is_over = True

    def commits(self) -> None:
        """A transaction is about to be committed. Tests end the process here."""

    def all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Rows of a query; none for a value that no column can have, as a client may send one for an id."""
        with self._lock:
            return self._db.execute(query, values).fetchall() if all(map(_can_be, values)) else []

    def one(self, query: str, *values: Any) -> sqlite3.Row | None:
        """The first row of a query; see `all`."""
        with self._lock:
            found: sqlite3.Row | None = (
                self._db.execute(query, values).fetchone() if all(map(_can_be, values)) else None
            )
            return found

    def committed(self, query: str, *values: Any) -> sqlite3.Row | None:
        """The first row of a query, see `all`, as it was committed last. It waits for no write."""
        if not all(map(_can_be, values)):
            return None
        try:
            reader = self._readers.pop()
        except IndexError:
            reader = self._connection()
            reader.execute("pragma query_only = on")
        try:
            found: sqlite3.Row | None = reader.execute(query, values).fetchone()
        finally:
            self._readers.append(reader)
        return found

    # --- facts -------------------------------------------------------------------------------------------------------------

    def fact(self, name: str) -> str | None:
        """A named text of the state folder."""
        row = self.one("select value from facts where name = ?", name)
        return None if row is None else str(row["value"])

    def set_fact(self, name: str, value: str) -> None:
        with self.write() as db:
            db.execute("insert or replace into facts values (?, ?)", (name, value))


def _can_be(value: Any) -> bool:
    """Whether a column can have the value."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None or isinstance(value, str | bytes | float)


def insert(db: sqlite3.Connection, table: str, row: Sequence[Any]) -> None:
    """Write a row, in the place of one with the same key."""
    db.execute(f"insert or replace into {table} values ({','.join('?' * len(row))})", tuple(row))


def add_request(
    db: sqlite3.Connection, id: str, owner: str, key: str, kind: str, digest: bytes, payload: bytes | None,
    model: str | None = None, seq: int | None = None, state: str = "waiting", result: bytes | None = None, budget: int = 0,
    forward_only: bool = False,
) -> None:  # fmt: skip
    """Write a promise. budget: tokens of a part of a microbatch, by which its rows are cut."""
    db.execute(
        "insert into requests values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (id, owner, key, model, seq, kind, digest, payload, state, result, time.time(), budget, forward_only),
    )


def set_result(db: sqlite3.Connection, id: str, result: bytes, failed: bool = False) -> None:
    """Write the result of a promise. What was sent is dropped where no restart does it again: of samples, of a forward alone,
    and where it failed."""
    over = "? or kind = 'sample' or forward_only"
    change = f"state = ?, result = ?, created = ?, payload = case when {over} then null else payload end"
    values = ("failed" if failed else "done", result, time.time(), failed, id)
    db.execute(f"update requests set {change} where id = ?", values)


def drop_payloads(db: sqlite3.Connection, model: str, seq: int = 2**63 - 1) -> None:
    """Drop what was sent of a model's requests up to this number: no restart does them again."""
    change = "update requests indexed by payloads set payload = null where payload is not null"
    db.execute(f"{change} and model = ? and seq <= ?", (model, seq))


def as_json(value: Any) -> str:
    """Canonical JSON: equal values have equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
