"""Writes of a journal that share a transaction, and who is told of what was written."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from packlora.serve.app import wake
from packlora.serve.core import Core
from packlora.serve.journal import Journal, insert

THREADS = 12


def fact(name: str) -> Callable[[sqlite3.Connection], None]:
    return lambda db: insert(db, "facts", (name, "")) if name != "none" else None


def added(journal: Journal, writes: list[Callable[[sqlite3.Connection], None]]) -> list[BaseException | None]:
    """Add each write in a thread of its own while another one holds the journal. Returns what each thread has raised."""
    raised: list[BaseException | None] = [None] * len(writes)

    def run(at: int) -> None:
        try:
            journal.add(writes[at])
        except BaseException as error:
            raised[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(writes))]
    with journal._lock:
        for thread in threads:
            thread.start()
        until = time.monotonic() + 60
        while len(journal._entries) < len(writes):
            assert time.monotonic() < until
            time.sleep(0.001)
    for thread in threads:
        thread.join(60)
    return raised


def names(journal: Journal) -> set[str]:
    return {row["name"] for row in journal.all("select name from facts")}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.db")


def test_writes_that_wait_for_one_another_share_a_flush(journal: Journal) -> None:
    with mock.patch.object(journal, "commits") as commits:
        assert added(journal, [fact(f"{at}") for at in range(THREADS)]) == [None] * THREADS
        assert commits.call_count == 1
        journal.add(fact("alone"))
        assert commits.call_count == 2
    assert names(journal) == {"version", "alone", *(f"{at}" for at in range(THREADS))}
    assert journal.committed("select name from facts where name = 'alone'") is not None


def test_one_that_fails_leaves_nothing_of_itself_and_the_others_whole(journal: Journal) -> None:
    def refused(db: sqlite3.Connection) -> None:
        fact("half")(db)
        raise ValueError("refused")

    twice = [lambda db: db.execute("insert into facts values ('same', '')") for _ in range(2)]
    raised = added(journal, [fact("0"), refused, *twice, fact("1")])
    assert [type(error) for error in raised if error is not None] == [ValueError, sqlite3.IntegrityError]
    assert isinstance(raised[1], ValueError) and names(journal) == {"version", "0", "1", "same"}


def test_all_are_told_where_the_transaction_fails_and_nothing_of_them_is_there(journal: Journal) -> None:
    failure = sqlite3.OperationalError("database or disk is full")
    with mock.patch.object(journal, "commits", side_effect=failure):
        assert added(journal, [fact(f"{at}") for at in range(3)]) == [failure] * 3

    def ends(db: sqlite3.Connection) -> None:  # as a full disk does
        db.execute("rollback")
        raise failure

    assert added(journal, [fact("a"), ends, fact("b")]) == [failure] * 3
    assert names(journal) == {"version"}
    journal.add(fact("after"))
    assert names(journal) == {"version", "after"}


def test_a_write_that_another_thread_has_taken_and_not_done_is_no_success(journal: Journal) -> None:
    taken = mock.patch.object(journal, "_write_entries", journal._entries.clear)
    with taken, pytest.raises(sqlite3.OperationalError, match="was ended"):
        journal.add(fact("lost"))
    assert names(journal) == {"version"}


def test_readers_of_what_is_committed_wait_for_no_write_and_are_as_many_as_read_at_once(journal: Journal) -> None:
    found = list[object]()

    def read() -> None:
        found.append(journal.committed("select value from facts where name = 'version'"))

    with journal.write() as db:
        fact("later")(db)
        for _ in range(5):
            thread = threading.Thread(target=read)
            thread.start()
            thread.join(60)
        assert journal.committed("select 1 from facts where name = 'later'") is None
    assert len(found) == 5 and None not in found and len(journal._readers) == 1
    journal.close()
    assert not journal._readers


def test_a_loop_that_is_closed_ends_no_thread_that_tells(tmp_path: Path) -> None:
    """The thread that computes may tell of a result while the server's loop ends."""
    core, loop = Core({}, tmp_path), asyncio.new_event_loop()
    for _ in range(2):
        core.listen("promise", lambda: wake(loop, asyncio.Event()))
    loop.close()
    core.tell(["promise"])
    core.tell_all()
    core.journal.close()


def test_a_signal_lets_everybody_look_whatever_its_thread_was_at(tmp_path: Path) -> None:
    """A handler runs between any two lines of its thread, which may be about to listen."""
    core, told = Core({}, tmp_path), list[str]()

    class Interrupted(str):
        def __hash__(self) -> int:
            core.tell_all()  # as a handler does, where the thread is within the lock
            return super().__hash__()

    def listen() -> None:
        core.listen("before", lambda: told.append("before"))
        core.listen(Interrupted("promise"), lambda: told.append("promise"))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and told == ["before"]
    core.tell(["promise"])
    assert told == ["before", "promise"]
    core.journal.close()
