"""Learning from rewards with TRL's GRPOTrainer, accelerated by one line.

    pip install trl
    python examples/trl_grpo.py MODEL examples/data/prompts.jsonl
    python examples/trl_grpo.py MODEL examples/data/prompts.jsonl --no-accelerate     # to compare

MODEL is a folder or a hub id; rows are {"prompt"}. Runs on a GPU if there is one, else on the CPU. The line accelerates the
passes that train; docs/accelerate.md, "Under GRPOTrainer", says what it does for generation.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

import packlora


def brevity(completions: list[Any], **columns: Any) -> list[float]:
    """The nearer to eight words the better."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [-abs(len(text.split()) - 8) / 8 for text in texts]


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description="GRPO on a LoRA adapter with TRL, with and without packlora.")
    parser.add_argument("model", help="folder or hub id of a causal language model")
    parser.add_argument("data", help="jsonl file with prompts")
    parser.add_argument("--no-accelerate", action="store_true", help="plain PEFT")
    parser.add_argument("--output", default="runs/trl_grpo")
    parser.add_argument("--max-steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8, help="completions")
    parser.add_argument("--num-generations", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--num-iterations", type=int, default=1, help="steps on the same completions")
    parser.add_argument("--max-completion-length", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the divergence from the base model")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="on the CPU even if there is a GPU")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 on a GPU, float32 on the CPU")
    args = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available() and not args.cpu
    dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    trainer = GRPOTrainer(
        args.model,
        brevity,
        GRPOConfig(
            args.output, max_steps=args.max_steps, per_device_train_batch_size=args.batch_size,
            num_generations=args.num_generations, num_iterations=args.num_iterations, beta=args.beta,
            max_completion_length=args.max_completion_length, learning_rate=args.learning_rate,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], seed=0,
            gradient_checkpointing=args.gradient_checkpointing, bf16=dtype == "bfloat16", use_cpu=not on_gpu,
            model_init_kwargs={"dtype": dtype},
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"),
    )  # fmt: skip
    if not args.no_accelerate:
        report = packlora.accelerate(trainer.model)  # the one line
        if trainer.is_world_process_zero():
            print(report)

    trainer.train()
    trainer.save_model()
    for entry in trainer.state.log_history:
        if "loss" in entry and trainer.is_world_process_zero():
            reward = f"reward {entry['reward']:.4f}" if "reward" in entry else "the completions of the step before"
            print(
                f"step {entry['step']:>4}  loss {entry['loss']:.6f}  gradient {entry['grad_norm']:.6f}  "
                f"{entry['step_time']:.2f} s  {reward}"
            )
    return trainer


if __name__ == "__main__":
    main()
