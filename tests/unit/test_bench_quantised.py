"""`python -m benchmarks quantised`: what it writes, and that its contenders train alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import quantised
from benchmarks.options import Options
from benchmarks.run import run_bench

pytest.importorskip("bitsandbytes")
REQUIRED = ["one_job_vs_peft_bnb", "four_jobs_vs_sequential", "loss_mean_abs_vs_peft", "peak_gib_minus_peft"]


@pytest.mark.parametrize("adapter", [pytest.param("lora_r16", marks=pytest.mark.soak), "dora_r64"])
def test_a_run_on_the_cpu_writes_its_cases_and_losses_like_peft_s(adapter: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run_bench("quantised", out, quick=True, device="cpu", layers=1, only=adapter) == 0
    written = json.loads(out.read_text())
    one, four = written["rows"]
    assert [row["case"] for row in (one, four)] == [f"1job {adapter}", f"4jobs {adapter}"]
    start = "part_" if adapter == "lora_r16" else f"part_{adapter}_"
    assert {f"{start}{key}" for key in REQUIRED} <= written["summary"].keys()
    assert written["summary"][f"{start}loss_mean_abs_vs_peft"] < 0.02  # bfloat16 rounds losses of 6 to 0.03
    assert written["summary"][f"{start}four_jobs_vs_sequential"] > 0
    ours, theirs, exact = one["losses"]
    for who in ("", "peft_"):
        assert 0 < written["summary"][f"{start}{who}loss_mean_abs_vs_float32"] < 0.02
    assert exact[0] == pytest.approx(theirs[0], abs=0.03)
    assert theirs[0] - theirs[-1] > 0.02 and len(ours) == quantised.LOSS_STEPS


def test_the_summary_of_a_whole_benchmark_has_the_required_keys() -> None:
    rows: list[dict[str, Any]] = []
    for case in quantised.cases(Options(torch.device("cuda"))):
        gib = {"packlora": 10.0, "peft_bnb": 12.0}
        row = {"dora": case.dora, "jobs": case.jobs, "vs_peft_bnb": 1.5, "vs_sequential": 1.25, "gib": gib}
        rows.append(row | {"over_frozen": {"packlora": 1.1}, "losses": [[1.0, 2.0], [1.5, 2.0], [1.25, 2.0]]})
    summary = quantised.summary(rows)
    assert [summary[key] for key in REQUIRED] == [1.5, 1.25, 0.25, -2.0]
    assert summary["loss_mean_abs_vs_float32"] == summary["dora_r64_peft_loss_mean_abs_vs_float32"] == 0.125
    assert [summary[f"dora_r64_{key}"] for key in REQUIRED] == [1.5, 1.25, 0.25, -2.0]


def test_models_of_a_case_share_their_codes() -> None:
    case = quantised.cases(Options(torch.device("cpu"), quick=True))[0]
    base = quantised.quantised(quantised.build(case.config, torch.device("cpu"), quantised.LlamaForCausalLM))
    copies = [quantised.over_the_same_codes(base) for _ in range(2)]
    weights = [
        {module.weight.data_ptr() for module in each.modules() if hasattr(module, "quant_state")} for each in copies
    ]
    states = [
        {id(module.quant_state) for module in each.modules() if hasattr(module, "quant_state")} for each in copies
    ]
    assert weights[0] == weights[1] and states[0] == states[1] and len(weights[0]) == 14
