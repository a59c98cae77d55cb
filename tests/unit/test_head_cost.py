"""Stages are cut by what the output layer and the loss cost beside a layer, where that was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import rows_into, tiny_model
from expert_models import tiny_experts
from test_training import config, train
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from packlora.cli import app
from packlora.config import Run
from packlora.pipeline.estimate import head_in_layers, planning_cost, stage_layers
from packlora.runtime.head_cost import HeadCost, known_head, remember
from packlora.runtime.prepare import prepare
from packlora.runtime.prepared_job import ModelShape
from packlora.tune import head
from packlora.tune.head import measure_head

CPU = torch.device("cpu")
JOB = {"name": "job", "adapter": {"r": 2}, "train": {"max_steps": 2, "global_batch_size": 2}}


@pytest.fixture
def tree(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Six layers; nothing is known of them."""
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "cache"))
    tiny_model("llama", num_hidden_layers=6).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return config(str(tmp_path / "base"), tmp_path / "out", rows_into(tmp_path), [JOB])


def operations(step: Callable[[], None], device: torch.device) -> float:
    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_what_is_measured_is_a_layer_and_the_head(family: str, tree: dict[str, Any], tmp_path: Path) -> None:
    """Counted in operations in the place of seconds. Layers of the first model are recomputed, which takes half as long again.
    Of the one with experts the first layer, dense, costs otherwise than the last ones."""
    if family != "llama":
        tiny_experts("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0]).save_pretrained(tmp_path / "base")
    tree |= {"dtype": "float64", "max_tokens_per_microbatch": 1024}  # in which experts are products that are counted
    checkpointing = family == "llama"
    run = Run.model_validate(tree | {"gradient_checkpointing": checkpointing})
    shape = prepare(run).shape
    with mock.patch.object(head, "_seconds", operations):
        cost = measure_head(run, shape, CPU)
    weights = (shape.linear_parameters + shape.routed_parameters) / shape.layers
    assert cost.tokens == 1024
    passes = 3 if checkpointing else 2
    assert cost.layer_s == pytest.approx(2 * passes * weights * cost.tokens, rel=0.35), "and attention"
    labels = cost.tokens - 2
    assert cost.head_s == pytest.approx(4 * shape.hidden * shape.vocabulary * labels, rel=0.02)


def test_a_device_that_is_neither_a_cpu_nor_a_gpu_of_cuda_takes_as_many_tokens_as_a_cpu(tree: dict[str, Any]) -> None:
    run = Run.model_validate(tree | {"max_tokens_per_microbatch": "auto"})
    shape = prepare(run).shape
    with mock.patch.object(head, "collate", side_effect=InterruptedError) as asked, pytest.raises(InterruptedError):
        measure_head(run, shape, torch.device("mps"))
    assert asked.call_args.args[2] == head.MOST_TOKENS["cpu"]


def test_a_measured_head_cuts_and_is_said_and_a_resumed_run_keeps_it(tree: dict[str, Any]) -> None:
    tree |= {"save_every": 1}
    prepared = prepare(Run.model_validate(tree))
    run, shape = prepared.run, prepared.shape
    assert prepared.head_in_layers is None
    estimated = head_in_layers(run, prepared)
    remember(run, shape, CPU, HeadCost(512, 0.5, 1.5))
    assert known_head(run, shape, CPU) == 3.0
    assert known_head(run, replace(shape, vocabulary=shape.vocabulary + 1), CPU) is None
    measured = prepare(run)
    share = prepared.jobs[0].data.label_share
    assert measured.head_in_layers == 3.0
    assert head_in_layers(run, measured) == pytest.approx(3.0 * share, rel=0.2), "adapters make layers slower"
    assert head_in_layers(run, measured) < 3.0 * share and estimated != head_in_layers(run, measured)
    heavy = replace(measured, head_in_layers=3.0 / share)
    assert (stage_layers(run, heavy, 2), stage_layers(run, prepared, 2)) == ((4, 2), (3, 3))
    cost = planning_cost(run, heavy, 2)
    assert cost.stage_shares == pytest.approx((4 / 6, 2 / 6))
    assert cost.head_per_token * 2 == pytest.approx(
        head_in_layers(run, heavy) * cost.per_token * (1 + cost.backward_ratio) / 6
    )

    train(tree, max_steps=1)
    out = Path(tree["output_dir"])
    record = json.loads((out / "run.json").read_text())["schedule"]
    assert record["head_in_layers"] == 3.0
    remember(run, shape, CPU, HeadCost(512, 0.5, 2.5))
    train(tree, resume=True)
    assert json.loads((out / "run.json").read_text())["schedule"]["head_in_layers"] == 3.0


def test_tune_measures_it_for_runs_with_stages_and_plan_says_so(tree: dict[str, Any], tmp_path: Path) -> None:
    tree |= {"parallel": {"pipeline": 2}}
    file = tmp_path / "run.json.yaml"
    file.write_text(json.dumps(tree))
    shape = ModelShape.of(tiny_model("llama", num_hidden_layers=6))
    run = Run.model_validate(tree | {"dtype": "float32"})
    said = CliRunner().invoke(app, ["plan", str(file)], env={"COLUMNS": "200"}).output
    assert "stages of 3, 3 layers" in said and "of them, estimated; packlora tune measures it" in said, said
    told = CliRunner().invoke(app, ["tune", str(file), "--minutes", "0"], env={"COLUMNS": "200"}).output
    known = known_head(run, shape, CPU)
    assert known is not None and f"as long as {known:.2f} layers" in told.replace("\n", " "), told
    again = CliRunner().invoke(app, ["plan", str(file)], env={"COLUMNS": "200"}).output
    assert "of them, as measured" in again
    (found,) = (tmp_path / "cache" / "heads").glob("*.json")
    content = json.loads(found.read_text())
    (key,) = content["heads"]
    for broken in (0, -1.0, "x", float("nan")):
        content["heads"][key]["layer_s"] = broken
        found.write_text(json.dumps(content))
        assert known_head(run, shape, CPU) is None
