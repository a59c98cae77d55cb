"""Page of a run that may still train, or of several, as packlora watch serves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packlora.report import sections
from packlora.report.page import assembled, parts_of
from packlora.report.run_files import FollowedRun
from packlora.report.series import PageData

REMADE = 2.0
"""Seconds between two makings of what stands still on a page."""


class LivePage:
    """Page of a run that may still train, or of several: the whole page, and its numbers and parts where they have changed.

    Drawings and tables are made again at most every REMADE seconds, and so seldom that it takes a fiftieth of the time.
    """

    def __init__(self, *folders: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._data: Any = PageData(FollowedRun(folders[0]))
        self._sections: Callable[[Any], dict[str, str]] = sections.parts
        if len(folders) > 1:
            from packlora.report import compare

            self._data, self._sections = compare.SeveralData(folders), compare.parts
        self._clock = clock
        self._parts: dict[str, str] = {}
        self._is_stale, self._next = True, 0.0

    def html(self) -> str:
        """The whole page."""
        while self._data.follow():
            self._is_stale = True
        self._make()
        return assembled(self._data, self._parts, is_live=True)

    def news(self, look: int) -> dict[str, Any]:
        """Content of a page; nothing but the number of the look where it has that of the last one already."""
        self._is_stale |= self._data.follow()
        if self._is_stale and self._clock() >= self._next:
            self._make()
        return {"look": look} if look == self._data.look else {**self._data.numbers(), "parts": self._parts}

    def _make(self) -> None:
        began, parts = self._clock(), parts_of(self._data.files, self._sections)
        self._data.look += parts != self._parts
        self._parts, self._is_stale = parts, False
        now = self._clock()
        self._next = now + max(REMADE, 50 * (now - began))
