"""`python -m benchmarks vlm`: what it writes and what it quotes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import vlm
from benchmarks.options import Options
from benchmarks.run import run_bench

REQUIRED = ["forward_vs_peft", "step_vs_peft", "peak_gib_minus_peft_max"]


def test_a_run_on_the_cpu_writes_its_cases_and_the_required_keys(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run_bench("vlm", out, quick=True, device="cpu", layers=1) == 0
    written = json.loads(out.read_text())
    assert [row["case"] for row in written["rows"]] == [
        f"{what} dora_r24 {regime}" for what in ("forward", "step") for regime in ("bf16", "fp32")
    ]
    assert {f"part_{key}" for key in REQUIRED} <= written["summary"].keys()
    assert written["summary"]["part_step_vs_peft"] > 0 and written["summary"]["part_forward_vs_peft"] > 0


def test_the_summary_quotes_the_least_ratio_and_the_most_memory() -> None:
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(vlm.cases(Options(torch.device("cuda")))):
        row = {"r": case.rank, "regime": case.regime, "backward": case.backward, "vs_peft": 1.5 + number}
        rows.append(row | {"over_frozen": {"packlora": 1.1}, "gib": {"packlora": 20.0, "peft": 20.0 + number - 3}})
    assert len(rows) == 12
    assert [vlm.summary(rows)[key] for key in REQUIRED] == [1.5, 7.5, 3.0]
    rows[4]["vs_peft"] = None
    assert vlm.summary(rows)["forward_vs_peft"] is None
