"""packlora.accelerate under DeepSpeed itself, on two processes of a CPU, where it is installed.

DeepSpeed's parameters are float32, and so are its errors.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from conftest import tiny_model
from ranks import Ranks
from test_accelerate_trainer import AtBegin
from transformers.models.llama.modeling_llama import LlamaMLP
from wrapped import SMALL, Case, adapted, clean, data, difference

import packlora

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"),
    pytest.mark.filterwarnings("ignore"),
]
SETTINGS = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
REASON = "ZeRO-3; ZeRO-2 and FSDP2 are computed here"


@dataclass(frozen=True)
class Zero:
    """A training of three steps.

    when: accelerate() gets the model "before" DeepSpeed does, "loaded" in parts as from_pretrained loads it under ZeRO-3, or
        what DeepSpeed has made of it, "after".
    leaves: feed-forwards are gathered whole, by DeepSpeed's set_z3_leaf_modules.
    kept: the number of elements up to which ZeRO-3 leaves parameters whole.
    """

    stage: int
    when: str
    dora: bool = False
    leaves: bool = False
    kept: int = 0
    accumulate: int = 1
    checkpointing: str = ""
    compiled: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        plain = vars(Zero(0, ""))
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value != plain[name])


def life(rank: int, case: Zero, accelerated: bool) -> tuple[dict[str, torch.Tensor], Any]:
    """Outputs, losses and parameters, and the report."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, set_z3_leaf_modules

    torch._dynamo.reset()
    settings = SETTINGS | {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": case.accumulate,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": case.kept},
    }  # fmt: skip
    when, report = case.when if accelerated else "", None
    model = adapted(Case("none", dora=case.dora, dtype=torch.float32, checkpointing=case.checkpointing))
    if case.leaves:
        set_z3_leaf_modules(model, [LlamaMLP])
    if case.when == "loaded":
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    if when in ("before", "loaded"):
        report = packlora.accelerate(model, **case.options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if when == "after":
        report = packlora.accelerate(engine, **case.options)
    if accelerated and case.compiled:
        engine.compile(backend="aot_eager")
    found = {}
    for step in range(3):
        for part in range(case.accumulate):
            out = engine(input_ids=data(rank, step, part), labels=data(rank, step, part))
            engine.backward(out.loss)
            engine.step()
            found[f"{step}.{part} logits"] = out.logits.detach().clone()
            found[f"{step}.{part} loss"] = out.loss.detach().clone()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return found | {name: safe_get_full_fp32_param(p).clone() for name, p in trained.items()}, report


@dataclass(frozen=True)
class Found:
    """On one rank. reasons: of modules that the report does not call accelerated. calls: by module, here and of PEFT."""

    worst: tuple[float, str]
    accelerated: int
    groups: int
    reasons: set[str | None]
    calls: dict[str, tuple[int, dict[str, int]]]


def compared(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], report: Any) -> Found:
    calls = {path: (one.served, dict(one.left)) for path, one in report.served().items()}
    reasons = {module.reason for module in report.modules if not module.accelerated}
    return Found(difference(got, want), report.accelerated, len(report.groups), reasons, calls)


def both(rank: int, case: Zero) -> Found:
    with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}):
        import deepspeed

        deepspeed.init_distributed("gloo", dist_init_required=False)
        want, _ = life(rank, case, False)
        got, report = life(rank, case, True)
    return compared(got, want, report)


SERVED = [Zero(stage, when, dora) for stage in (1, 2) for dora in (False, True) for when in ("before", "after")] + [
    Zero(2, "before", True, accumulate=2, options={"recompute": True, "keep_outputs": True}),
    Zero(2, "after", True, accumulate=2, checkpointing="reentrant"),
    Zero(2, "before", compiled=True),
]


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_zero_1_and_2_are_computed_here(case: Zero, ranks: Callable[[int], Ranks]) -> None:
    calls = 0 if case.compiled else 3 * case.accumulate * (2 if case.checkpointing else 1)
    for found in ranks(2).run(both, case):
        assert found.worst[0] <= 1e-5, found.worst
        assert (found.accelerated, found.groups, found.reasons) == (14, 4, set())
        assert list(found.calls.values()) == [(calls, {})] * 14


