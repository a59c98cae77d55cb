"""report.html in a run's output folder, written at any moment of a run or after it."""

from __future__ import annotations

from pathlib import Path

from packlora.files import write_file
from packlora.report.events import Event, RunEnded, SavePointReached
from packlora.report.metrics import BestEffort
from packlora.report.page import whole_page


def write_report(output_dir: Path) -> Path:
    """Write `report.html` into a run's output folder, from what the run has written so far, and return its path."""
    page = whole_page(output_dir)
    path = output_dir / "report.html"

    def write(file: Path) -> None:
        file.write_text(page, encoding="utf-8")

    write_file(path, write)
    return path


class ReportPage:
    """Keeps a run's report.html up to date, a subscriber; it reads what the subscribers before it have written."""

    def __init__(self, output_dir: Path, files: BestEffort) -> None:
        self.output_dir, self._files = output_dir, files

    def __call__(self, event: Event) -> None:
        if isinstance(event, SavePointReached | RunEnded):
            self._files.write("report.html", lambda: write_report(self.output_dir))
