"""`python -m benchmarks sweep`: what it writes, on what samples, and that a way that fails flatters nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import sweep
from benchmarks.options import Options
from benchmarks.run import run_bench
from benchmarks.small_train import Way, row_of
from benchmarks.tables import candidates, result_files
from benchmarks.tables import write as readme

KEYS = {
    "sweep_tokens_per_s", "sweep_peft_tokens_per_s", "sweep_vs_peft", "sweep_with_start_vs_peft", "sweep_gib",
    "sweep_peft_gib", "sweep_reserved_gib", "sweep_peft_reserved_gib", "sweep_candidates", "sweep_layers",
}  # fmt: skip
GPU = Options(torch.device("cuda"))


def test_a_run_at_toy_sizes_trains_all_candidates_and_one_of_peft(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    assert run_bench("sweep", out, quick=True, device="cpu") == 0
    written = json.loads(out.read_text())
    (row,) = written["rows"]
    assert row["failed"] == {} and row["candidates"] == 4 and row["layers"] == 1
    assert written["summary"].keys() == {f"part_{key}" for key in KEYS}
    assert written["summary"]["part_sweep_vs_peft"] > 0 and written["summary"]["part_sweep_gib"] is None
    assert len({*row["unit_tokens"]["peft_compiled"]}) == 1, "batches of one shape, one a step"
    assert len(row["unit_tokens"]["packlora"]) == len(row["unit_tokens"]["peft_compiled"]) + sweep.TOY.lead


def test_candidates_are_every_rank_with_every_rate_on_the_same_samples() -> None:
    jobs = sweep.candidates(sweep.TOY, 3, 320, quick=False)
    assert len({(job.rank, job.lr) for job in jobs}) == len({job.name for job in jobs}) == 16
    assert all(job.samples is jobs[0].samples for job in jobs)
    assert [case.label for case in sweep.cases(GPU)] == ["sweep 8x8B"]


def test_the_page_has_both_ways_and_says_which_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(result_files, "ROOT", tmp_path)
    assert candidates.candidates() == [] and candidates.candidates in readme.SECTIONS
    ways = {
        sweep.OWN: Way(lambda steps: (0.0, 0), 1, [3.0, 1.0], [100, 100]),
        sweep.PEER: Way(lambda steps: (0.0, 0), 1, [5.0, 2.0], [100, 100]),
    }
    (case,) = sweep.cases(GPU)

    def page() -> tuple[dict[str, float | None], str]:
        row = row_of(case, ways) | {"layers": 8, "candidates": 16, "gib": {sweep.OWN: [20.0, 24.0], sweep.PEER: [9, 9]}}
        summary = sweep.summary([row])
        content = {"commit": "0123456789", "date": "2026-01-01", "device": "a device", "rows": [row]}
        (folder / "sweep-h200.json").write_text(json.dumps({**content, "summary": summary}))
        return summary, "\n".join(candidates.candidates())

    summary, text = page()
    assert summary.keys() == KEYS and summary["sweep_vs_peft"] == 2.0 and summary["sweep_reserved_gib"] == 24.0
    assert "| packlora, all together | 100 | 50 | 2.0 | 20.0 | 24.0 |" in text and "2.00x, with the start 1.75x" in text
    ways[sweep.PEER].error = "broke"
    summary, text = page()
    assert summary["sweep_vs_peft"] is None and "| PEFT, compiled, one after the other | failed |" in text


def test_the_page_says_what_halving_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(result_files, "ROOT", tmp_path)
    rows = [{"candidates": 32, "stopped": 29, "seconds": 30.0}, {"candidates": 32, "stopped": 0, "seconds": 100.0}]
    summary = {
        "time_over_grid": 0.3,
        "cpu_time_over_grid": 0.4,
        "tokens_over_grid": 0.25,
        "loss_over_grid_best": 1.0073,
    }
    (folder / "sweep-cpu.json").write_text(json.dumps({"rows": rows, "summary": summary}))
    (line,) = candidates.candidates()
    assert "ends 29 of them early, takes 0.30 of the seconds, 0.40 of the processors' time and 0.25 of" in line
    assert "(100 s)" in line and "1.0073 times" in line
