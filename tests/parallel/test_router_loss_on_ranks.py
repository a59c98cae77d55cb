"""The load-balancing loss of a job whose samples are on several processes, and of a base model of which each has a part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import rows_into
from expert_models import in_float64, tiny_experts
from ranks import Ranks
from seeds import SOAK
from test_replicas import on_ranks
from test_training import adapter, config, distance, steps

import packlora

Groups = Callable[[int], Ranks]
JOBS = [
    {
        "name": name, "adapter": {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "o_proj"], **own},
        "train": {"global_batch_size": 3, "max_steps": 2, "learning_rate": 1e-2, "router_aux_loss_coef": coefficient},
    }
    for name, coefficient, own in (("much", 3.0, {}), ("model", None, {"use_dora": True}))
]  # fmt: skip


LAYOUTS = {"rows": {"shard_base": True}, "cut": {"tensor": 2}} | ({"replicas": {"devices_per_job": 2}} if SOAK else {})
"""With rows that are shared each process has samples of its own, too."""


@pytest.fixture(scope="module")
def tree(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a model whose configuration has a coefficient."""
    folder = tmp_path_factory.mktemp("routed")
    model = tiny_experts("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.7)
    model.save_pretrained(folder / "base", save_original_format=False)
    tokenizer.save_pretrained(folder / "base")
    more = {"dtype": "float64", "max_tokens_per_microbatch": 70, "gradient_checkpointing": True}
    return config(str(folder / "base"), folder / "whole", rows_into(folder), JOBS, **more)


def in_wide(rank: int, asked: dict[str, Any]) -> Any:
    with in_float64():
        return on_ranks(rank, asked, {})


def told(out: Path) -> dict[tuple[str, int], tuple[float, float]]:
    return {(line["job"], line["step"]): (line["loss"], line.get("aux_loss", 0.0)) for line in steps(out)}


def test_two_processes_give_what_one_device_gives(tree: dict[str, Any], ranks: Groups, tmp_path: Path) -> None:
    whole = Path(tree["output_dir"])
    with in_float64():
        packlora.train(tree)
    assert {name for (name, _), (_, aux) in told(whole).items() if aux} == {"much", "model"}
    for name, parallel in LAYOUTS.items():
        asked = {**tree, "output_dir": str(tmp_path / name), "parallel": parallel}
        assert [status for status, *_ in ranks(2).run(in_wide, asked)] == ["done"] * 2
        for job in ("much", "model"):
            assert distance(adapter(tmp_path / name, job), adapter(whole, job)) <= 1e-10, (name, job)
        ours, theirs = told(tmp_path / name), told(whole)
        assert ours.keys() == theirs.keys()
        for key, values in theirs.items():
            assert ours[key] == pytest.approx(values, rel=1e-10), (name, key)
