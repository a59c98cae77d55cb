"""packlora.accelerate under TRL's GRPOTrainer: a run without it is the oracle, in float64, with the same seeds.

A step of GRPO changes what a layer computes several times: generation with a cache, log-probabilities without gradients, the
reference with the adapter disabled or another one active, then forward and backward.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_model
from peft import LoraConfig, get_peft_model

import packlora
from packlora.live.adapter import DISABLED, MERGED

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]
STEPS = 4
PROBE = torch.arange(5, 17)[None]


class Rows(list[dict[str, Any]]):
    """What GRPOTrainer reads of a Dataset."""

    cache_files = ()

    @classmethod
    def from_list(cls, rows: list[dict[str, Any]]) -> Rows:
        return cls(rows)


@pytest.fixture(scope="module")
def trl() -> Iterator[Any]:
    """Module of GRPOTrainer. It names two libraries that these runs do not need: where they are not installed, modules of empty
    classes take their places during the import."""
    others = {name: type(name, (), {}) for name in ("DatasetDict", "IterableDataset", "IterableDatasetDict")}
    names = {"datasets": {"Dataset": Rows} | others, "pandas": {"DataFrame": object}}
    with pytest.MonkeyPatch.context() as patch:
        for name, classes in names.items():
            if importlib.util.find_spec(name) is None:
                module: Any = ModuleType(name)
                module.__spec__ = ModuleSpec(name, None)
                module.__dict__.update(classes)
                patch.setitem(sys.modules, name, module)
        from trl.trainer import grpo_trainer

        yield grpo_trainer


@dataclass(frozen=True)
class Case:
    """own: the model is PEFT's before the trainer gets it, which adds an adapter `ref` to it. options: of accelerate."""

    lora: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    own: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """completions: texts that the reward was given. probes: what a callback computed. logs, parameters: of the trainer."""

    completions: list[str] = field(default_factory=list)
    probes: list[torch.Tensor] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    report: Any = None


class Probe(transformers.TrainerCallback):
    """After each step: logits merged, unmerged and in eval mode, a graph that gets no backward, greedy generation."""

    def __init__(self, found: Found) -> None:
        self.found = found

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        model.merge_adapter()
        with torch.no_grad():
            self.found.probes.append(model(input_ids=PROBE).logits)
        model.unmerge_adapter()
        model.eval()
        self.found.probes.append(model(input_ids=PROBE).logits.detach())
        with torch.inference_mode():
            self.found.probes.append(model.generate(input_ids=PROBE, max_new_tokens=3, do_sample=False).clone())
        model.train()


def words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(320)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def run(
    trl: Any,
    case: Case,
    accelerated: bool,
    folder: Path,
    probed: bool = False,
    resume: bool = False,
    steps: int = STEPS,
) -> Found:
    found = Found()

    def reward(completions: list[str], **_: Any) -> list[float]:
        found.completions.extend(completions)
        return [sum(int(word[1:]) % 7 for word in text.split()) / 10 for text in completions]

    model = tiny_model("llama", torch.float64)
    model.set_attn_implementation("sdpa")  # the eager one has NaN in rows of padding in float64
    torch.manual_seed(3)
    lora = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | case.lora
    )
    if case.own:
        model = get_peft_model(model, lora)
        if accelerated:
            found.report = packlora.accelerate(model, **case.options)
    rows = [{"prompt": " ".join(f"w{7 * n + 3 * k + 10}" for k in range(3 + n % 4))} for n in range(16)]
    settings: dict[str, Any] = {
        "max_steps": steps, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6,
        "learning_rate": 3e-3, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [], "use_cpu": True,
        "bf16": False, "seed": 1, "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    trainer = trl.GRPOTrainer(
        model, reward, trl.GRPOConfig(str(folder), **settings | case.settings), processing_class=words(),
        train_dataset=trl.Dataset.from_list(rows), peft_config=None if case.own else lora,
        callbacks=[Probe(found)] if probed else None,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.create_model_card = lambda **_: None
    if accelerated and not case.own:
        found.report = packlora.accelerate(trainer.model, **case.options)
    trainer.train(resume_from_checkpoint=resume)
    timed = ("time", "runtime", "per_second")
    found.logs = [
        {key: value for key, value in log.items() if not any(part in key for part in timed)}
        for log in trainer.state.log_history
    ]
    found.parameters = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}
    return found


def agree(got: Found, want: Found) -> None:
    assert got.completions == want.completions and len(set(want.completions)) > 8
    assert len(got.logs) == len(want.logs) and all(log["grad_norm"] > 1e-3 for log in want.logs if "loss" in log)
    for own, other in zip(got.logs, want.logs, strict=True):
        assert own == pytest.approx(other, rel=1e-10, abs=1e-10)
    assert got.parameters.keys() == want.parameters.keys()
    for name, parameter in got.parameters.items():
        torch.testing.assert_close(parameter, want.parameters[name], rtol=1e-10, atol=1e-10, msg=name)
    assert len(got.probes) == len(want.probes)
    for own, other in zip(got.probes, want.probes, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


CASES = {
    "kl to the base": Case(settings={"beta": 0.1, "num_iterations": 2}),
    "kl to a copy": Case(settings={"beta": 0.1}, own=True),
    "kl to a copy, dora, checkpointed": Case(
        {"use_dora": True}, {"beta": 0.1, "gradient_checkpointing": True, "num_iterations": 2}, own=True
    ),
    "reentrant, two microbatches": Case(
        settings={
            "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
            "gradient_accumulation_steps": 2,
        },
    ),
    "dora, recomputed and kept": Case(
        {"use_dora": True}, {"beta": 0.1}, options={"recompute": True, "keep_outputs": True}
    ),
}  # fmt: skip


SOONER = ("kl to the base", "kl to a copy")
"""Each has a case below that does more."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(own, marks=[pytest.mark.soak] * (name in SOONER)) for name, own in CASES.items()], ids=CASES
)
def test_grpo_has_the_completions_rewards_losses_and_adapters_of_a_run_without(
    case: Case, trl: Any, tmp_path: Path
) -> None:
    want, got = (run(trl, case, accelerated, tmp_path, probed=True) for accelerated in (False, True))
    agree(got, want)
    assert (got.report.accelerated, len(got.report.groups)) == (14, 4)
    for calls in got.report.served().values():
        assert calls.served > 10 and calls.left.keys() <= {DISABLED, MERGED}
        assert (DISABLED in calls.left) == (case.settings.get("beta", 0) > 0 and not case.own)


def test_a_checkpoint_of_either_run_goes_on_in_the_other(trl: Any, tmp_path: Path) -> None:
    case = Case({"use_dora": True}, {"beta": 0.1, "save_strategy": "steps", "save_steps": 2})
    whole = run(trl, case, False, tmp_path / "whole")
    for first in (False, True):
        folder = tmp_path / str(first)
        half = run(trl, case, first, folder, steps=2)
        rest = run(trl, case, not first, folder, resume=True)
        rest.completions[:0] = half.completions
        rest.logs, want = ([log for log in logs if "loss" in log] for logs in (rest.logs, whole.logs))
        agree(rest, Found(whole.completions, [], want, whole.parameters))