LEFT = [
    Zero(3, when, dora, kept=kept)
    for dora in (False, True) for when, kept in (("before", 0), ("before", 500), ("loaded", 0), ("after", 0), ("after", 10**5))
] + [Zero(3, "after", True, checkpointing="non", options={"recompute": True, "keep_outputs": True})]  # fmt: skip


@pytest.mark.parametrize("case", LEFT, ids=str)
def test_zero_3_is_computed_by_peft(case: Zero, ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(both, case):
        assert found.worst[0] == 0.0, found.worst
        assert {served for served, _ in found.calls.values()} == {0}
        assert all(REASON in reason for _, left in found.calls.values() for reason in left)
        assert found.accelerated == (14 if case.when == "before" else 0)
        assert all(REASON in str(reason) for reason in found.reasons)


@pytest.mark.parametrize("case", [Zero(3, "before", True, True), Zero(3, "after", False, True)], ids=str)
def test_what_zero_3_gathers_whole_is_computed_here(case: Zero, ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(both, case):
        assert found.worst[0] <= 1e-5, found.worst
        assert found.accelerated == (14 if case.when == "before" else 6)
        for path, (served, left) in found.calls.items():
            assert (served, sum(left.values())) == ((3, 0) if ".mlp." in path else (0, 3))


def fit(zero: int, when: str, base: Path, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Losses, norms of gradients and parameters of transformers' Trainer, and the report. Under ZeRO-3 from_pretrained gives
    each process a part of the model."""
    from deepspeed.utils import safe_get_full_fp32_param
    from peft import LoraConfig, get_peft_model

    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, learning_rate=1e-2,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, seed=1, optim="sgd",
        lr_scheduler_type="constant", dataloader_pin_memory=False,
        deepspeed=SETTINGS | {
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": zero},
        },
    )  # fmt: skip
    torch.manual_seed(3)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(loaded, LoraConfig(r=3, lora_alpha=5, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, SMALL["vocab_size"], (9,), generator=generator) for _ in range(24)]
    report: Any = packlora.accelerate(model) if when == "before" else None
    begin = AtBegin()
    train: Any = [{"input_ids": row, "labels": row} for row in rows]
    callbacks: Any = [begin] if when == "begin" else []
    begin.trainer = trainer = transformers.Trainer(model, arguments, train_dataset=train, callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {f"{i} {key}": torch.tensor(log[key]) for i, log in enumerate(logs) for key in ("loss", "grad_norm")}
    trained = {name: p for name, p in trainer.model_wrapped.named_parameters() if p.requires_grad}
    found |= {clean(name): safe_get_full_fp32_param(p).clone() for name, p in trained.items()}
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return found, report or begin.report


def both_trainers(rank: int, zero: int, when: str, base: Path, folder: Path) -> Found:
    with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}):
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
        want, _ = fit(zero, "", base, folder)
        got, report = fit(zero, when, base, folder)
    return compared(got, want, report)


@pytest.mark.parametrize(("zero", "when"), [(2, "before"), (2, "begin"), (3, "before"), (3, "begin")])
def test_the_trainer_with_deepspeed(zero: int, when: str, ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    tiny_model("llama", torch.float32, **SMALL).save_pretrained(tmp_path / "base")
    for found in ranks(2).run(both_trainers, zero, when, tmp_path / "base", tmp_path / "out"):
        assert found.worst[0] <= (1e-5 if zero == 2 else 0.0), found.worst
        assert found.accelerated == (14 if zero == 2 else 0)
        assert [served for served, _ in found.calls.values()] == [6 if zero == 2 else 0] * 14
        assert all(REASON in str(reason) for reason in found.reasons)
