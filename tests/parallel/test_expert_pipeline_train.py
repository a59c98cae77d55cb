"""`packlora.train` of models with experts in stages, `parallel: {pipeline: N}`, with rows that are shared, and beside layers
that are cut, `parallel: {tensor: N}`: what one device trains. In float64, routers and norms too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import rows_into
from expert_models import tiny_experts
from ranks import Ranks
from seeds import SOAK
from test_expert_parallel_train import JOBS as SHARED
from test_expert_parallel_train import in_wide, same_numbers
from test_replicas import heard, on_ranks
from test_tensor_train import alike
from test_training import config

import packlora
from packlora.commands.plan import make_plan
from packlora.commands.plan_layouts import LayoutFigures
from packlora.config import Run
from packlora.runtime import profiler
from packlora.runtime.prepare import prepare

Groups = Callable[[int], Ranks]
SHAPE = {"num_hidden_layers": 3, "mlp_only_layers": [0], "num_experts": 8}
JOBS = [
    *SHARED[:2],
    {
        "name": "dense", "train": {"max_steps": 3, "global_batch_size": 2, "learning_rate": 1e-2},
        "adapter": {"r": 2, "use_rslora": True, "target_modules": ["o_proj"], "init_lora_weights": False},
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def asked(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A Qwen3-MoE of three layers, the first of which is dense; its files have each expert apart."""
    folder = tmp_path_factory.mktemp("experts")
    model = tiny_experts("qwen3_moe", **SHAPE)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    tree = config(
        str(folder / "base"), folder / "whole", rows_into(folder), JOBS, dtype="float64", max_tokens_per_microbatch=90
    )
    tree["jobs"][0]["data"]["eval_path"] = tree["jobs"][0]["data"]["path"]
    return tree | {"eval_every": 2, "save_every": 1, "save_total_limit": None}


@pytest.fixture(scope="module")
def whole(asked: dict[str, Any]) -> Path:
    """The run on one device."""
    in_wide(0, lambda rank: packlora.train(asked))
    return Path(asked["output_dir"])


