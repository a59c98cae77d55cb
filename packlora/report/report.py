"""report.html in a run's output folder, written at any moment of a run or after it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from packlora.events import Event, RunBegan, RunEnded, SavePointReached
from packlora.files import write_text
from packlora.report.metrics import BestEffort
from packlora.report.page import whole_page

PATIENCE = 100
"""Times as long as the last page took, before the next one is made while a run trains."""
LONGEST = 1.0
"""Seconds: where the last page took longer, none is made while a run trains, which would stand still for it."""


def write_report(output_dir: Path) -> Path:
    """Write `report.html` into a run's output folder, from what the run has written so far, and return its path."""
    path = output_dir / "report.html"
    write_text(path, whole_page(output_dir))
    return path


class ReportPage:
    """Subscriber that keeps a run's report.html up to date; it reads the files that the subscribers before it have written.

    The page is made from all that a run has logged. It is written at the beginning and at the end, and at save points so
    seldom that it takes a hundredth of the time, while it takes no more than a second; `packlora report` and `packlora watch`
    make it when they are asked.
    """

    def __init__(self, output_dir: Path, files: BestEffort, clock: Callable[[], float] = time.monotonic) -> None:
        self.output_dir, self._files, self._clock = output_dir, files, clock
        self._next = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunBegan | RunEnded) or (
            isinstance(event, SavePointReached) and self._clock() >= self._next
        ):
            began = self._clock()
            self._files.write("report.html", lambda: write_report(self.output_dir))
            ended = self._clock()
            took = ended - began
            self._next = ended + PATIENCE * took if took <= LONGEST else math.inf
