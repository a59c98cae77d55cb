"""packlora.accelerate under the Trainers of transformers and TRL on two processes, with DDP and with FSDP2."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from peft.tuners.lora import Linear as PeftLinear
from ranks import Ranks
from torch._dynamo.eval_frame import OptimizedModule
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
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
NEEDS_TRL = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None, reason="needs TRL"
)
TWICE = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}


@dataclass(frozen=True)
class Training:
    """when: accelerate() gets the model "before" the Trainer does, or what the Trainer has made of it at the "begin".
    trl: by TRL's SFTTrainer, which checkpoints by itself. by_block: each block is compiled, not the model."""

    when: str
    dora: bool
    settings: dict[str, Any]
    kind: type
    trl: bool = False
    by_block: bool = False

    @property
    def calls(self) -> int:
        """Of a layer."""
        return 3 * self.settings.get("gradient_accumulation_steps", 1) * (2 if self.checkpointing else 1)

    @property
    def checkpointing(self) -> bool:
        return self.trl or "gradient_checkpointing" in self.settings


TRAININGS = [
    Training("before", True, {}, DDP),
    Training("begin", False, TWICE, DDP),
    Training("before", False, FSDP2 | TWICE, FSDPModule),
    Training("begin", True, FSDP2, FSDPModule),
    Training("before", True, LOADED_BY_ONE, FSDPModule),
    pytest.param(Training("before", True, COMPILED, OptimizedModule), marks=pytest.mark.soak),
    pytest.param(Training("before", False, COMPILED, DDP, by_block=True), marks=pytest.mark.soak),
    pytest.param(Training("before", False, COMPILED | FSDP2, FSDPModule), marks=pytest.mark.soak),
    pytest.param(Training("before", True, {}, DDP, trl=True), marks=NEEDS_TRL),
    pytest.param(Training("begin", False, FSDP2, FSDPModule, trl=True), marks=NEEDS_TRL),
]


class AtBegin(transformers.TrainerCallback):
    """Accelerates what the Trainer has wrapped."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.report: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.report = packlora.accelerate(self.trainer.model_wrapped)


def sft() -> tuple[Any, Any]:
    """What makes the arguments of TRL's SFTTrainer, and the trainer."""
    import datasets
    import trl
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(SMALL["vocab_size"])}, "w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")

    def trainer(model: Any, arguments: Any, train_dataset: Any, callbacks: Any) -> Any:
        rows = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in train_dataset])
        return trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks)

    return functools.partial(trl.SFTConfig, bf16=False, dataset_kwargs={"skip_prepare_dataset": True}), trainer


def fit(training: Training, accelerated: bool, folder: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Losses, norms of gradients, and parameters; and the report."""
    model = adapted(Case("none", dora=training.dora))
    report: Any = packlora.accelerate(model) if accelerated and training.when == "before" else None
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, SMALL["vocab_size"], (9,), generator=generator) for _ in range(24)]
    make_arguments, make_trainer = sft() if training.trl else (transformers.TrainingArguments, transformers.Trainer)
    arguments = make_arguments(
        folder, per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, seed=1, lr_scheduler_type="constant", dataloader_pin_memory=False, optim="sgd",
        **training.settings,
    )  # fmt: skip
    begin = AtBegin()
    callbacks = [begin] if accelerated and training.when == "begin" else []
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    begin.trainer = trainer = make_trainer(model, arguments, train_dataset=data, callbacks=callbacks)
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


PEFTS = PeftLinear.forward


def not_accelerated(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT's forward, in compiled graphs as well: nobody enters it once a layer is accelerated."""
    assert not hasattr(layer, "_packlora")
    return PEFTS(layer, *args, **kwargs)


def both(rank: int, training: Training, folder: str) -> tuple[tuple[float, str], int, int, list[Any]]:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(training.by_block)
    lives = []
    try:
        for accelerated in (False, True):
            with contextlib.ExitStack() as held:
                if "fsdp" in training.settings:
                    held.enter_context(as_on_gpus())
                if accelerated:
                    held.enter_context(mock.patch.object(PeftLinear, "forward", not_accelerated))
                lives.append(fit(training, accelerated, folder))
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
    finally:
        for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
            del os.environ[name]
    (want, _), (got, report) = lives
    calls = list(report.served().values())
    return difference(got, want), report.accelerated, len(report.groups), [(one.served, one.left) for one in calls]


def named(training: Training) -> str:
    compiled = "compiled " * ("torch_compile" in training.settings) + "by block " * training.by_block
    return f"{compiled}{'SFT ' * training.trl}{training.kind.__name__} {training.when} dora={training.dora}"


@pytest.mark.parametrize("training", TRAININGS, ids=named)
def test_the_trainer_gives_the_numbers_of_peft_and_every_call_is_computed_here(
    training: Training, ranks: Callable[[int], Ranks], tmp_path: Any
) -> None:
    assert said_of("Trainer") == "operator"
    for (worst, where), accelerated, groups, calls in ranks(2).run(both, training, str(tmp_path)):
        assert worst < 1e-10, where
        assert (accelerated, groups) == (14, 4)
        assert [left for _, left in calls] == [{}] * 14
        if "torch_compile" not in training.settings:  # calls in compiled graphs are not counted
            assert {served for served, _ in calls} == {training.calls}
