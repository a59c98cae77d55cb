"""packlora.accelerate under DeepSpeed itself, on two processes of a CPU, where it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from wrapped import Case, adapted, data, difference

import packlora

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]


def life(rank: int, stage: int, dora: bool, when: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Outputs, losses and parameters of three steps, and the report."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    model, report = adapted(Case("none", dora=dora, dtype=torch.float32)), None
    if when == "before":
        report = packlora.accelerate(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    settings = {
        "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if when == "after":
        report = packlora.accelerate(engine)
    found = {}
    for step in range(3):
        out = engine(input_ids=data(rank, step), labels=data(rank, step))
        engine.backward(out.loss)
        engine.step()
        found |= {f"{step} logits": out.logits.detach().clone(), f"{step} loss": out.loss.detach().clone()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return found | {name: safe_get_full_fp32_param(p).clone() for name, p in trained.items()}, report


def both(rank: int, stage: int, dora: bool, when: str) -> tuple[Any, list[Any], int, int]:
    with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}):
        import deepspeed

        deepspeed.init_distributed("gloo", dist_init_required=False)
        want, _ = life(rank, stage, dora, "")
        got, report = life(rank, stage, dora, when)
    calls = [(one.served, dict(one.left)) for one in report.served().values()]
    return difference(got, want), calls, report.accelerated, len(report.groups)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_1_and_2_are_computed_here_and_zero_3_by_peft(
    stage: int, dora: bool, when: str, ranks: Callable[[int], Ranks]
) -> None:
    """DeepSpeed's parameters are float32, and so are its errors."""
    for (worst, where), calls, accelerated, groups in ranks(2).run(both, stage, dora, when):
        assert worst <= (1e-5 if stage < 3 else 0.0), where
        if stage < 3:
            assert calls == [(3, {})] * 14
            assert (accelerated, groups) == (14, 4)
        else:
            assert {served for served, _ in calls} == {0}
            assert all("ZeRO-3; ZeRO-2 and FSDP2 are computed here" in reason for _, left in calls for reason in left)
            assert accelerated == (14 if when == "before" else 0)
