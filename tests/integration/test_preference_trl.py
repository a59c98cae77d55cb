"""Preferences against TRL's own trainers, on the tokens of a run; where TRL is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from test_preference import evals, jobs, parts_of, rotated  # noqa: F401 a fixture
from test_training import config, steps, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from packlora.config import Run
from packlora.data.encode import Sample
from packlora.runtime.prepare import prepare

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

LORA = LoraConfig(
    r=4, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
)
ROWS = {
    "dpo": {"prompt": "the", "chosen": " fox", "rejected": " dog"},
    "orpo": {"prompt": "the", "chosen": " fox", "rejected": " dog"},
    "kto": {"prompt": "the", "completion": " fox", "label": True},
}


def trainer_of(base: str, train_keys: dict[str, Any], out: Path) -> Any:
    """TRL's, with a new adapter on the model in float32."""
    kind = train_keys["trainer"]
    own = {key: value for key, value in train_keys.items() if key in KEYS}
    common = {"output_dir": str(out), "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    if kind == "dpo":
        classes = trl.DPOConfig, trl.DPOTrainer
    elif kind == "kto":
        classes = trl.KTOConfig, trl.KTOTrainer
        common["train_sampling_strategy"] = "sequential"
    else:
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        classes = ORPOConfig, ORPOTrainer
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = datasets.Dataset.from_list([ROWS[kind]] * 2)
    return classes[1](
        model=model, args=classes[0](**common, **own), train_dataset=rows, processing_class=tokenizer, peft_config=LORA
    )


KEYS = (
    "beta",
    "loss_type",
    "loss_weights",
    "label_smoothing",
    "discopop_tau",
    "desirable_weight",
    "undesirable_weight",
)


def inputs_of(kind: str, batch: list[Sample]) -> dict[str, torch.Tensor]:
    """A padded batch as the trainer's collator makes it: chosen parts first, then rejected ones."""
    parts = [parts_of(sample) for sample in batch]
    rows = [own[number] for number in range(len(parts[0])) for own in parts]
    most = max(len(ids) for ids, _, _ in rows)

    def padded(of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(of(row).long(), (0, most - len(row[0]))) for row in rows])

    ids, mask, completion = padded(lambda r: r[0]), padded(lambda r: torch.ones(len(r[0]))), padded(lambda r: r[1])
    if kind == "orpo":
        labels, half = ids.masked_fill(completion == 0, -100), len(batch)
        out = {}
        for name, own in (("chosen", slice(0, half)), ("rejected", slice(half, None))):
            out |= {
                f"{name}_input_ids": ids[own], f"{name}_attention_mask": mask[own], f"{name}_labels": labels[own]
            }  # fmt: skip
        return out
    out = {"input_ids": ids, "attention_mask": mask, "completion_mask": completion}
    if kind == "kto":
        mismatched = inputs_of("", rotated(batch))
        out |= {f"KL_{name}": own for name, own in mismatched.items()}
        out["label"] = torch.tensor([sample.desirable for sample in batch])
    return out


def test_losses_gradients_and_rewards_are_those_of_trl(
    tiny_base: Callable[..., str], write_rows: Callable[..., str], jobs: list[dict[str, Any]], tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    out, base = tmp_path / "out", tiny_base("llama")
    for job in jobs:  # TRL takes no adapter on the output layer
        job["adapter"]["target_modules"] = list(LORA.target_modules)
    tree = config(base, out, write_rows, jobs, max_tokens_per_microbatch=300, save_every=1, save_total_limit=None)
    train(tree)
    prepared = {job.config.name: job for job in prepare(Run.model_validate(tree)).jobs}
    for job in jobs[1:]:
        name, kind = job["name"], job["train"]["trainer"]
        trainer = trainer_of(base, job["train"], tmp_path / "trl")
        data = prepared[name].data

        def loss_of(folder: Path, batch: list[Sample], is_training: bool) -> tuple[Any, dict[str, Any]]:
            state = load_file(folder / "adapter_model.safetensors")
            set_peft_model_state_dict(trainer.model, state)  # noqa: B023
            trainer.model.train(is_training)  # noqa: B023
            given = inputs_of(kind, batch)  # noqa: B023
            if kind == "orpo":  # noqa: B023
                loss, told = trainer.get_batch_loss_metrics(trainer.model, given)  # noqa: B023
                return loss, told
            trainer._metrics["eval"].clear()  # noqa: B023
            loss = trainer._compute_loss(trainer.model, given, False)  # noqa: B023
            return loss, {key: values[-1] for key, values in trainer._metrics["eval"].items()}  # noqa: B023

        loss, _ = loss_of(out / name / "checkpoint-2", [data.samples[n] for n in data.global_batch(2)], True)
        (line,) = [line for line in steps(out) if line["job"] == name and line["step"] == 3]
        assert line["loss"] == pytest.approx(float(loss.detach()), rel=2e-5, abs=1e-6), name
        wanted = [p for p in trainer.model.parameters() if p.requires_grad]
        norm = torch.stack([g.norm() for g in torch.autograd.grad(loss, wanted)]).norm()
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-4, abs=1e-6), name
        with torch.no_grad():
            held, told = loss_of(out / name, prepared[name].eval_encoded.samples, False)
        found = evals(out, name)[-1]
        assert found["eval_loss"] == pytest.approx(float(held), rel=2e-5, abs=1e-6), name
        metrics = {key for key in found if key.startswith(("eval_rewards", "eval_logps", "eval_kl"))}
        assert metrics, name
        for key in metrics:
            assert found[key] == pytest.approx(told[key.removeprefix("eval_")], rel=2e-4, abs=1e-5), (name, key)
