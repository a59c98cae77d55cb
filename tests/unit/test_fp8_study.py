"""Benchmark `fp8` on a tiny model: it counts layers that computed in FP8, and keeps the steps of a run that is ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model

import packlora
from benchmarks import fp8, harness


@pytest.mark.parametrize("compute", ["fp8", "dtype"])
def test_layers_count_where_they_have_computed_in_fp8(compute: str) -> None:
    model = get_peft_model(tiny_model("qwen2"), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    report = packlora.accelerate(model, compute=compute)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no layer has computed in FP8: packlora: 14 of 14"):
        fp8.layers_in_fp8(model, report)  # nothing has run yet
    ids = torch.arange(3, 33).view(2, 15)
    model(input_ids=ids, use_cache=False)
    if compute == "dtype":
        with pytest.raises(RuntimeError, match="no layer has computed in FP8"):
            fp8.layers_in_fp8(model, report)
        return
    assert fp8.layers_in_fp8(model, report) == 14
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    layer.merge()
    model(input_ids=ids, use_cache=False)  # PEFT computes the merged layer
    layer.unmerge()
    assert fp8.layers_in_fp8(model, report) == 13


def test_a_study_that_is_ended_keeps_its_steps_and_has_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(3, 33).repeat(fp8.HELD_OUT + 16, 1).tolist()
    monkeypatch.setattr(fp8, "source_rows", lambda count: ids)
    monkeypatch.setattr(fp8, "real_model", lambda: tiny_model("llama").requires_grad_(False))
    monkeypatch.setattr(fp8, "REPORTED", 1)
    out = tmp_path / "fp8.json"
    found = []
    for seconds in (-1.0, None):
        assert harness.run("fp8", fp8.FP8, out, True, "cpu", ["fp8"], resume=seconds is None, seconds=seconds) == 0
        found.append(json.loads(out.read_text()))
    (cut,), (whole,) = (content["rows"] for content in found)
    assert cut["steps"] == 1 and cut["unfinished"] == ["bf16", "fp8"] and not found[0]["summary"]
    assert whole["steps"] == 2 and "unfinished" not in whole and whole["fp8_layers"] == whole["layers"] == 14
    assert whole["losses_fp8"][:1] == cut["losses_fp8"] != cut["losses_bf16"]
    assert found[1]["summary"]["part_eval_fp8"] == whole["eval_fp8"]
