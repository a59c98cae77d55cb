"""Does DoRA train under packlora as it does under PEFT? Loss by loss over a thousand steps and several seeds.

    python -m benchmarks.dora_convergence --out benchmarks/results/dora-convergence-h200.json --random-weights
    python -m benchmarks.dora_convergence --out benchmarks/results/dora-convergence-cpu.json --device cpu --steps 60 --seeds 1

The same loop runs twice per seed over a PEFT model, once as it is and once after packlora.accelerate: same base, same initial
adapter, same samples in the same order. On a GPU every run is a process of its own, all at once: SmolLM2-135M keeps the host
busy and the GPU idle.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.dora_fidelity import RANK, load_base, padded, samples, with_dora
from packlora.accelerate import accelerate
from packlora.bench.results import check_writable, device_slug, write_results
from packlora.model import choose_device

ROOT = Path(__file__).parent.parent
WAYS = ("peft", "packlora")
EXACT = "peft_fp32"
"""PEFT again, all in float32."""
LR, CLIP = 2e-4, 1.0
EVAL_SAMPLES = 24
PROTOCOL = (
    "{model}; DoRA r {rank}, alpha {alpha} on all linear layers, no dropout; {precision}; AdamW, lr {lr}, clipping at {clip}, "
    "{steps} steps of {batch} samples of debian_synopsis/train (prompt and completion, cut at {length} tokens, padded to it), "
    "order drawn by seed; {seeds} seeds. Two runs per seed of one loop over a PEFT model, as it is and after "
    "packlora.accelerate, from the same initial adapter. mean_abs, max_abs: of the difference of the losses per step; eval: "
    "mean loss on {eval} held-out samples after the last step; to_fp32: to a third run, PEFT's all in float32. {device}."
)


def train_one(way: str, seed: int, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Losses of one run.

    Raises:
        AssertionError: a module was left to PEFT.
    """
    base, tokenizer, words = load_base(args.random_weights, args.tiny)
    mixed = device.type == "cuda" and way != EXACT
    torch.manual_seed(seed)
    model = with_dora(base.to(torch.bfloat16) if mixed else base, args.rank, wide=True).to(device)
    if way == "packlora":
        report = accelerate(model)
        assert report.accelerated == len(report.modules), f"not all modules were accelerated: {report}"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    rows = samples("train.jsonl", args.rows, args.length, tokenizer)
    order = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    losses = []
    start = time.perf_counter()
    model.train()

    def loss_of(chosen: list[list[int]]) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            loss: torch.Tensor = model(**padded(chosen, device, args.length), use_cache=False).loss
        return loss

    for _ in range(args.steps):
        while len(queue) < args.batch:
            queue += torch.randperm(len(rows), generator=order).tolist()
        chosen, queue = queue[: args.batch], queue[args.batch :]
        loss = loss_of([rows[number] for number in chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()
    seconds = time.perf_counter() - start
    held_out = samples("eval.jsonl", EVAL_SAMPLES, args.length, tokenizer)
    with torch.no_grad():
        parts = [loss_of(held_out[at : at + 8]) for at in range(0, len(held_out), 8)]
    return {"losses": values, "eval": float(torch.stack(parts).mean()), "seconds": seconds, "model": words}


def all_runs(device: torch.device, args: argparse.Namespace) -> dict[tuple[int, str], dict[str, Any]]:
    """Every seed both ways; processes side by side on a GPU, one after the other on a CPU."""
    keys = [(seed, way) for seed in range(args.seeds) for way in (*WAYS, *([EXACT] if args.exact else []))]
    if device.type == "cpu":
        return {(seed, way): train_one(way, seed, device, args) for seed, way in keys}
    with tempfile.TemporaryDirectory() as name:
        started = []
        for seed, way in keys:
            out = Path(name) / f"{way}-{seed}.json"
            own = [sys.executable, "-m", "benchmarks.dora_convergence", "--one", f"{way}:{seed}", "--out", str(out)]
            process = subprocess.Popen(own + settings(args), cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "2"})
            started.append((seed, way, out, process))
        out_of = {}
        for seed, way, out, process in started:
            if process.wait():
                for *_, other in started:
                    other.kill()
                raise RuntimeError(f"the run of seed {seed} with {way} failed with exit code {process.returncode}")
            out_of[seed, way] = json.loads(out.read_text())
    return out_of


def settings(args: argparse.Namespace) -> list[str]:
    """The options that a run in a process of its own needs."""
    words = [f"--{name}={getattr(args, name)}" for name in ("device", "steps", "batch", "length", "rows", "rank")]
    return words + [f"--{name.replace('_', '-')}" for name in ("random_weights", "tiny") if getattr(args, name)]


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[float]:
    return [abs(one - other) for one, other in zip(a["losses"], b["losses"], strict=True)]


def compared(seed: int, peft: dict[str, Any], ours: dict[str, Any], exact: dict[str, Any] | None) -> dict[str, Any]:
    """One seed's row."""
    gaps = differences(ours, peft)
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    tenth = max(len(gaps) // 10, 1)
    to_exact = {} if exact is None else {
        f"mean_abs_{way}_to_fp32": sum(differences(run, exact)) / len(gaps) for way, run in (("peft", peft), ("packlora", ours))
    }  # fmt: skip
    return {
        "case": f"seed {seed}", "steps": len(gaps), "mean_abs": sum(gaps) / len(gaps), "max_abs": gaps[worst],
        "max_abs_step": worst, "first_loss": peft["losses"][0], "last_tenth_loss": sum(peft["losses"][-tenth:]) / tenth,
        "eval_peft": peft["eval"], "eval_packlora": ours["eval"], "eval_abs": abs(ours["eval"] - peft["eval"]),
        "seconds": {"peft": peft["seconds"], "packlora": ours["seconds"]}, "losses_peft": peft["losses"],
        "losses_packlora": ours["losses"], **to_exact,
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all seeds: mean and largest loss difference per step, largest difference on held-out samples."""
    out = {
        "convergence_mean_abs": sum(row["mean_abs"] for row in rows) / len(rows),
        "convergence_max_abs": max(row["max_abs"] for row in rows),
        "convergence_eval_abs": max(row["eval_abs"] for row in rows),
    }
    for key in ("mean_abs_peft_to_fp32", "mean_abs_packlora_to_fp32"):
        if key in rows[0]:
            out[f"convergence_{key}"] = sum(row[key] for row in rows) / len(rows)
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--rows", type=int, default=400, help="of the training set")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--exact", action="store_true", help="also PEFT in float32, to measure both against")
    parser.add_argument(
        "--random-weights", action="store_true", help="SmolLM2-135M's shape where its weights are not at hand"
    )
    parser.add_argument("--tiny", action="store_true", help="a toy, to try the script")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # WAY:SEED, a run in a process of its own
    args = parser.parse_args(arguments)
    check_writable(args.out)
    device = choose_device(args.device)
    if args.one:
        way, _, seed = args.one.partition(":")
        args.out.write_text(json.dumps(train_one(way, int(seed), device, args)))
        return
    runs = all_runs(device, args)
    rows = [
        compared(seed, runs[seed, "peft"], runs[seed, "packlora"], runs.get((seed, EXACT)))
        for seed in range(args.seeds)
    ]
    for row in rows:
        row["random_weights"] = args.random_weights or args.tiny
        print({key: value for key, value in row.items() if not key.startswith("losses")}, flush=True)
    precision = "bfloat16 base, float32 adapters under torch.autocast" if device.type == "cuda" else "float32"
    protocol = PROTOCOL.format(
        model=runs[0, "peft"]["model"], rank=args.rank, alpha=2 * args.rank, precision=precision, lr=LR, clip=CLIP,
        steps=args.steps, batch=args.batch, length=args.length, seeds=args.seeds, eval=EVAL_SAMPLES,
        device="All runs at once on one GPU" if device.type == "cuda" else "CPU",
    )  # fmt: skip
    write_results(args.out, f"dora-convergence-{device_slug(device)}", protocol, rows, summary(rows), str(device))


if __name__ == "__main__":
    main()
