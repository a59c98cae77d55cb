"""The study of the command: what it says of a run is what the run's logs say, and its inputs train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.studies.command import RANKS, RUNS, row_of, timed, write_inputs


def test_where_the_time_went_adds_up() -> None:
    seconds = [9.0, 1.0, 1.0, 4.0, 1.0, 0.5, 1.0]
    ends = [sum(seconds[: at + 1]) for at in range(len(seconds))]
    lines: list[dict[str, Any]] = [{"elapsed": end, "tokens": {"a": 60, "b": 40}, "predicted": 0.9} for end in ends]
    result = {"seconds": ends[-1] + 2.0, "tokens": 700, "peak_memory_bytes": 2**31}
    row = row_of("cold", 30.0, result, lines)
    assert (row["first_microbatch_s"], row["stalls_s"], row["end_s"], row["median_microbatch_s"]) == (
        9.0,
        3.0,
        2.0,
        1.0,
    )
    assert row["before_training_s"] == 30.0 - 19.5 and row["tokens_per_s"] == pytest.approx(700 / 30)
    assert row["between_stalls_tokens_per_s"] == pytest.approx(500 / 4.5)
    assert row["predicted_s"] == pytest.approx(6.3) and row["peak_gib"] == 2.0


def test_its_run_file_trains_all_jobs_by_the_command(tmp_path: Path) -> None:
    name = next(iter(RUNS))
    row = timed(write_inputs(tmp_path, torch.device("cpu"), quick=True), name)
    record = json.loads((tmp_path / RUNS[name] / "run.json").read_text())
    assert {job: own["status"] for job, own in record["result"]["jobs"].items()} == {f"r{r}": "done" for r in RANKS}
    assert row["tokens"] == sum(job["tokens"] for job in record["jobs"].values()) > 0
    assert 0 < row["first_microbatch_s"] < row["training_s"] < row["wall_s"]


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    file = write_inputs(tmp_path, torch.device("cpu"), quick=True)
    (tmp_path / "r8.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"ended with 2:[\s\S]*r8\.jsonl"):
        timed(file, next(iter(RUNS)))
