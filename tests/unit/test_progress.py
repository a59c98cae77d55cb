"""The live table on a terminal and the plain lines without one."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from packlora.config import TrainConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.report.progress import Progress, duration
from packlora.runtime.job import StepResult


def job(name: str, samples: int = 8) -> Any:
    sample = Sample(np.arange(10, dtype=np.int32), np.ones(10, bool))
    data = JobData(name, [sample] * samples, TrainConfig(global_batch_size=2), 0)
    return SimpleNamespace(name=name, data=data, step=0, status="running")


@pytest.mark.parametrize("terminal", [True, False])
def test_every_job_is_shown_with_its_loss_rate_and_fate(terminal: bool) -> None:
    out = io.StringIO()
    jobs = [job("first[red]"), job("second")]
    with Progress(jobs, Console(file=out, force_terminal=terminal, width=140)) as progress:
        progress.training_starts()
        progress.evaluated(jobs[0], 3.25)
        for step in (1, 2):
            for item in jobs:
                item.step = step
                progress.stepped(item, StepResult(step, 1.5 / step, 0.5, 2e-4, 20))
        jobs[1].status = "failed"
        progress.message("second was stopped")
        assert progress.rate(jobs[0]) > 0
        left = progress.time_left()
        assert left is not None
        assert left >= 0
    text = out.getvalue()
    for expected in ("first[red]", "second", "0.7500", "3.2500", "0.0002", "2/4", "second was stopped", "tokens/s"):
        assert expected in text
    assert ("failed" in text) == terminal


def test_time_left_is_unknown_before_every_running_job_has_stepped_and_nothing_when_all_are_done() -> None:
    jobs = [job("a"), job("b")]
    progress = Progress(jobs, Console(file=io.StringIO()))
    progress.stepped(jobs[0], StepResult(1, 1.0, 1.0, 1e-4, 20))
    assert progress.time_left() is None
    for item in jobs:
        item.step, item.status = 4, "done"
    assert progress.time_left() == 0.0


def test_time_left_follows_the_tokens_that_remain() -> None:
    item = job("a")
    progress = Progress([item], Console(file=io.StringIO()))
    now = time.perf_counter()
    progress._steps["a"] = [(now + 100 * (n - 3), StepResult(n, 1.0, 1.0, 1e-4, 20)) for n in range(1, 4)]
    item.step = 3
    assert progress.rate(item) == pytest.approx(0.2)  # 20 tokens each 100 seconds
    assert progress.time_left() == pytest.approx(100, abs=1)  # one step of four is left


def test_durations() -> None:
    assert [duration(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
