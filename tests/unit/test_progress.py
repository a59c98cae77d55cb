"""The live table on a terminal and the plain lines without one."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from packlora.events import (
    Evaluated,
    JobAtStart,
    JobDone,
    JobFailed,
    Note,
    RunBegan,
    Stepped,
    StopAsked,
    TrainingBegan,
)
from packlora.report.progress import COMPILES, Progress, duration
from packlora.report.screen import Screen
from packlora.report.summary import print_summary
from packlora.report.tables import of_jobs
from packlora.result import JobResult, Result


def job(name: str, samples: int = 8) -> JobAtStart:
    """Two samples of ten tokens to a step, an epoch of them."""
    return JobAtStart(name, "running", 0, samples // 2, 10 * samples)


def began(*jobs: JobAtStart, notes: tuple[str, ...] = ()) -> RunBegan:
    return RunBegan("id", Path("out"), {}, jobs, notes)


def stepped(name: str, step: int, loss: float = 1.0, norm: float = 1.0, lr: float = 1e-4, tokens: int = 20) -> Stepped:
    return Stepped(name, step, loss, norm, lr, tokens, 0.1, 10.0 * step)


def shown(*jobs: JobAtStart, terminal: bool = False, width: int = 80) -> Progress:
    progress = Progress(Screen(file=io.StringIO(), force_terminal=terminal, width=width))
    progress(began(*jobs))
    return progress


@pytest.mark.parametrize("terminal", [True, False])
def test_every_job_is_shown_with_its_loss_rate_and_status(terminal: bool) -> None:
    out = io.StringIO()
    with Progress(Screen(file=out, force_terminal=terminal, width=140)) as progress:
        progress(began(job("first[red]"), job("second"), notes=("the second is new",)))
        progress(TrainingBegan())
        progress(Evaluated("first[red]", 0, 3.25))
        for step in (1, 2):
            for name in ("first[red]", "second"):
                progress(stepped(name, step, 1.5 / step, 0.5, 2e-4))
        progress(JobFailed("second", 2, "loss nan"))
        progress(Note("the disk is slow"))
        progress(StopAsked("SIGTERM"))
        assert progress.jobs["first[red]"].rate > 0
        left = progress.time_left()
        assert left is not None
        assert left >= 0
    text = out.getvalue()
    for expected in ("first[red]", "second", "0.7500", "3.2500", "0.0002", "2/4", "tokens/s"):
        assert expected in text
    for expected in (
        "note: the second is new",
        "job 'second' was stopped: loss nan; the other jobs go on",
        "note: the disk is slow",
        "SIGTERM: finishing the present microbatch, then saving",
    ):
        assert expected in text
    assert ("failed" in text) == terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_job_that_learns_from_rewards_is_shown_with_its_reward(terminal: bool) -> None:
    progress = shown(job("plain"), job("brief"), terminal=terminal, width=140)
    out = progress.console.file
    progress(stepped("plain", 1))
    assert "reward" not in str(out.getvalue())  # type: ignore[attr-defined]
    progress(Stepped("brief", 1, 0.0, 1.0, 1e-4, 20, 0.1, 1.0, {"reward": None}))
    progress(Stepped("brief", 2, 0.0, 1.0, 1e-4, 20, 0.1, 1.0, {"reward": -0.4375}))
    progress.__exit__()
    text = str(out.getvalue())  # type: ignore[attr-defined]
    assert "-0.4375" in text and ("reward -0.4375" in text) != terminal


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("compiles", [True, False])
def test_before_the_first_microbatch_it_says_what_takes_the_time(compiles: bool, terminal: bool) -> None:
    progress = shown(job("first"), terminal=terminal, width=140)
    progress(TrainingBegan(compiles))
    progress.__exit__()
    assert isinstance(progress.console.file, io.StringIO)
    assert (COMPILES in progress.console.file.getvalue()) == compiles


def test_other_jobs_go_on_only_where_some_run() -> None:
    out = io.StringIO()
    with Progress(Screen(file=out, width=140)) as progress:
        progress(began(job("first"), job("second")))
        progress(JobFailed("second", 2, "loss nan"))
        progress(JobFailed("first", 3, "loss nan"))
    assert out.getvalue().splitlines() == [
        "job 'second' was stopped: loss nan; the other jobs go on", "job 'first' was stopped: loss nan",
    ]  # fmt: skip


def test_time_left_is_unknown_before_every_running_job_has_stepped_and_nothing_when_all_are_done() -> None:
    progress = shown(job("a"), job("b"))
    progress(stepped("a", 1))
    assert progress.time_left() is None
    for name in ("a", "b"):
        progress(stepped(name, 4))
        progress(JobDone(name, 4, Path("out")))
    assert progress.time_left() == 0.0


@pytest.mark.parametrize("late", [False, True])
def test_time_left_follows_the_tokens_that_remain(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """late: all steps are told at once, as by another process while this one waits for a reward."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = shown(job("a"))
    for step in range(1, 4):
        now = 30.0 if late else 10.0 * step
        progress(stepped("a", step))
    assert progress.jobs["a"].rate == pytest.approx(2)  # 20 tokens each 10 seconds
    assert progress.time_left() == pytest.approx(10)  # one step of four is left


def test_the_last_words_give_no_speed_of_a_job_that_took_no_step_in_this_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {
        "trained": JobResult("done", 4, tmp_path, tokens_per_second=39.6),
        "ended": JobResult("done", 4, tmp_path, eval_after=1.5),
    }
    print_summary(Result("done", 1.0, 9, tmp_path, tmp_path / "report.html", jobs), "")
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["trained", "done", "4", "40"] in said and ["ended", "done", "4", "1.5000"] in said
    assert of_jobs(jobs).count("<td>40</td>") == 1 and "<td>0</td>" not in of_jobs(jobs)


def test_durations() -> None:
    assert [duration(s) for s in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
