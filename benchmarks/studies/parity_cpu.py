"""Does packlora train what PEFT trains? Loss by loss, against a plain script with real PEFT.

    python -m benchmarks parity --out benchmarks/results/parity-cpu.json

Three adapters (LoRA, rsLoRA, DoRA) are trained three times on SmolLM2-135M in float32: with peft.get_peft_model and
torch.optim.AdamW on padded batches, as anybody would write it; with packlora alone; and with packlora in microbatches
shared with the others and a fourth job. The same initial adapters (written by PEFT, taken with init_from), the same samples
in the same order. Compared: the loss of every step, and the adapters at the end.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.peers.batches import padded
from benchmarks.results import write_results
from packlora.base.demo_model import demo_model_folder
from packlora.config import Run
from packlora.runtime.prepare import prepare
from packlora.runtime.run import train

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 8, "lora_alpha": 16},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True},
    "dora": {"r": 8, "lora_alpha": 16, "use_dora": True},
}
LR, BATCH, CLIP = 2e-4, 2, 1.0
PROTOCOL = (
    "SmolLM2-135M-Instruct, float32, CPU. {steps} optimizer steps of AdamW (lr {lr}, global batch {batch}, clipping at {clip}, "
    "dropout 0, all linear layers) on 64 rows of examples/data/debian_synopsis (package name -> synopsis), file order. "
    "Reference: real PEFT, padded batches with attention mask, sdpa attention, the loss of transformers (mean over label "
    "tokens). packlora starts from the same adapter files (init_from); solo = the job alone, shared = in microbatches with the "
    "other kinds and a fourth job (LoRA r 4, dropout 0.05, twice the learning rate, shuffled). mean and max are of "
    "|loss - PEFT's loss| over all steps; adapter is the relative Frobenius distance of all final adapter tensors together."
)


def short_rows(source: Path, out: Path, count: int) -> Path:
    """Rows of the set with the package's name alone as prompt: real completions, few tokens."""
    rows = [json.loads(line) for line in source.read_text().splitlines()[:count]]
    names = [re.search(r"^Package: (\S+)", row["prompt"], re.MULTILINE) for row in rows]
    short = [
        {"prompt": f"Describe the package {name[1]} in one line.", "completion": row["completion"]}
        for name, row in zip(names, rows, strict=True)
        if name
    ]
    out.write_text("".join(json.dumps(row) + "\n" for row in short))
    return out


def run_config(scratch: Path, name: str, jobs: dict[str, tuple[Path, dict[str, Any]]], steps: int) -> Run:
    """A packlora run over (data, adapter) by job name."""
    return Run.model_validate(
        {
            "base_model": "smollm2-135m", "output_dir": str(scratch / name), "save_every": 0, "device": "cpu",
            "max_tokens_per_microbatch": 1024,
            "jobs": [
                {
                    "name": job,
                    "data": {"path": str(data)},
                    "adapter": adapter,
                    "train": {
                        "max_steps": steps, "global_batch_size": BATCH, "learning_rate": LR, "max_grad_norm": CLIP,
                        "shuffle": False,
                    },
                }
                for job, (data, adapter) in jobs.items()
            ],
        }
    )  # fmt: skip


def peft_reference(run: Run, config: dict[str, Any], initial: Path, final: Path) -> list[float]:
    """Train with PEFT as its users do; returns the loss of every step. Saves the adapter before and after."""
    job = prepare(run).jobs[0]
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(
        demo_model_folder(), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **config))
    model.save_pretrained(initial)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    losses = []
    for step in range(job.data.num_steps):
        samples = [job.data.samples[number] for number in job.data.global_batch(step)]
        loss = model(**padded(samples), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(final)
    return losses


def packlora_losses(run: Run) -> dict[str, list[float]]:
    """Train and read back the losses by job."""
    result = train(run)
    assert result.status == "done", result
    out: dict[str, list[float]] = {job.name: [] for job in run.jobs}
    for line in (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        out[values["job"]].append(values["loss"])
    return out


def distance(ours: Path, theirs: Path) -> float:
    """Relative Frobenius distance of two adapter files."""
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    a = {
        key.replace("magnitude_vector.weight", "magnitude_vector"): value for key, value in a.items()
    }  # as PEFT writes
    assert a.keys() == b.keys()
    difference = sum(float((a[key].double() - b[key].double()).square().sum()) for key in b)
    return float((difference / sum(float(value.double().square().sum()) for value in b.values())) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/parity-cpu.json"))
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    data = Path(__file__).parents[2] / "examples" / "data"
    rows: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        short = short_rows(data / "debian_synopsis" / "train.jsonl", scratch / "short.jsonl", 64)
        reference: dict[str, list[float]] = {}
        jobs: dict[str, tuple[Path, dict[str, Any]]] = {}
        for kind, config in KINDS.items():
            start = time.perf_counter()
            plain = run_config(scratch, f"plain-{kind}", {kind: (short, config)}, args.steps)
            reference[kind] = peft_reference(plain, config, scratch / f"initial-{kind}", scratch / f"peft-{kind}")
            jobs[kind] = (short, {"init_from": str(scratch / f"initial-{kind}")})
            print(f"{kind}: PEFT done in {time.perf_counter() - start:.0f} s", flush=True)
        runs = {kind: run_config(scratch, f"solo-{kind}", {kind: jobs[kind]}, args.steps) for kind in KINDS}
        runs["shared"] = run_config(
            scratch, "shared", {**jobs, "other": (short, {"r": 4, "lora_alpha": 8, "lora_dropout": 0.05})}, args.steps
        )
        runs["shared"].jobs[-1].train.shuffle, runs["shared"].jobs[-1].train.learning_rate = True, 2 * LR
        for label, run in runs.items():
            losses = packlora_losses(run)
            for kind in KINDS:
                if kind not in losses:
                    continue
                setting = "shared" if label == "shared" else "solo"
                gaps = [abs(a - b) for a, b in zip(losses[kind], reference[kind], strict=True)]
                row: dict[str, Any] = {
                    "kind": kind, "setting": setting, "steps": len(gaps), "mean": sum(gaps) / len(gaps), "max": max(gaps),
                    "adapter": distance(Path(run.output_dir) / kind, scratch / f"peft-{kind}"),
                    "first_loss": reference[kind][0], "last_loss": reference[kind][-1],
                }  # fmt: skip
                rows.append(row)
                for key in ("mean", "max", "adapter"):
                    summary[f"{kind}_{setting}_{key}"] = row[key]
                print(row, flush=True)
    protocol = PROTOCOL.format(steps=args.steps, lr=LR, batch=BATCH, clip=CLIP)
    write_results(args.out, "parity-cpu", protocol, rows, summary)


if __name__ == "__main__":
    main()