def same(out: Path, whole: Path) -> None:
    same_numbers(out, whole, [job["name"] for job in JOBS])
    compared = [path for path in whole.glob("*/checkpoint-*") if (out / path.relative_to(whole)).exists()]
    assert {path.parent.name for path in compared} == {job["name"] for job in JOBS}
    for path in compared:
        alike(out / path.relative_to(whole), path)
    record, single = (json.loads((one / "run.json").read_text()) for one in (out, whole))
    assert (record["jobs"], record["model"]["fingerprint"]) == (single["jobs"], single["model"]["fingerprint"])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (3, {"pipeline": 3}),
        (4, {"pipeline": 2, "devices_per_job": 4}),
        (4, {"pipeline": 2, "expert": 2}),
        (2, {"shard_base": True, "offload_base": True}),
        (4, {"shard_base": 2, "devices_per_job": 2}),
        (4, {"shard_base": True, "expert": 2}),
        (4, {"shard_base": 2, "expert": 2, "ep_implementation": "all_to_all"}),
        (2, {"tensor": 2}),
        (4, {"tensor": 2, "devices_per_job": 4}),
        (4, {"tensor": 2, "shard_base": 2}),
        (4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
        (8, {"tensor": 2, "pipeline": 2, "expert": 2}),
        (4, {"tensor": 2, "expert": 2, "ep_implementation": "all_to_all"}),
        (8, {"tensor": 2, "expert": 2, "ep_implementation": "all_to_all", "devices_per_job": 8}),
        (8, {"tensor": 2, "expert": 2, "shard_base": 2}),
    ],
)
def test_a_run_gives_what_one_device_gives(
    processes: int, parallel: dict[str, Any], asked: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    """Three stages; two pipelines that share jobs; two stages whose experts are shared out; rows shared by all, by sets with
    jobs of their own, and of experts that are shared out in both ways; layers cut, alone, on replicas, with rows shared, in
    stages, with tokens apart, and beside shared experts, in stages too."""
    told = ranks(processes).run(
        in_wide, on_ranks, {**asked, "output_dir": str(tmp_path / "out"), "parallel": parallel}, {}
    )
    assert [status for status, *_ in told] == ["done"] * processes, told
    same(tmp_path / "out", whole)


def test_a_run_in_stages_that_is_stopped_goes_on_on_one_device_and_on_shared_experts_beside_cut_layers(
    asked: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    alone = {**asked, "output_dir": str(tmp_path / "out")}
    staged = {**alone, "parallel": {"pipeline": 2}, "gradient_checkpointing": True}
    assert ranks(2).run(in_wide, heard, staged, "", 2, {})[0][0] == "interrupted"
    assert in_wide(0, heard, alone, "", 3, {"resume": True})[0] == "interrupted"
    cut = {**alone, "parallel": {"tensor": 2}}
    assert ranks(2).run(in_wide, heard, cut, None, 0, {"resume": True})[0][0] == "done"
    same(tmp_path / "out", whole)


@pytest.mark.soak
def test_a_run_in_stages_that_is_stopped_goes_on_on_one_device_on_a_sharded_base_and_on_cut_layers(
    asked: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    """Stopped on two stages whose experts are shared out, in the soak on one device and on four that share out the experts and
    rows of all, and ended on four that share out the experts, of which two and two hold the other layers together."""
    alone = {**asked, "output_dir": str(tmp_path / "out")}
    staged = {**alone, "parallel": {"pipeline": 2, "expert": 2}, "gradient_checkpointing": True}
    assert ranks(4).run(in_wide, heard, staged, "", 2, {})[0][0] == "interrupted"
    if SOAK:
        assert in_wide(0, heard, alone, "", 3, {"resume": True})[0] == "interrupted"
        sharded = {**alone, "parallel": {"expert": 2, "shard_base": 2}}
        assert ranks(4).run(in_wide, heard, sharded, "", 2, {"resume": True})[0][0] == "interrupted"
    cut = {**alone, "parallel": {"tensor": 2, "expert": 2}}
    assert ranks(4).run(in_wide, heard, cut, None, 0, {"resume": True})[0][0] == "done"
    same(tmp_path / "out", whole)


# --- what is predicted -------------------------------------------------------------------------------------------------


def test_the_plan_knows_layouts_of_models_with_experts(asked: dict[str, Any]) -> None:
    """All that training may choose or be asked for; what sharing rows of the experts that a device has saves; layers that cost
    unlike much."""

    def rows(**parallel: Any) -> list[LayoutFigures]:
        found = make_plan(Run.model_validate({**asked, "parallel": parallel}), gpus=4).layouts
        assert found is not None
        return found.rows

    found = {(row.shard, row.pipeline, row.expert) for row in rows()}
    assert found >= {(1, 1, 1), (4, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)}
    (piped,), (staged, _) = rows(expert=2, pipeline=2), rows(pipeline=2)
    assert (piped.status, piped.devices_per_job) == ("taken, pipeline of 2, experts on 2", 4)
    assert piped.bytes < staged.bytes and piped.seconds < 2 * staged.seconds
    (both,), (_, replicas) = rows(expert=2, shard_base=True), rows(expert=2)
    assert (both.status, both.taken, both.devices_per_job) == ("taken, shard 2, experts on 2", True, 4)
    (cut,) = rows(tensor=2, expert=2)
    assert (cut.status, cut.devices_per_job) == ("taken, tensor 2, experts on 2", 4) and cut.bytes < replicas.bytes
    model = tiny_experts("qwen3_moe", **SHAPE)
    in_layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim > 1)
    held = 8 * (in_layers - sum(p.numel() for p in model.parameters() if p.ndim == 3) / 2)
    others = 8 * sum(p.numel() for p in model.parameters()) - 8 * in_layers
    saved = (held + others) / 2 - 2 * held / 3 - others
    assert replicas.bytes - both.bytes == pytest.approx(saved, abs=0.01 * both.bytes)
    prepared = prepare(Run.model_validate(asked))
    shape = replace(prepared.shape, layers=4, vocabulary=1, layer_numbers=((100, 90), (100, 10), (100, 10), (100, 10)))
    unlike = replace(prepared, shape=shape)
    assert profiler.stage_layers(prepared.run, unlike, 2) == (1, 3)
    assert profiler.planning_cost(prepared.run, unlike, 2).stage_shares == (0.75, 0.25)
    assert profiler.largest_stage(prepared.run, unlike, 2) == 0.75
    few = tiny_experts("qwen3_moe", **SHAPE).model.layers
    numbers = [(sum(p.numel() for p in layer.parameters()), linear_of(layer)) for layer in few]
    assert prepared.shape.layer_numbers == tuple(numbers)


def linear_of(layer: torch.nn.Module) -> int:
    """Numbers of the weights of two or more dimensions that one token meets, without the router's: of experts two in eight."""
    own = {name: p for name, p in layer.named_parameters() if p.ndim > 1 and ".gate.weight" not in name}
    return sum(p.numel() * (2 if p.ndim == 3 else 8) // 8 for p in own.values())
