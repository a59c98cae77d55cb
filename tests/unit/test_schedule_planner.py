"""The planner's front door: what it refuses, odd numbers of jobs and batches, and planning ahead in other processes."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from schedule_cases import Lengths, broken_rule, wrong_contents
from seeds import SOAK

from packlora.pipeline import rules
from packlora.pipeline.timeline import makespan, simulate
from packlora.schedule.cost import CostModel
from packlora.schedule.planner import Planner
from packlora.schedule.types import ScheduleError, Window


def same(ours: list[Window], theirs: list[Window]) -> bool:
    """Whether the microbatches are the same, no-ops included, and what is reported of them is."""
    return [(w.first_round, w.microbatches, w.carry, w.report.packs) for w in ours] == [
        (w.first_round, w.microbatches, w.carry, w.report.packs) for w in theirs
    ]


# --- refusals --------------------------------------------------------------------------------------------------------------


def test_a_sample_that_fits_no_microbatch_is_refused_by_job_and_sample() -> None:
    jobs = [Lengths("fine", [[3, 4]]), Lengths("long", [[5], [2, 101]])]
    with pytest.raises(
        ScheduleError, match=r"job 'long': sample 2 has 101 tokens, but a microbatch takes at most 100;"
    ):
        list(Planner(jobs, 100).windows())


def test_a_global_batch_without_samples_and_a_sample_without_tokens_are_refused() -> None:
    with pytest.raises(ScheduleError, match="job 'a': global batch 1 has no samples"):
        Planner([Lengths("a", [[3], []])], 10).window(0)
    with pytest.raises(ScheduleError, match="job 'a': sample 1 has 0 tokens"):
        Planner([Lengths("a", [[3, 0]])], 10).window(0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "cbc"}, "method 'cbc' is not known; there are auto, greedy, milp, solo"),
        ({"lag": 0}, "lag is 0"),
        ({"window_rounds": 0}, "window_rounds is 0"),
        ({"time_limit_s": 0}, "time_limit_s is 0"),
        ({"lag": 2, "cost": CostModel()}, "the cost model is of 1 stages, the pipeline has 2"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        Planner([Lengths("a", [[3]])], 100, **settings)


def test_names_are_unique_and_only_jobs_that_are_there_leave() -> None:
    with pytest.raises(ScheduleError, match="job 'a' is in the plan already"):
        Planner([Lengths("a", [[1]]), Lengths("a", [[1]])], 10)
    planner = Planner([Lengths("a", [[1]])], 10)
    with pytest.raises(ScheduleError, match="job 'b' is not in the plan; there are a"):
        planner.remove("b", 0)


# --- sizes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("jobs", [1, 2, 3, 64 if SOAK else 24])
def test_one_to_many_jobs_of_different_numbers_of_batches(jobs: int, stages: int) -> None:
    draw = random.Random(jobs * 10 + stages)
    some = [
        Lengths(
            f"j{n}", [[draw.randint(1, 900) for _ in range(draw.randint(1, 9))] for _ in range(draw.randint(0, 20))]
        )
        for n in range(jobs)
    ]
    planner = Planner(some, 1000, lag=stages, window_rounds=7)
    plan = [mb for window in planner.windows() for mb in window.microbatches]
    assert wrong_contents(plan, some, 1000) is None
    assert broken_rule(plan, stages) is None


def test_one_job_in_a_pipeline_waits_between_its_batches_and_smaller_microbatches_shorten_that() -> None:
    job = Lengths("a", [[100] * 16 for _ in range(8)])
    fewest = list(Planner([job], 800, lag=4).windows())
    assert [mb.is_noop for mb in fewest[0].microbatches] == ([False] * 2 + [True] * 3) * 7 + [False] * 2
    assert fewest[0].report.gap == 0
    cost = CostModel(1.0, 0.0, 20.0, 0.0, 1.0, (0.25,) * 4)
    (quick,) = Planner([job], 800, lag=4, cost=cost).windows()
    assert quick.report.tokens_per_microbatch < 800
    assert makespan(quick.microbatches, cost) < 0.8 * makespan(fewest[0].microbatches, cost)


def test_microbatches_are_made_smaller_as_long_as_that_is_faster() -> None:
    """Two jobs fill the slots between each other's batches with full microbatches, which are unlike one another."""
    draw = random.Random(4)
    jobs = [
        Lengths(name, [[min(999, int(draw.lognormvariate(4.0, 0.7))) for _ in range(20)] for _ in range(8)])
        for name in "ab"
    ]
    cost = CostModel(1.0, 0.0, 20.0, 0.0, 1.0, (0.5, 0.5))
    (window,) = Planner(jobs, 1000, lag=2, cost=cost).windows()
    assert simulate(window.microbatches, cost).bubble < 0.05


@pytest.mark.parametrize("seed", [3, 4, 11])
def test_the_search_for_smaller_microbatches_ends_where_no_smaller_ones_are_faster(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    jobs = [
        Lengths(name, [[draw.randint(mean // 2, mean * 3 // 2) for _ in range(samples)] for _ in range(4)])
        for name, mean, samples in (("a", 100, 32), ("b", 300, 8), ("c", 60, 16), ("d", 150, 48))
    ]
    cost = CostModel(1.0, 0.0, 300.0, 0.0, 1.0, (0.5, 0.5))
    found, whole = Planner(jobs, 16384, lag=2, cost=cost).window(0), len(rules.FILLS)
    monkeypatch.setattr(rules, "PATIENCE", whole)
    best = Planner(jobs, 16384, lag=2, cost=cost).window(0)
    assert makespan(found.microbatches, cost) <= 1.001 * makespan(best.microbatches, cost)


def test_a_job_joins_and_another_leaves_a_running_plan() -> None:
    planner = Planner([Lengths("a", [[1]] * 6), Lengths("b", [[1]] * 6)], 10, window_rounds=2)
    seen: list[list[tuple[str, int]]] = []
    for window in planner.windows():
        seen.append(sorted({(item.job, item.batch) for mb in window.microbatches for item in mb.samples}))
        if len(seen) == 1:
            planner.add(Lengths("c", [[1]] * 4), 3)
            planner.remove("b", 3)
            with pytest.raises(ScheduleError, match=r"job 'd': round 1 was handed out already; the first .* is 2"):
                planner.add(Lengths("d", [[1]]), 1)
    assert seen == [
        [("a", 0), ("a", 1), ("b", 0), ("b", 1)],
        [("a", 2), ("a", 3), ("b", 2), ("c", 0)],
        [("a", 4), ("a", 5), ("c", 1), ("c", 2)],
        [("c", 3)],
    ]


def test_no_module_of_the_scheduler_imports_torch() -> None:
    code = """
        import importlib, pkgutil, sys
        import packlora.schedule
        for module in pkgutil.iter_modules(packlora.schedule.__path__):
            importlib.import_module(f"packlora.schedule.{module.name}")
        heavy = sorted({"torch", "transformers", "scipy", "peft"} & set(sys.modules))
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=Path(__file__).parents[2])
