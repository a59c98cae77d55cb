"""`python -m benchmarks experts`: what it writes, and that its contenders compute alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import experts
from benchmarks.options import Options
from benchmarks.run import run_bench

REQUIRED = ["lora_over_frozen", "lora_gib", "dora_over_frozen", "dora_gib", "four_jobs_over_frozen"]


def test_a_run_on_the_cpu_writes_its_cases_and_the_required_keys(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run_bench("experts", out, quick=True, device="cpu") == 0
    written = json.loads(out.read_text())
    assert [row["case"] for row in written["rows"]] == [
        "1job lora_r16 T32", "4jobs lora_r16 T32", "1job dora_r16 T32", "4jobs dora_r16 T32"
    ]  # fmt: skip
    assert {f"part_{key}" for key in REQUIRED} <= written["summary"].keys()
    assert written["summary"]["part_lora_over_frozen"] > 0 and written["summary"]["part_vs_peft"] > 0


def test_the_summary_quotes_the_most_tokens_without_their_number() -> None:
    rows: list[dict[str, Any]] = []
    for case in experts.cases(Options(torch.device("cuda"))):
        T = experts.SAMPLES * case.length
        row = {"T": T, "dora": case.dora, "jobs": case.jobs, "vs_peft": 1.5, "gib": {"packlora": 10.0}}
        rows.append(row | {"over_frozen": {"packlora": 1.0 + 1000 / T}})
    summary = experts.summary(rows)
    assert [summary[key] for key in REQUIRED] == [1.0 + 1000 / 8192, 10.0] * 2 + [1.0 + 1000 / 8192]
    assert summary["lora_over_frozen_T2048"] == 1.0 + 1000 / 2048
