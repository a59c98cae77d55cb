"""The journal and the figures of rank 0, as another rank uses them, and how rank 0 answers."""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from packlora.errors import ProcessError
from packlora.serve.core import Core
from packlora.serve.figures import Figures
from packlora.serve.journal import Journal
from packlora.serve.ranks.channel import Channel
from packlora.serve.stores import Write

LOST = "rank 0 has ended, and with it the journal"
ANSWERS = ("rows", "written", "trouble")
"""Kinds of messages by which rank 0 answers."""


class Recorder:
    """Statements of a transaction, in the place of its database."""

    def __init__(self) -> None:
        self.statements: list[tuple[str, Sequence[Any]]] = []

    @staticmethod
    def of(write: Write) -> Sequence[tuple[str, Sequence[Any]]]:
        """Statements of a write."""
        recorder = Recorder()
        write(cast(sqlite3.Connection, recorder))
        return recorder.statements

    def execute(self, statement: str, values: Sequence[Any] = ()) -> None:
        self.statements.append((statement, values))


class RemoteJournal(Journal):
    """The journal of rank 0. Any thread but the one that reads the channel may call it.

    Errors of the database are raised as the journal raises them. ProcessError: rank 0 has ended.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._lock = channel, threading.RLock()
        self._answers: queue.SimpleQueue[tuple[str, Mapping[str, Any]] | None] = queue.SimpleQueue()

    def answer(self, kind: str, values: Mapping[str, Any]) -> None:
        """Rank 0 has answered."""
        self._answers.put((kind, values))

    def lose(self) -> None:
        """Rank 0 has ended."""
        self._answers.put(None)

    def _ask(self, kind: str, **values: Any) -> Mapping[str, Any]:
        with self._lock:
            self._channel.send(kind, **values)
            found = self._answers.get()
            if found is None:
                self._answers.put(None)
                raise ProcessError(LOST)
        if found[0] == "trouble":
            error = sqlite3.OperationalError if found[1]["operational"] else sqlite3.DatabaseError
            raise error(found[1]["text"])
        return found[1]

    def close(self) -> None:
        """See Journal; it is rank 0's to close."""

    @contextmanager
    def write(self, flush: bool = True) -> Iterator[sqlite3.Connection]:
        """See Journal. The block only writes."""
        recorder = Recorder()
        yield cast(sqlite3.Connection, recorder)
        self._ask("write", statements=recorder.statements, flush=flush)

    def all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """See Journal. Rows are read by names of columns."""
        return cast(list[sqlite3.Row], self._ask("read", query=query, values=values)["rows"])

    def one(self, query: str, *values: Any) -> sqlite3.Row | None:
        """See Journal."""
        return next(iter(self.all(query, *values)), None)


def answered(core: Core, kind: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Answer of rank 0 to a message of RemoteJournal: kind and values."""
    try:
        if kind == "read":
            return "rows", {"rows": [dict(row) for row in core.journal.all(values["query"], *values["values"])]}
        with core.journal.write(flush=values["flush"]) as db:
            execute(db, values["statements"])
        core.trouble = None
        return "written", {}
    except sqlite3.Error as error:
        is_operational = isinstance(error, sqlite3.OperationalError)
        if is_operational and kind == "write":
            core.trouble = f"the journal cannot be written: {error}"
        return "trouble", {"operational": is_operational, "text": str(error)}


def execute(db: sqlite3.Connection, statements: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """Carry out the statements of a transaction."""
    for statement, values in statements:
        db.execute(statement, values)


class RemoteFigures(Figures):
    """Figures that rank 0 counts. drawn: sampled tokens that it was not told of."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel, self.drawn = channel, 0

    def slot(self, by_owner: Mapping[str, int], models: int, steps: int) -> None:
        """See Figures."""
        self._channel.send("slot", by_owner=by_owner, models=models, steps=steps)

    def drew(self, tokens: int) -> None:
        """See Figures."""
        self.drawn += tokens
