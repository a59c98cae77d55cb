"""Databases that wait for no disk. SQLite flushes by itself: tests of the service did so ten thousand times, up to minutes on a
slow disk. What a killed process has committed is there all the same."""

from __future__ import annotations

import sqlite3
from typing import Any

OFF = "pragma synchronous = off"


class Unflushed(sqlite3.Connection):
    """A connection on which no pragma sets flushing."""

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement.startswith("pragma "):  # every connection begins with one; some write at once
            super().execute(OFF)
        return super().execute(OFF if statement.startswith("pragma synchronous") else statement, *values)
