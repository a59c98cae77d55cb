"""A job that goes on without learning anything is reported: while it trains, in the last words, in run.json and on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_training import Base, Rows, config, steps, train

from packlora.config import TrainConfig
from packlora.engine.objective import Objective
from packlora.report.summary import print_summary
from packlora.rl.config import RolloutConfig
from packlora.rl.objective import RewardObjective
from packlora.runtime.job import IdleSteps, StepResult


def job(name: str, rate: float, dora: bool = True, **changes: Any) -> dict[str, Any]:
    settings = {"learning_rate": rate, "global_batch_size": 3, "max_steps": 4, "max_grad_norm": 0.0, **changes}
    return {"name": name, "adapter": {"r": 4, "use_dora": dora}, "train": settings}


def run(tiny_base: Base, rows: Rows, out: Path, *jobs: dict[str, Any]) -> tuple[Any, list[str]]:
    """The result, and the warnings of run.json."""
    result = train(config(tiny_base("shallow"), out, rows, list(jobs)))
    return result, json.loads((out / "run.json").read_text())["warnings"]


def about(name: str, warnings: list[str]) -> list[str]:
    return [text for text in warnings if f"job {name!r}" in text]


def test_dora_at_an_absurd_learning_rate_is_reported_for_its_gradient_of_0(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, jobs_of_the_run = tmp_path / "out", [job("wild", 1e30), job("calm", 1e-3)]
    result, warnings = run(tiny_base, write_rows, out, *jobs_of_the_run)
    norms = [line["grad_norm"] for line in steps(out) if line["job"] == "wild"]
    assert norms[0] > 0
    assert norms[1:] == [0.0] * 3
    (text,) = about("wild", warnings)
    assert "its gradient was exactly 0 in 3 steps up to step 4" in text
    assert "learning rate 1e+30, largest parameter" in text
    assert text in capsys.readouterr().out.replace("\n", " ")
    assert about("calm", warnings) == []
    print_summary(result, "again")
    said = capsys.readouterr().out
    assert re.search(r"wild +done, idle +4 ", said) and re.search(r"calm +done +4 ", said)
    assert "job 'wild': its gradient was exactly 0 from step 2 on, so it learnt nothing after step 1\n" in said
    assert said.count("learnt nothing") == 1
    jobs = json.loads((out / "run.json").read_text())["result"]["jobs"]
    assert (jobs["wild"]["idle_since"], jobs["calm"]["idle_since"], result.jobs["wild"].idle_since) == (2, None, 2)
    page = (out / "report.html").read_text()
    assert page.count("gradient 0 from step 2 on</small>") == 1
    assert (
        train(config(tiny_base("shallow"), out, write_rows, jobs_of_the_run), resume=True).jobs["wild"].idle_since == 2
    )


def test_a_job_that_ends_before_that_is_reported_at_its_end(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> None:
    _, warnings = run(
        tiny_base, write_rows, tmp_path / "out", job("wild", 1e30, max_steps=2), job("one", 1e-3, max_steps=1)
    )
    assert "its gradient was exactly 0 in 1 step up to step 2" in about("wild", warnings)[0]
    assert about("one", warnings) == []


def test_a_learning_rate_that_moves_no_bit_is_reported(tiny_base: Base, write_rows: Rows, tmp_path: Path) -> None:
    _, warnings = run(tiny_base, write_rows, tmp_path / "out", job("still", 1e-60, False), job("small", 1e-9, False))
    (text,) = warnings
    assert "job 'still': its adapter did not change by one bit in 3 steps up to step 3" in text


def result(loss: float, norm: float, lr: float = 1e-3) -> StepResult:
    return StepResult(1, loss, norm, lr, 7)


def notices(own: IdleSteps, *results: StepResult, changed: bool = True) -> list[bool]:
    return [own.notice(one, 1.0, changed, is_last=False) is not None for one in results]


def test_a_job_that_has_nothing_left_to_learn_is_told_in_other_words(tiny_base: Base, write_rows: Rows) -> None:
    """A learning rate that is far too high can bring the loss to exactly 0 as well."""
    own = IdleSteps(1e-3, Objective.why_zero)
    none = [own.notice(result(0.0, 0.0), 1.0, True, is_last=False) for _ in range(5)]
    assert [text is not None for text in none] == [False, False, True, False, False]
    assert "loss and its gradient were exactly 0 in 3 steps up to step 1: there is nothing left to learn" in str(
        none[2]
    )


def test_of_completions_with_equal_rewards_it_says_so() -> None:
    learning = RolloutConfig(reward="a.py:b"), RolloutConfig(teacher="base")
    rewarded, taught = (RewardObjective.of(TrainConfig(loss_type="dapo"), one).why_zero for one in learning)
    said = str(IdleSteps(1e-3, rewarded).notice(result(0.0, 0.0), 1.0, True, is_last=True))
    assert "exactly 0 in 1 step up to step 1: all completions of each prompt had the same reward" in said
    assert "too high" not in said and "the teacher has the adapter's own probabilities" in taught


def test_it_is_said_once_and_again_after_learning_went_on() -> None:
    own = IdleSteps(1e-3, Objective.why_zero)
    zero, fine = result(2.0, 0.0), result(2.0, 0.5)
    assert notices(own, zero, zero, zero, zero, zero) == [False, False, True, False, False]
    assert notices(own, fine, zero, zero, fine, zero, zero, zero) == [False] * 6 + [True]
    assert notices(own, fine, *[result(0.0, 0.5)] * 5, changed=True) == [False] * 6
    assert notices(own, *[result(2.0, 0.5, lr=1e-6)] * 3, changed=False) == [False] * 3, "in warmup or decay"
    assert notices(own, fine, fine, fine, changed=False) == [False, False, True]
