"""Supervised fine-tuning with TRL, accelerated by one line.

    pip install trl
    python examples/trl_sft.py MODEL examples/data/debian_synopsis/train.jsonl
    python examples/trl_sft.py MODEL examples/data/debian_synopsis/train.jsonl --no-accelerate     # to compare

On several processes: torchrun --nproc-per-node 2 examples/trl_sft.py MODEL DATA, or accelerate launch.

MODEL is a folder or a hub id; rows are {"prompt", "completion"}, {"messages"} or {"text"}. Runs on a GPU if there is one, else
on the CPU. Without dropout the two runs print the same losses, up to the rounding of the dtype.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import packlora
from packlora.callbacks import ThroughputCallback


def main(arguments: list[str] | None = None) -> SFTTrainer:
    parser = argparse.ArgumentParser(description="LoRA fine-tuning with TRL, with and without packlora.")
    parser.add_argument("model", help="folder or hub id of a causal language model")
    parser.add_argument("data", help="jsonl file")
    parser.add_argument("--no-accelerate", action="store_true", help="plain PEFT")
    parser.add_argument("--output", default="runs/trl_sft")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="on the CPU even if there is a GPU")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 on a GPU, float32 on the CPU")
    args = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available() and not args.cpu
    dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    trainer = SFTTrainer(
        args.model,
        SFTConfig(
            args.output, max_steps=args.max_steps, per_device_train_batch_size=args.batch_size, max_length=args.max_length,
            learning_rate=args.learning_rate, lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[],
            seed=0, gradient_checkpointing=args.gradient_checkpointing, bf16=dtype == "bfloat16", use_cpu=not on_gpu,
            model_init_kwargs={"dtype": dtype},
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        peft_config=LoraConfig(
            r=args.rank, lora_alpha=2 * args.rank, lora_dropout=args.dropout, target_modules="all-linear"
        ),
        callbacks=[ThroughputCallback()],
    )  # fmt: skip
    if not args.no_accelerate:
        report = packlora.accelerate(trainer.model)  # the one line
        if trainer.is_world_process_zero():
            print(report)

    trainer.train()
    trainer.save_model()
    for entry in trainer.state.log_history:
        if "loss" in entry and trainer.is_world_process_zero():
            print(
                f"step {entry['step']:>4}  loss {entry['loss']:.6f}  {entry['tokens_per_second']:.0f} tokens/s  "
                f"peak {entry['peak_memory_gib']:.2f} GiB"
            )
    return trainer


if __name__ == "__main__":
    main()
