"""packlora.accelerate under transformers' Trainer on two processes, with DDP and with the accelerate library's FSDP2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from ranks import Ranks
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP
from wrapped import SMALL, Case, adapted, clean, difference, local, said_of

import packlora

FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
    },
}  # fmt: skip
LOADED_BY_ONE = {"fsdp": True, "fsdp_config": FSDP2["fsdp_config"] | {"cpu_ram_efficient_loading": True}}  # type: ignore[operator]
TWICE = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}


@dataclass(frozen=True)
class Training:
    """when: accelerate() gets the model "before" the Trainer does, or what the Trainer has made of it at the "begin"."""

    when: str
    dora: bool
    settings: dict[str, Any]
    kind: type


TRAININGS = [
    Training("before", True, {}, DDP),
    Training("begin", False, TWICE, DDP),
    Training("before", False, FSDP2 | TWICE, FSDPModule),
    Training("begin", True, FSDP2, FSDPModule),
    Training("before", True, LOADED_BY_ONE, FSDPModule),
]


class AtBegin(transformers.TrainerCallback):
    """Accelerates what the Trainer has wrapped."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.report: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.report = packlora.accelerate(self.trainer.model_wrapped)


def fit(training: Training, accelerated: bool, folder: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Losses, norms of gradients, and parameters; and the report."""
    model = adapted(Case("none", dora=training.dora))
    report: Any = packlora.accelerate(model) if accelerated and training.when == "before" else None
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, SMALL["vocab_size"], (9,), generator=generator) for _ in range(24)]
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, seed=1, lr_scheduler_type="constant", dataloader_pin_memory=False, optim="sgd",
        **training.settings,
    )  # fmt: skip
    begin = AtBegin()
    callbacks = [begin] if accelerated and training.when == "begin" else []
    data = [{"input_ids": row, "labels": row} for row in rows]
    begin.trainer = trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert isinstance(trainer.model_wrapped, training.kind)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {f"{i} {key}": torch.tensor(log[key]) for i, log in enumerate(logs) for key in ("loss", "grad_norm")}
    assert len(found) == 6
    found |= {clean(name): local(p) for name, p in trainer.model_wrapped.named_parameters()}
    return found, report or begin.report


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """The accelerate library leaves FSDP away where processes are on CPUs, so it is not told that these are."""

    def cpu(state: PartialState) -> None:
        state.device = torch.device("cpu")

    kinds = ("gloo", DistributedType.MULTI_GPU)
    with (
        mock.patch.object(PartialState, "_prepare_backend", return_value=kinds),
        mock.patch.object(PartialState, "set_device", cpu),
    ):
        yield


def both(rank: int, training: Training, folder: str) -> tuple[tuple[float, str], int, int, list[Any]]:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    lives = []
    try:
        for accelerated in (False, True):
            with as_on_gpus() if "fsdp" in training.settings else contextlib.nullcontext():
                lives.append(fit(training, accelerated, folder))
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
    finally:
        for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
            del os.environ[name]
    (want, _), (got, report) = lives
    calls = list(report.served().values())
    return difference(got, want), report.accelerated, len(report.groups), [(one.served, one.left) for one in calls]


@pytest.mark.parametrize("training", TRAININGS, ids=lambda t: f"{t.kind.__name__} {t.when} dora={t.dora}")
def test_the_trainer_gives_the_numbers_of_peft_and_every_call_is_computed_here(
    training: Training, ranks: Callable[[int], Ranks], tmp_path: Any
) -> None:
    assert said_of("Trainer") == "operator"
    for (worst, where), accelerated, groups, calls in ranks(2).run(both, training, str(tmp_path)):
        assert worst < 1e-10, where
        assert (accelerated, groups) == (14, 4)
        assert calls == [(3 * (4 if "gradient_checkpointing" in training.settings else 1), {})] * 14
