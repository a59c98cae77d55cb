"""When a run writes its report.html: at its beginning, at its end, and in between while a page is quickly made."""

from __future__ import annotations

from pathlib import Path

import pytest

from packlora.events import RunBegan, RunEnded, SavePointReached
from packlora.report import report
from packlora.report.metrics import BestEffort
from packlora.report.report import ReportPage
from packlora.result import Result


class Case:
    """A run whose save points come every second, and whose page takes longer the more of them there were."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now, self.points, self.spent, self.calls, self.longest = folder, 0.0, 0, 0.0, 0, 0.0
        monkeypatch.setattr(report, "write_report", self.write)
        self.page = ReportPage(folder, BestEffort(lambda text: None), lambda: self.now)
        self.page(RunBegan("0", folder, {}, ()))

    def write(self, output_dir: Path) -> Path:
        took = 0.02 + self.points / 1000
        self.now, self.spent, self.calls = self.now + took, self.spent + took, self.calls + 1
        self.longest = max(self.longest, took)
        return output_dir / "report.html"

    def save(self, points: int) -> None:
        for _ in range(points):
            self.now, self.points = self.now + 1.0, self.points + 1
            self.page(SavePointReached())


def test_the_page_is_there_from_the_beginning_and_is_whole_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, monkeypatch)
    assert case.calls == 1
    case.page(SavePointReached())
    assert case.calls == 1
    case.page(RunEnded(Result("done", 1.0, 1, tmp_path, tmp_path / "report.html", {}), 1.0, 1, 0))
    assert case.calls == 2


@pytest.mark.parametrize("points", [200, 2000, 20000])
def test_the_page_takes_a_hundredth_of_the_time_however_long_the_run_is(
    points: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, monkeypatch)
    case.save(points)
    assert 2 < case.calls < points / 2
    last = 0.02 + points / 1000  # of the newest page the time that pays for it is still to come
    assert case.spent <= 0.01 * case.now + last
    assert case.longest < 1.2  # the first one that took more than a second was the last one
