"""`python -m benchmarks schedule` at toy sizes, its figures, and the lengths it draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import schedule
from benchmarks.run import run_bench
from benchmarks.schedule_cases import LENGTHS, SETS, are_estimates, draw_lengths, efficiency, make_cost, make_jobs
from benchmarks.schedule_cases import random_order as no_scheduler
from packlora.errors import InputError
from packlora.schedule.cost import CostModel
from packlora.schedule.types import NOOP, Microbatch, Placed

REQUIRED = ["solve_s_25600", "at_bound_fraction", "bubble_2jobs_4stages", "bubble_4jobs_4stages", "solve_s_1e6"]


def planned(jobs: int, bubble: float, method: str = "auto", part: str = "jobs") -> dict[str, Any]:
    return {
        "part": part, "jobs": jobs, "method": method, "model": "70b", "balanced": True, "bubble": bubble, "stages": 1,
        "packs": 10, "packs_at_bound": 9, "packs_at_bound_or_optimal": 10, "microbatches": 11, "bound": 10,
    }  # fmt: skip


def test_summary_quotes_the_rows_it_says() -> None:
    rows = [planned(jobs, jobs / 100) for jobs in (1, 2, 3, 4)] + [planned(4, 0.5, "random")]
    rows += [planned(4, 0.0, part="shape"), {**planned(4, 0.0, part="shape"), "packs_at_bound": 10}]
    rows += [planned(4, 0.0, "greedy", "shape")]
    for samples in (640, 25600, 1_000_000):
        rows.append({"part": "time", "samples": samples, "method": "auto", "workers": 0, "seconds": samples / 1e4,
                     "rss_mib": 3.0})  # fmt: skip
    summary = schedule.make_summary(rows)
    assert {key: summary[key] for key in REQUIRED} == {
        "solve_s_25600": 2.56, "at_bound_fraction": 0.95, "bubble_2jobs_4stages": 0.02, "bubble_4jobs_4stages": 0.04,
        "solve_s_1e6": 100.0,
    }  # fmt: skip
    assert summary["bubble_4jobs_4stages_random_order"] == 0.5
    assert summary["microbatches_over_bound_one_stage"] == pytest.approx(1.1)
    assert summary["solve_s_640_milp"] is None
    assert summary["microbatches_without_milp_1stage"] is None
    for stages, method, time in ((1, "auto", 9.0), (1, "greedy", 9.0), (4, "auto", 2.0), (4, "apart", 3.0)):
        for number in (10, 12):
            row = {"stages": stages, "method": method, "time": time, "microbatches": number + (method == "greedy")}
            rows.append({**planned(4, 0.0, part="ablation"), **row})
    summary = schedule.make_summary(rows)
    assert summary["microbatches_without_milp_1stage"] == 24 / 22
    assert summary["time_without_merging_4stages"] == 1.5


def test_a_toy_run_writes_rows_a_summary_that_is_marked_as_a_part_and_pictures(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "schedule.json"
    assert run_bench("schedule", out, quick=True, plots=True) == 0
    content = json.loads(out.read_text())
    assert content["name"] == "schedule-cpu"
    assert {f"part_{key}" for key in REQUIRED} <= set(content["summary"])
    assert {row["part"] for row in content["rows"]} == {"shape", "jobs", "time", "ablation"}
    assert all(row["estimates"] for row in content["rows"] if "mix" in row["case"])
    pictures = sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".png", ".svg"))
    assert pictures == ["schedule-bubble.png", "schedule-bubble.svg", "schedule-time.png", "schedule-time.svg"]
    printed = capsys.readouterr().out
    assert "44.17%" in printed and "* lengths are estimates" in printed
    with pytest.raises(InputError, match="bench schedule runs on the CPU and in full"):
        run_bench("schedule", out, only="mix")


def test_lengths_are_those_of_the_fits_and_of_the_percentiles() -> None:
    for name, fit in LENGTHS["estimates"].items():
        lengths = draw_lengths(name, 40000, "test")
        assert np.median(lengths) == pytest.approx(np.exp(fit["mu"]), rel=0.03)
        assert lengths.max() <= 4096 and lengths.min() >= 1
        assert "ESTIMATE" in fit["kind"] and len(fit["how"]) > 40
    for name, known in LENGTHS["measured"].items():
        lengths = draw_lengths(name, 40000, "test")
        for percent, value in known["percentiles"].items():
            if percent in ("p1", "p99"):  # steep there, and so beyond what so many draws tell
                continue
            assert np.percentile(lengths, float(percent[1:])) == pytest.approx(min(value, 4096), rel=0.08)
    mixed = draw_lengths("mix", 30000, "test")
    assert mixed.mean() == pytest.approx(np.mean([draw_lengths(kind, 30000, 1).mean() for kind in
                                                  ("xsum", "cnn_dailymail", "wikisum")]), rel=0.03)  # fmt: skip
    assert are_estimates(SETS["het"]) and not are_estimates(SETS["real"])


def test_no_scheduler_holds_every_sample_once_within_the_capacity() -> None:
    jobs = make_jobs(SETS["het"], 40, 16)
    plan = no_scheduler(jobs, 4096, 4)
    placed = sorted((item.job, item.batch, item.sample, item.length) for mb in plan for item in mb.samples)
    assert placed == sorted(
        (job.name, n, *item) for job in jobs for n in range(job.num_batches) for item in job.batch(n)
    )
    assert max(mb.num_tokens for mb in plan) <= 4096


def test_efficiency_is_one_for_full_microbatches_without_a_bubble() -> None:
    cost = CostModel(2.0, 0.0, 10.0, 1.0, 1.0, (1.0,))
    full = [Microbatch((Placed("a", 0, n, 100),)) for n in range(4)]
    seconds = sum(sum(cost.both(mb, 0)) for mb in full)
    assert efficiency(full, cost, 100, seconds) == pytest.approx(1.0)
    assert efficiency([*full, NOOP], cost, 100, 2 * seconds) == pytest.approx(0.5)
    halves = [Microbatch((Placed("a", 0, n, 50),)) for n in range(8)]
    slower = sum(sum(cost.both(mb, 0)) for mb in halves)
    assert efficiency(halves, cost, 100, slower) == pytest.approx(seconds / slower)
    assert make_cost("70b", 4).stages == 4
