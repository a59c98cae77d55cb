"""The process of rewards.py that trains policies by TRL's GRPOTrainer, one after the other, with transformers' generation.

`python -m benchmarks.policy_trainer FOLDER` reads FOLDER/case.json and prints {"ends": seconds at which steps ended, by policy,
"rollout": seconds of generation in each step, by policy}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.trainer import DEVICE, Ends

ROWS = 16
"""Completions of a microbatch."""


class Timed(GRPOTrainer):
    """GRPOTrainer that keeps the seconds of each generation."""

    def __init__(self, **words: Any) -> None:
        self.took: list[float] = []
        super().__init__(**words)

    def _generate_single_turn(self, *args: Any, **words: Any) -> Any:
        began = time.perf_counter()
        found = super()._generate_single_turn(*args, **words)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        self.took.append(time.perf_counter() - began)
        return found


def length(completions: list[str], **columns: Any) -> list[float]:
    """A reward that costs nothing."""
    return [float(sum(map(ord, text[:8])) % 17) for text in completions]


def train(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """The steps of one policy after another's, each from a model that was loaded for it."""
    base, out = str(folder / "base"), {"ends": [], "rollout": []}  # type: ignore[var-annotated]
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    count = case["prompts"] * case["generations"]
    rows = min(ROWS, count)
    for policy in range(case["policies"]):
        args = GRPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=rows, gradient_accumulation_steps=count // rows,
            num_generations=case["generations"], max_completion_length=case["new"], max_steps=case["steps"], beta=0.0,
            loss_type="dapo", learning_rate=1e-5, bf16=DEVICE.type == "cuda", use_cpu=DEVICE.type == "cpu", report_to=[],
            save_strategy="no", logging_steps=1, gradient_checkpointing=False, seed=policy,
        )  # fmt: skip
        ends = Ends()
        dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(DEVICE), args=args, reward_funcs=length,
            train_dataset=Dataset.from_list(prompts), processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=LoraConfig(**case["adapter"], task_type="CAUSAL_LM"), callbacks=[ends],
        )  # fmt: skip
        trainer.train()
        out["ends"].append(ends.times)
        out["rollout"].append(trainer.took)
        del trainer
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return out


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(json.dumps(train(where, json.loads((where / "case.json").read_text()))))
