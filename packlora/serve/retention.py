"""Removal of promises that nobody asks for any more: tenants with small batches are given hundreds in a second.

Those stay which a restart would need, or which make a session or a model. So the ones that go lie before the snapshot of their
model, or are of a model that is over, or are of samples.
"""

from __future__ import annotations

import sqlite3
import time

from packlora.serve.core import Core
from packlora.serve.saves import GRACE

KEPT = 86400.0
"""Seconds for which promises and their results are kept at least."""
MOST = 500
"""Promises that go at a look, in which nobody else writes: 10 to 40 ms of a processor, the more the larger the journal is. A
service that works looks once a second, one that does not without a pause."""
LOOKED = 5000
"""Promises that are looked at in a look: those that stay may be many."""
STATES = ("done", "failed", "refused")
OLD = """
select own.rowid, own.created from requests own left join models on models.id = own.model
where own.state = ? and own.created >= ? and own.created < ?
and (own.kind = 'sample' or models.state = 'closed' or own.seq <= models.snapshot)
order by own.created limit ?
"""
END = "select created from requests where state = ? and created >= ? and created < ? order by created limit 1 offset ?"


class Retention:
    """Looks for what is old. A clock that jumps ahead and back takes nothing away: what goes was old GRACE seconds before."""

    def __init__(self) -> None:
        self._wait()

    def _wait(self) -> None:
        """Begin anew with what is old by now."""
        self._began, self._bound = time.monotonic(), time.time() - KEPT
        self._reached = dict.fromkeys(STATES, 0.0)
        """How far promises were looked at, by state and age: what stays is not looked at again and again."""

    def look(self, core: Core) -> bool:
        """Remove some of what is old, if it is time. Returns whether there may be more."""
        if time.monotonic() - self._began < GRACE:
            return False
        bound = min(self._bound, time.time() - KEPT)
        for state, reached in self._reached.items():
            last = core.journal.one(END, state, reached, bound, LOOKED)
            end = bound if last is None else last["created"]
            rows = core.journal.all(OLD, state, reached, end, MOST)
            if rows:
                try:
                    with core.journal.write(flush=False) as db:
                        db.executemany("delete from requests where rowid = ?", [(row["rowid"],) for row in rows])
                except sqlite3.OperationalError:  # the disk is full, which those who have to write tell of
                    return False
            if rows or (last is not None and end > reached):
                self._reached[state] = end if len(rows) < MOST else rows[-1]["created"]
                return True
        self._wait()
        return False
