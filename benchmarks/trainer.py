"""Processes of commands.py: the base model on disk, and the Hugging Face Trainer with PEFT, plain or accelerated.

`python -m benchmarks.trainer FOLDER base|trainer_peft|accelerate|trainer_frozen`, with `_compiled` behind by torch.compile;
`commands.py` writes the folder and reads the last line that is printed: {"ends": seconds at which optimizer steps ended, "gib":
peak of memory}.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

STEPS = 10
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Ends(TrainerCallback):  # type: ignore[misc]
    """The time at which each optimizer step has ended on the device."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def write_base(folder: Path, case: dict[str, Any]) -> None:
    """Random weights in bfloat16; and, where the case asks for it, an adapter as after some training."""
    values = dict(case["shape"])
    config = AutoConfig.for_model(values.pop("model_type"), **values, bos_token_id=0, eos_token_id=0, pad_token_id=1)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "base")
    if case["trained"]:
        adapted = get_peft_model(model, LoraConfig(**case["adapter"], task_type="CAUSAL_LM"))
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0, 1e-3)
                elif "lora_magnitude_vector" in name:
                    weight.mul_(1 + 1e-2 * torch.randn_like(weight))
        adapted.save_pretrained(folder / "adapter")


def frozen(model: Any) -> Any:
    """The model without adapters, whose gradients go back to its input, where a factor of it is trained."""
    model.requires_grad_(False)
    model.factor = torch.nn.Parameter(torch.ones((), device=DEVICE))
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: out * model.factor.to(out.dtype))
    return model


def train(folder: Path, case: dict[str, Any], what: str) -> dict[str, Any]:
    """Some optimizer steps of the Trainer on the samples of the folder. what: trainer_peft, accelerate or trainer_frozen; with
    _compiled behind each of the model's blocks is compiled."""
    base, compiled = str(folder / "base"), what.endswith("_compiled")
    how: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa", "device_map": {"": DEVICE}}
    if case["quantization"]:
        own = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        how["quantization_config"] = BitsAndBytesConfig(**own)
    model: Any = AutoModelForCausalLM.from_pretrained(base, **how)
    model.config.use_cache = False
    if what.startswith("trainer_frozen"):
        adapted: Any = frozen(model)
    elif case["trained"]:
        adapted = PeftModel.from_pretrained(model, str(folder / "adapter"), is_trainable=True)
    else:
        adapted = get_peft_model(model, LoraConfig(**case["adapter"], task_type="CAUSAL_LM"))
    if what.startswith("accelerate"):
        import packlora

        print(packlora.accelerate(adapted))
    rows = [json.loads(line)["input_ids"] for line in (folder / "data.jsonl").read_text().splitlines()]
    per_step = case["microbatch"] * case["accumulation"]
    mode = {} if DEVICE.type == "cuda" else {"torch_compile_backend": "aot_eager"}
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"  # one block is compiled, for all that are like it
    args = TrainingArguments(
        **({"torch_compile": True, **mode} if compiled else {}),
        output_dir=str(folder / "trainer"), per_device_train_batch_size=case["microbatch"],
        gradient_accumulation_steps=case["accumulation"], learning_rate=1e-4, max_steps=min(STEPS, len(rows) // per_step),
        logging_steps=1, save_strategy="no", report_to=[], bf16=DEVICE.type == "cuda", remove_unused_columns=False,
        use_liger_kernel=DEVICE.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None,
    )  # fmt: skip
    ends = Ends()
    Trainer(
        model=adapted, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=default_data_collator, callbacks=[ends],
    ).train()  # fmt: skip
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
    return {"ends": ends.times, "gib": peak}


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    case = json.loads((folder / "case.json").read_text())
    if what == "base":
        write_base(folder, case)
        print("{}")
    else:
        print(json.dumps(train(folder, case, what)))


if __name__ == "__main__":
    main()
