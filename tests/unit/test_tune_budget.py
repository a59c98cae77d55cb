"""tune: in the time that it is given, the most useful cases first, with the time left on the screen."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from packlora.cli import app
from packlora.config import Run
from packlora.errors import InputError
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.plans.cache import PlanCache, Record
from packlora.plans.case import Case
from packlora.report.screen import Screen
from packlora.tune.plans import MINUTES, cases_of_run, standard_cases, tune

CPU = torch.device("cpu")


@pytest.fixture
def run(tiny_base: Callable[[str], str]) -> Run:
    adapters: list[dict[str, Any]] = [{"r": 4}, {"r": 2, "lora_dropout": 0.0}]
    jobs = [{"name": f"job{n}", "data": {"path": "unused.jsonl"}, "adapter": own} for n, own in enumerate(adapters)]
    tree = {"base_model": tiny_base("llama"), "output_dir": "unused", "max_tokens_per_microbatch": 512, "jobs": jobs}
    return Run.model_validate(tree)


class World:
    """A clock that only measuring moves: a run of a plan takes `step_s`, a case what timing.paired would take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s
        self.measured: list[tuple[Case, int]] = []
        monkeypatch.setattr("packlora.tune.plans.time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr("packlora.tune.plans.measure", self.measure)
        monkeypatch.setattr("packlora.tune.plans.group_maker", lambda device: lambda case, plan: self.step)
        monkeypatch.setattr("packlora.tune.plans.seconds", lambda plan, case, roofline: 1e-6)

    def step(self) -> None:
        self.now += self.step_s

    def measure(
        self, case: Case, plans: Any, device: Any, make: Any, budget_s: float, rounds: tuple[int, int]
    ) -> Record:
        self.measured.append((case, len(plans)))
        a_round = len(plans) * self.step_s
        self.now += 5 * a_round + max(rounds[0] * a_round, min(budget_s, rounds[1] * a_round))
        return Record({plan.name: 1.0 for plan in plans}, {}, "2026-02-01")


def test_measuring_ends_when_the_time_is_over_and_another_call_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, cases = World(monkeypatch, 0.25), cases_of_run(run, CPU)[0]
    cache = PlanCache(CPU, tmp_path / "plans.json")
    tune(run, CPU, progress=False, minutes=2, cache=cache)
    assert 100 < world.now <= 120
    first = [case for case, _ in world.measured]
    assert first == cases[: len(first)]
    assert 1 < len(first) < len(cases)
    printed = capsys.readouterr().out
    assert f"measuring plans for {len(cases)} cases, the most useful first, in at most 2 minutes" in printed
    assert f"{len(cases) - len(first)} of {len(cases)} cases are left" in printed
    began = world.now
    tune(run, CPU, progress=False, minutes=2, cache=PlanCache(CPU, tmp_path / "plans.json"))
    assert world.now - began <= 120
    second = [case for case, _ in world.measured[len(first) :]]
    assert second == cases[len(first) : len(first) + len(second)]


def test_where_all_is_measured_another_call_goes_on_with_what_was_measured_the_longest_ago(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `tune --lossy` after `tune`: not the first ones at every call."""
    world, cases, path = World(monkeypatch, 0.25), cases_of_run(run, CPU)[0], tmp_path / "plans.json"
    PlanCache(CPU, path).put({case.key: Record({CHAIN.name: 1.0}, {}, "2026-01-01") for case in cases})
    for _ in range(2):
        tune(run, CPU, progress=False, minutes=2, cache=PlanCache(CPU, path), lossy=True)
    measured = [case for case, _ in world.measured]
    assert measured == cases[: len(measured)] and 2 < len(measured) < len(cases)


def test_enough_time_measures_all_cases_with_all_plans_and_says_nothing_is_left(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, cases = World(monkeypatch, 0.001), cases_of_run(run, CPU)[0]
    tuned = tune(run, CPU, progress=False, minutes=60, cache=PlanCache(CPU, tmp_path / "plans.json"))
    assert [item.case for item in tuned] == cases
    assert max(count for _, count in world.measured) > 2
    assert "left" not in capsys.readouterr().out


def test_a_slow_case_is_measured_with_fewer_plans_and_the_first_one_in_any_case(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, 0.5)
    tune(run, CPU, progress=False, minutes=3, cache=PlanCache(CPU, tmp_path / "plans.json"))
    assert {count for _, count in world.measured} == {2}
    assert 150 < world.now <= 180
    world = World(monkeypatch, 1e3)
    tune(run, CPU, progress=False, minutes=0, cache=PlanCache(CPU, tmp_path / "other.json"))
    assert [count for _, count in world.measured] == [2]


def test_the_bar_shows_cases_and_the_time_left(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("packlora.tune.plans.table_screen", lambda: Screen(file=shown, force_terminal=True, width=80))
    World(monkeypatch, 0.2)
    monkeypatch.setattr("rich.progress.Progress.update", refreshing)
    tune(run, CPU, minutes=2, cache=PlanCache(CPU, tmp_path / "plans.json"))
    left = [
        (int(m[1]), int(m[2]) * 60 + int(m[3]))
        for m in re.finditer(
            r"(\d+) of \d+ cases\D*(\d+):(\d\d) left", re.sub(r"\x1b\[[\d;?]*\w", "", shown.getvalue())
        )
    ]
    assert left[0][0] == 0 and 100 < left[0][1] <= 120
    assert left[-1][1] < 30
    assert [seconds for _, seconds in left] == sorted((seconds for _, seconds in left), reverse=True)


def refreshing(self: Any, task: Any, **fields: Any) -> None:
    """Progress.update, drawn at once instead of twice a second."""
    completed = fields.pop("completed")
    self.tasks[0].completed = completed
    self.tasks[0].fields.update(fields)
    self.refresh()


def test_large_microbatches_of_all_jobs_come_first(run: Run) -> None:
    cases, _ = cases_of_run(run, CPU)
    assert [case.tokens for case in cases] == sorted((case.tokens for case in cases), reverse=True)
    largest = [case for case in cases if case.tokens == 512]
    together = [len(case.ranks) == 2 for case in largest]
    assert together == sorted(together, reverse=True) and any(together) and not all(together)
    work = [sum(case.Ns) * case.K for case in largest if len(case.ranks) == 2]
    assert work[0] == max(work)  # gate and up, of all but no layers the most work
    standard = standard_cases(CPU)
    assert [case.tokens for case in standard] == sorted((case.tokens for case in standard), reverse=True)


@pytest.mark.parametrize("minutes", [-1.0, float("nan"), float("inf")])
def test_minutes_that_are_none_are_refused(minutes: float) -> None:
    with pytest.raises(InputError, match="minutes is"):
        tune(None, CPU, minutes=minutes)


def test_the_command_gives_minutes_and_lossy_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("packlora.tune.plans.tune", lambda run, **options: given.update(options) or [])
    assert CliRunner().invoke(app, ["tune", "--minutes", "1.5"]).exit_code == 0
    assert given == {"minutes": 1.5, "lossy": False}
    assert CliRunner().invoke(app, ["tune"]).exit_code == 0
    assert given == {"minutes": MINUTES, "lossy": False}
    assert CliRunner().invoke(app, ["tune", "--lossy"]).exit_code == 0
    assert given == {"minutes": MINUTES, "lossy": True}


def test_a_run_that_allows_lossy_plans_has_them_measured(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def legal(case: Case, lossy: bool) -> list[Plan]:
        asked.append(lossy)
        return [CHAIN]

    monkeypatch.setattr("packlora.tune.plans.legal_plans", legal)
    for value in (False, True):
        run.plans.lossy = value
        tune(run, CPU, progress=False, minutes=0, cache=PlanCache(CPU, tmp_path / "plans.json"))
        assert set(asked) == {value}
        asked.clear()
