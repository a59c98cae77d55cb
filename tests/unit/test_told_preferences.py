"""What a step tells of preferences reaches the logs, trackers, the last words and the page, by TRL's names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from packlora.events import Evaluated, Stepped
from packlora.report.metrics import BestEffort, Logs, metric_lines
from packlora.report.run_files import JobFiles, RunFiles
from packlora.report.sections import job_table
from packlora.report.summary import print_summary
from packlora.report.trackers import Tracker
from packlora.result import JobResult, Result
from packlora.runtime.trainer import event_of

REWARDS = {"rewards/chosen": 0.5, "rewards/margins": 1.25, "rewards/accuracies": 0.75, "logps/chosen": -3.0, "kl": None}
LINE = {
    "step": 2, "epoch": 1.0, "loss": 0.6, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 9, "seconds": 0.5, "elapsed": 1.0,
}  # fmt: skip


def test_a_line_of_a_log_history_is_the_event_and_the_line_of_the_log(tmp_path: Path) -> None:
    event = event_of("a", LINE | REWARDS)
    assert isinstance(event, Stepped) and event.metrics == REWARDS
    logs = Logs(tmp_path, BestEffort(print))
    logs(event)
    (written,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert written == metric_lines({"a": [LINE | REWARDS]})[0] and REWARDS.items() <= written.items()
    assert event_of("a", LINE).metrics == {}


def test_trackers_get_what_is_finite() -> None:
    told: list[dict[str, Any]] = []

    class JobRun:
        def log(self, step: int, values: dict[str, float]) -> None:
            told.append(values)

    tracker = Tracker(lambda *about: JobRun())  # type: ignore[arg-type,return-value]
    tracker._begin("a", {}, 0)
    tracker(event_of("a", LINE | REWARDS))
    tracker(Evaluated("a", 2, 0.5, {"eval_rewards/margins": 2.0, "eval_kl": None}))
    assert {key: told[0][key] for key in REWARDS if key != "kl"} == {k: v for k, v in REWARDS.items() if v is not None}
    assert "kl" not in told[0] and told[1] == {"eval_loss": 0.5, "eval_rewards/margins": 2.0}


def test_the_last_words_show_held_out_rewards_or_else_those_of_the_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {
        "held": JobResult("done", 2, tmp_path, metrics={"eval_rewards/margins": 2.5, "rewards/margins": 9.0}),
        "own": JobResult("done", 2, tmp_path, metrics=REWARDS),
        "plain": JobResult("done", 2, tmp_path),
    }
    print_summary(Result("done", 1.0, 9, tmp_path, tmp_path / "report.html", jobs), "")
    head, *lines = capsys.readouterr().out.strip().splitlines()
    assert "rewards/accuracies" in head and "rewards/margins" in head
    assert "2.5" in lines[0] and "9" not in lines[0].replace("tokens", "") and "0.75" in lines[1] and "1.25" in lines[1]
    assert "reward " not in head
    jobs["rewarded"] = JobResult("done", 2, tmp_path, metrics={"eval_reward": 0.375, "reward": 9.5})
    print_summary(Result("done", 1.0, 9, tmp_path, tmp_path / "report.html", jobs), "")
    assert re.search(r"rewarded .* 0\.375 ", capsys.readouterr().out)
    del jobs["held"], jobs["own"], jobs["rewarded"]
    print_summary(Result("done", 1.0, 9, tmp_path, tmp_path / "report.html", jobs), "")
    assert "rewards" not in capsys.readouterr().out


def test_the_page_shows_them_under_the_loss_of_the_same_samples(tmp_path: Path) -> None:
    def cells(*evals: dict[str, Any]) -> list[str]:
        job = JobFiles("a", "job-0", {}, {}, {}, [LINE | REWARDS], list(evals))
        return re.findall(
            r'data-label="(?:Training|Held-out) loss"[^>]*>(.*?)</td>', job_table(RunFiles(tmp_path, {}, [job], [], []))
        )

    trained, held_out = cells()
    assert "accuracies 0.75, margins 1.25" in trained and "margins" not in held_out
    trained, held_out = cells({"step": 2, "eval_loss": 0.5, "eval_rewards/margins": 2.0})
    assert "margins 1.25" in trained and "0.500" in held_out and "margins 2<" in held_out
    trained, held_out = cells({"step": 0, "eval_loss": 2e-17}, {"step": 2, "eval_loss": 1e-17, "eval_reward": -0.25})
    assert "reward -0.25<" in held_out and "%" not in held_out
