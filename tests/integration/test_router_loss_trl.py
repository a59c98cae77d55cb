"""The load-balancing loss of completions and preferences against TRL's own trainers; where TRL is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import tiny_experts
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from test_preference import judged, pairs
from test_preference_trl import ROWS, inputs_of
from test_training import config, steps
from transformers import AutoModelForCausalLM, AutoTokenizer

import packlora
from packlora.config import Run
from packlora.runtime.prepare import prepare

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

LORA = LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
KINDS: dict[str, dict[str, Any]] = {
    "sft": {"global_batch_size": 3, "router_aux_loss_coef": 0.5},
    "dpo": {"global_batch_size": 3, "router_aux_loss_coef": 0.7, "loss_type": "ipo"},
    "orpo": {"global_batch_size": 1, "beta": 0.4},
    "kto": {"global_batch_size": 3, "router_aux_loss_coef": 0.3, "loss_type": "apo_zero_unpaired"},
}


def trainer_of(base: str, kind: str, out: Path) -> Any:
    own = {key: value for key, value in KINDS[kind].items() if key != "global_batch_size"}
    common = {
        "output_dir": str(out), "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "gradient_accumulation_steps": 3, "per_device_train_batch_size": 1,
    }  # fmt: skip
    if kind == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        classes = ORPOConfig, ORPOTrainer
    else:
        classes = getattr(trl, f"{kind.upper()}Config"), getattr(trl, f"{kind.upper()}Trainer")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, experts_implementation="eager")
    rows = datasets.Dataset.from_list([{"prompt": "the", "completion": " fox"} if kind == "sft" else ROWS[kind]] * 3)
    arguments = {"train_dataset": rows, "processing_class": AutoTokenizer.from_pretrained(base), "peft_config": LORA}
    return classes[1](model=model, args=classes[0](**common, **own), **arguments)


def loss_of(trainer: Any, kind: str, batch: list[Any]) -> torch.Tensor:
    """Of a global batch, a sample a forward, as the trainer takes it by gradient accumulation."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = len(batch)
    total = torch.zeros(())
    for sample in batch:
        if kind == "sft":
            ids = torch.from_numpy(sample.ids).long()[None]
            labels = ids.where(torch.from_numpy(sample.is_label), -100)
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
            number = torch.tensor(sum(one.num_labels for one in batch))
            total = total + trainer.compute_loss(trainer.model, given, num_items_in_batch=number)
        elif kind == "orpo":
            total = total + trainer.get_batch_loss_metrics(trainer.model, inputs_of(kind, [sample]))[0]
        else:
            total = total + trainer._compute_loss(trainer.model, inputs_of(kind, [sample]), False) / len(batch)
    return total


def test_losses_and_gradients_are_those_of_trl(
    tokenizer: Any, write_rows: Callable[..., str], tmp_path: Path
) -> None:  # fmt: skip
    """A pair is one forward of both completions to TRL, and one sample here."""
    base, out = str(tmp_path / "base"), tmp_path / "out"
    model = tiny_experts("mixtral", torch.float32, output_router_logits=True, router_aux_loss_coef=0.2)
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    data = {"sft": write_rows("rows"), "kto": judged(tmp_path / "said.jsonl")}
    data["dpo"] = data["orpo"] = pairs(tmp_path / "pairs.jsonl")
    jobs = [
        {
            "name": kind, "data": {"path": data[kind]}, "train": {"trainer": kind, "max_steps": 2, **own},
            "adapter": {"r": 4, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
        }
        for kind, own in KINDS.items()
    ]  # fmt: skip
    asked = config(base, out, write_rows, jobs, max_tokens_per_microbatch=300, save_every=1, save_total_limit=None)
    packlora.train(asked)
    for job in prepare(Run.model_validate(asked)).jobs:
        kind = job.config.name
        trainer = trainer_of(base, kind, tmp_path / "trl")
        set_peft_model_state_dict(trainer.model, load_file(out / kind / "checkpoint-1" / "adapter_model.safetensors"))
        loss = loss_of(trainer, kind, [job.data.samples[n] for n in job.data.global_batch(1)])
        (line,) = [line for line in steps(out) if line["job"] == kind and line["step"] == 2]
        assert line["loss"] == pytest.approx(float(loss.detach()), rel=2e-5), kind
        wanted = [p for p in trainer.model.parameters() if p.requires_grad]
        norm = torch.stack([g.norm() for g in torch.autograd.grad(loss, wanted)]).norm()
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-4), kind
