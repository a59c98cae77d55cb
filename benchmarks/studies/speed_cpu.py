"""How fast is packlora on a CPU, against PEFT as its users run it?

    python -m benchmarks speed --out benchmarks/results/speed-cpu.json

The same optimizer steps (same samples, forward, backward, clipping, AdamW) on SmolLM2-135M in float32, on one CPU, by three
ways in turn inside one loop: packlora; PEFT with padded batches (attention mask, labels, the loss of transformers); PEFT with
packed batches (one row, restarting position ids, the packing mask of transformers). One job, then four jobs: packlora trains
them together, PEFT one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.peers.batches import packed, padded
from benchmarks.results import write_results
from benchmarks.studies.short_jobs import trainer_of
from packlora.base.demo_model import demo_model_folder
from packlora.base.model import load_base
from packlora.config import Run
from packlora.data.dataset import JobData
from packlora.runtime.prepare import prepare
from packlora.runtime.trainer import Trainer
from packlora.schedule.planner import Planner

LR, CLIP = 2e-4, 1.0
JOBS: list[dict[str, Any]] = [
    {"name": "synopsis-r8", "set": "debian_synopsis", "batch": 8, "adapter": {"r": 8, "lora_alpha": 16}},
    {"name": "docstrings-r16", "set": "py_docstrings", "batch": 2, "adapter": {"r": 16, "lora_dropout": 0.05}},
    {"name": "manpages-r32", "set": "manpages", "batch": 1, "adapter": {"r": 32, "use_rslora": True}},
    {"name": "synopsis-r4", "set": "debian_synopsis", "batch": 4, "adapter": {"r": 4, "lora_alpha": 16}},
]
for job in JOBS:
    job["adapter"] = {"lora_alpha": 32, "lora_dropout": 0.0, **job["adapter"]}
PROTOCOL = (
    "SmolLM2-135M-Instruct, float32, all linear layers, real demo data sets with the chat template. Each optimizer step is "
    "timed whole (forward, backward, clipping, AdamW; the optimizer steps of all jobs), the ways in turn inside one loop, "
    "{warmup} steps of warm-up and {steps} counted; tokens/s counts real tokens, never padding; a ratio is the median over "
    "steps of the peer's time over packlora's. PEFT: one model, sdpa attention; padded = the global batch as one padded "
    "batch with attention mask and labels; packed = the same samples in one row with position_ids, use_cache=False. four = the "
    "jobs together in packlora (max_tokens_per_microbatch 2048), one after the other in PEFT."
)


def trainer_for(jobs: list[dict[str, Any]], scratch: Path) -> Trainer:
    """A packlora training loop, ready to run rounds."""
    data = Path(__file__).parents[2] / "examples" / "data"
    run = Run.model_validate(
        {
            "base_model": "smollm2-135m", "output_dir": str(scratch), "device": "cpu", "max_tokens_per_microbatch": 2048,
            "jobs": [
                {
                    "name": job["name"], "data": {"path": str(data / job["set"] / "train.jsonl")}, "adapter": job["adapter"],
                    "train": {"global_batch_size": job["batch"], "learning_rate": LR, "max_grad_norm": CLIP},
                }
                for job in jobs
            ],
        }
    )  # fmt: skip
    scratch.mkdir(parents=True)
    prepared = prepare(run)
    base = load_base(run, prepared.tokenizer, prepared.longest_by_job)
    return trainer_of(prepared, base, scratch)


class Peft:
    """All jobs as adapters of one PEFT model, trained one after the other."""

    def __init__(self, jobs: list[dict[str, Any]], data: dict[str, JobData], pad: int) -> None:
        base = AutoModelForCausalLM.from_pretrained(
            demo_model_folder(), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
        configs = [LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **job["adapter"]) for job in jobs]
        self.model: Any = get_peft_model(base, configs[0], adapter_name="job0")
        for index, config in enumerate(configs[1:], 1):
            self.model.add_adapter(f"job{index}", config)
        self.model.train()
        self.data, self.jobs, self.pad = data, jobs, pad
        self.parameters, self.optimizers = [], []
        for index in range(len(jobs)):
            self.model.set_adapter(f"job{index}")
            self.parameters.append([p for p in self.model.parameters() if p.requires_grad])
            self.optimizers.append(torch.optim.AdamW(self.parameters[-1], lr=LR, weight_decay=0.0))

    def step(self, number: int, batch: Callable[[Any], dict[str, Any]]) -> float:
        """Seconds of one optimizer step of every job; switching adapters is not counted."""
        seconds = 0.0
        for index, job in enumerate(self.jobs):
            self.model.set_adapter(f"job{index}")
            data = self.data[job["name"]]
            samples = [data.samples[n] for n in data.global_batch(number)]
            start = time.perf_counter()
            self.model(**batch(samples), use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters[index], CLIP)
            self.optimizers[index].step()
            self.optimizers[index].zero_grad()
            seconds += time.perf_counter() - start
        return seconds


def compare(label: str, jobs: list[dict[str, Any]], scratch: Path, warmup: int, steps: int) -> list[dict[str, Any]]:
    """Rows of one comparison: seconds of every step by way."""
    trainer = trainer_for(jobs, scratch / label)
    data = {job.name: job.data for job in trainer.jobs}
    peft = Peft(jobs, data, trainer.base.tokenizer.pad_token_id)
    planner = Planner([job.data.planned for job in trainer.jobs], trainer.budget.tokens, window_rounds=1)
    ways: dict[str, Callable[[int], float]] = {
        "packlora": lambda number: timed(lambda: trainer._train_window(planner.window(number))),
        "peft_padded": lambda number: peft.step(number, partial(padded, pad=peft.pad)),
        "peft_packed": lambda number: peft.step(number, packed),
    }
    rows = []
    for number in range(warmup + steps):
        row: dict[str, Any] = {"jobs": label, "step": number}
        row["tokens"] = sum(d.samples[n].num_tokens for d in data.values() for n in d.global_batch(number))
        for name in list(ways)[number % 3 :] + list(ways)[: number % 3]:  # each way comes first equally often
            row[f"{name}_s"] = ways[name](number)
        print(row, flush=True)
        if number >= warmup:
            rows.append(row)
    return rows


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed-cpu.json"))
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        rows = compare("one", JOBS[:1], Path(name), args.warmup, args.steps)
        rows += compare("four", JOBS, Path(name), args.warmup, args.steps)
    for label, title in (("one", "one_job"), ("four", "four_jobs")):
        own = [row for row in rows if row["jobs"] == label]
        for peer in ("padded", "packed"):
            ratios = [row[f"peft_{peer}_s"] / row["packlora_s"] for row in own]
            summary[f"{title}_vs_peft_{peer}"] = statistics.median(ratios)
        for way in ("packlora", "peft_padded", "peft_packed"):
            summary[f"{title}_{way}_tokens_per_s"] = statistics.median(row["tokens"] / row[f"{way}_s"] for row in own)
    write_results(args.out, "speed-cpu", PROTOCOL.format(warmup=args.warmup, steps=args.steps), rows, summary)
    print(summary)


if __name__ == "__main__":
    main()
