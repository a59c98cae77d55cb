"""Training with measured plans: whatever was measured fastest, every microbatch is computed, with the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_training import adapter, config, distance, train

import packlora
from packlora.ops.lora_linear.plan import CHAIN, Plan, named_plan
from packlora.plans.cache import PlanCache, Record

Rows = Callable[..., str]
Base = Callable[..., str]

FASTEST = (named_plan("forward1-backward2"), named_plan("forward1-backward3"), named_plan("base-added"))
"""In this order, of those that are legal."""
JOBS: list[dict[str, Any]] = [
    {"name": "plain", "adapter": {"r": 4}, "train": {"global_batch_size": 3, "num_train_epochs": 2}},
    {"name": "dora", "adapter": {"r": 3, "use_dora": True}, "train": {"global_batch_size": 6}},
]


def slow_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything has been measured, and the plain chain was slow."""
    ms = {CHAIN.name: 9.0, **{plan.name: float(at) for at, plan in enumerate(FASTEST, 1)}}
    monkeypatch.setattr(PlanCache, "get", lambda self, key: Record(ms))


def used(out: Path) -> set[str]:
    """Names of the plans of a run."""
    return {line["plan"] for line in json.loads((out / "run.json").read_text())["plans"]}


@pytest.mark.parametrize("method", [pytest.param("solo", marks=pytest.mark.soak), "auto"])
def test_a_plain_job_trains_by_measured_plans_where_a_dora_job_is_attached_and_absent(
    method: str, tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With microbatches of its own, and after the DoRA job has ended."""
    tree = config(tiny_base(), tmp_path / "chain", write_rows, JOBS, dtype="float64", schedule={"method": method})
    train(tree)
    assert used(tmp_path / "chain") == {CHAIN.name}
    slow_chain(monkeypatch)
    train({**tree, "output_dir": str(tmp_path / "tuned")})
    assert FASTEST[0].name in used(tmp_path / "tuned")
    for job in JOBS:
        assert distance(adapter(tmp_path / "tuned", job["name"]), adapter(tmp_path / "chain", job["name"])) < 1e-10


def test_a_plain_job_that_goes_on_alone_with_more_epochs_trains_by_measured_plans(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_chain(monkeypatch)
    jobs = json.loads(json.dumps(JOBS))
    jobs[0]["train"] |= {"num_train_epochs": 1, "lr_scheduler_type": "constant"}
    tree = config(tiny_base(), tmp_path / "out", write_rows, jobs, save_every=1)
    train(tree)
    tree["jobs"][0]["train"]["num_train_epochs"] = 2
    result = train(tree, resume=True)
    assert result.jobs["plain"].step == 8
    assert FASTEST[0].name in used(tmp_path / "out")


def test_a_plan_asked_of_accelerate_gives_way_on_layers_that_it_does_not_compute() -> None:
    """Merged weights are for LoRA without dropout: on DoRA, under dropout and in a compiled graph the report names, and the
    layer runs, the plain chain."""
    merged = Plan(up="merged", dx="merged", keep_s=False)
    x = torch.randn(5, 8, dtype=torch.float64)
    for kwargs in ({}, {"use_dora": True}, {"lora_dropout": 0.3}):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(8, 6, dtype=torch.float64))
        settings = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False, **kwargs)
        model = get_peft_model(module, settings, autocast_adapter_dtype=False)
        want = gradients(model.eval(), x)
        report = packlora.accelerate(model.train(), plan=merged, example={"input": x})
        model.eval()
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(gradients(model, x), want, strict=True))
        compiled = torch.compile(model, backend="eager")
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(gradients(compiled, x), want, strict=True))
        model.train()
        gradients(model, x)
        assert report.modules[0].plan == (merged.name if not kwargs else Plan(keep_s=False).name)


def gradients(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    leaves = [leaf, *(p for p in model.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]
