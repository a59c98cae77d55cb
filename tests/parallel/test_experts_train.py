"""`packlora.train` with `parallel: {expert: N}`: processes that hold some of the experts each train what one device trains, and
leave what one device leaves. In float64, routers and norms too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import rows_into
from expert_models import in_float64, tiny_experts
from ranks import Ranks
from test_replicas import lines, on_ranks
from test_training import adapter, config, distance

import packlora

Groups = Callable[[int], Ranks]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
JOBS = [
    {
        "name": "lora", "train": {"max_steps": 3, "global_batch_size": 4, "learning_rate": 1e-2, "max_grad_norm": 0.3},
        "adapter": {"r": 3, "lora_dropout": 0.2, "target_modules": "all-linear"},
    },
    {
        "name": "dora", "train": {"max_steps": 3, "global_batch_size": 2, "learning_rate": 1e-2, "weight_decay": 0.1},
        "adapter": {
            "r": 5, "lora_dropout": 0.1, "use_dora": True, "target_modules": ["v_proj"],
            "target_parameters": [*BOTH, "gate.weight"], "init_lora_weights": False,
        },
    },
    {
        "name": "others", "train": {"max_steps": 3, "global_batch_size": 2, "learning_rate": 1e-2},
        "adapter": {
            "r": 2, "lora_dropout": 0.0, "use_rslora": True, "target_modules": ["embed_tokens", "o_proj"],
            "target_parameters": ["experts.down_proj", "gate.weight"], "modules_to_save": ["norm"],
        },
    },
]  # fmt: skip


def saved(folder: Path, tokenizer: Any, one_rank: bool = False, **changes: Any) -> str:
    """A tiny Qwen3-MoE whose files have each expert apart. one_rank: all tokens go to one of the first two experts."""
    model = tiny_experts("qwen3_moe", **changes)
    with torch.no_grad():
        for layer in model.model.layers if one_rank else ():
            layer.mlp.gate.weight[1] = -layer.mlp.gate.weight[0]
            layer.mlp.gate.weight[2:] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def tree(base: str, out: Path, rows: Any, jobs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    found = config(base, out, rows, jobs, dtype="float64", max_tokens_per_microbatch=90, **more)
    for job in found["jobs"][:2]:
        job["data"]["eval_path"] = job["data"]["path"]
    return found | {"eval_every": 2, "save_every": 1, "save_total_limit": None}


def in_wide(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    with in_float64():
        return function(rank, *args)


@pytest.fixture(scope="module")
def asked(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("experts")
    return tree(saved(folder / "base", tokenizer), folder / "whole", rows_into(folder), JOBS)


@pytest.fixture(scope="module")
def whole(asked: dict[str, Any]) -> Path:
    """The run on one device."""
    with in_float64():
        packlora.train(asked)
    return Path(asked["output_dir"])


def same(out: Path, whole: Path, jobs: list[dict[str, Any]] = JOBS) -> None:
    for kind in ("metrics", "evals"):
        found, wanted = ({(line["job"], line["step"]): line for line in lines(one, kind)} for one in (out, whole))
        assert found.keys() == wanted.keys()
        for key, line in wanted.items():
            for name in ("loss", "eval_loss", "grad_norm"):
                if name in line:
                    assert abs(found[key][name] - line[name]) <= 1e-10 * max(1, abs(line[name])), (key, name)
    for job in jobs:
        assert distance(adapter(out, job["name"]), adapter(whole, job["name"])) <= 1e-10


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [(2, {"expert": 2}), pytest.param(4, {"expert": 2, "devices_per_job": 4}, marks=pytest.mark.soak),
     pytest.param(4, {"expert": 2, "devices_per_job": 2}, marks=pytest.mark.soak),
     pytest.param(3, {"expert": 3}, marks=pytest.mark.soak)],
)  # fmt: skip
def test_a_run_gives_what_one_device_gives(
    processes: int, parallel: dict[str, Any], asked: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    told = ranks(processes).run(in_wide, on_ranks, {**asked, "output_dir": str(out), "parallel": parallel}, {})
    assert [status for status, *_ in told] == ["done"] * processes, told
    same(out, whole)
