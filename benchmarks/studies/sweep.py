"""What a sweep saves that ends bad candidates early: 32 LoRA candidates on real data, by successive halving and the whole grid.

    python -m benchmarks halving --out benchmarks/results/sweep-cpu.json

About 20 minutes on two cores. --quick runs 8 candidates and writes a file that is not for the page of benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import write_results
from benchmarks.studies.parity_cpu import short_rows
from packlora.config import Run
from packlora.runtime.run import train

RATES = [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 2e-2]
STEPS, BATCH, EVERY, FACTOR = 12, 2, 2, 3
PROTOCOL = (
    "SmolLM2-135M-Instruct, float32, CPU. {count} LoRA candidates (all linear layers): every combination of {keys}. {steps} "
    "optimizer steps of AdamW, global batch {batch}, on 24 rows of examples/data/debian_synopsis (package name -> synopsis), "
    "8 held-out rows evaluated every {every} steps, not before the first, all candidates at the same time in one run. grid: "
    "all take all steps. halving: successive_halving with min_resource {every} and reduction_factor {factor}. seconds: of "
    "the whole run, loading, evaluations and saving included; one after the other in one process. cpu_seconds: of the "
    "processors meanwhile, which other work on the machine does not lengthen. eval_loss: of the best candidate at its end."
)


def settings(quick: bool) -> dict[str, list[Any]]:
    """Of the swept keys."""
    if quick:
        return {"train.learning_rate": RATES[::4], "adapter.r": [4, 16], "adapter.lora_alpha": [16, 32]}
    return {"train.learning_rate": RATES, "adapter.r": [4, 16], "adapter.lora_alpha": [16, 32]}


def run_config(scratch: Path, name: str, parameters: dict[str, list[Any]], count: int, stopping: dict[str, Any]) -> Run:
    data = Path(__file__).parents[2] / "examples" / "data" / "debian_synopsis"
    train_rows = short_rows(data / "train.jsonl", scratch / "train.jsonl", 24)
    eval_rows = short_rows(data / "eval.jsonl", scratch / "eval.jsonl", 8)
    return Run.model_validate(
        {
            "base_model": "smollm2-135m", "output_dir": str(scratch / name), "save_every": 0, "device": "cpu",
            "max_tokens_per_microbatch": 1024, "eval_every": EVERY,
            "sweep": {"job": "lora", "parameters": parameters, "concurrent": count, "stopping": stopping},
            "jobs": [
                {
                    "name": "lora",
                    "data": {"path": str(train_rows), "eval_path": str(eval_rows)},
                    "adapter": {"lora_dropout": 0.0},
                    "train": {"max_steps": STEPS, "global_batch_size": BATCH, "eval_on_start": False},
                }
            ],
        }
    )  # fmt: skip


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for: on a busy machine they say more than seconds."""
    return sum(os.times()[:4])


def measured(run: Run, name: str) -> dict[str, Any]:
    """A row of the file."""
    start, cpu = time.perf_counter(), cpu_seconds()
    result = train(run)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    found = json.loads((Path(run.output_dir) / "sweep.json").read_text())
    best = found["candidates"][0]
    stopped = sum(line["status"] == "stopped" for line in found["candidates"])
    return {
        "sweep": name, "seconds": seconds, "cpu_seconds": cpu, "tokens": result.tokens, "candidates": len(found["candidates"]),
        "stopped": stopped, "best": best["parameters"], "eval_loss": best["eval_loss"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sweep-cpu.json"))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    parameters = settings(args.quick)
    count = 1
    for values in parameters.values():
        count *= len(values)
    rules: dict[str, dict[str, Any]] = {
        "halving": {"method": "successive_halving", "min_resource": EVERY, "reduction_factor": FACTOR},
        "grid": {"method": "none"},
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, rule in rules.items():
            rows.append(measured(run_config(Path(folder), name, parameters, count, rule), name))
            print(rows[-1], flush=True)
    halving, grid = rows
    summary = {
        "time_over_grid": halving["seconds"] / grid["seconds"],
        "cpu_time_over_grid": halving["cpu_seconds"] / grid["cpu_seconds"],
        "tokens_over_grid": halving["tokens"] / grid["tokens"],
        "loss_over_grid_best": halving["eval_loss"] / grid["eval_loss"],
    }
    if args.quick:
        summary["part_quick"] = 1.0
    keys = ", ".join(f"{key} {values}" for key, values in parameters.items())
    protocol = PROTOCOL.format(count=count, keys=keys, steps=STEPS, batch=BATCH, every=EVERY, factor=FACTOR)
    write_results(args.out, "sweep-cpu", protocol, rows, summary)


if __name__ == "__main__":
    main()
