"""Does what an adapter has learnt in its first steps reach the output in bfloat16? Losses at the same parameters, three ways.

    python -m benchmarks small-updates --out benchmarks/results/small-updates-cpu.json

PEFT trains; after some steps its adapter is copied into a model under packlora.accelerate and into one that is all in float32,
and all three compute the loss of the same other batches. What an adapter adds to a layer's output in its first steps is under
half of the last bit of that output in bfloat16: added to a product that was rounded, most of it is gone.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import check_writable, device_slug, write_results
from benchmarks.studies.dora_convergence import DATA, EXACT, LR, Trainee, training_rows
from benchmarks.studies.dora_fidelity import RANK, load_base
from packlora.base.device import choose_device

STEPS = (1, 3, 10)
"""After which the losses are compared."""
BATCHES = 8
"""That the losses are of; none of them is trained on."""
PROTOCOL = (
    "{model}; r {rank}, alpha {alpha} on all linear layers, no dropout; base rounded to bfloat16, float32 adapters under "
    "torch.autocast to bfloat16 (PEFT's default). PEFT trains with AdamW, lr {lr}, batches of {batch} samples of {data}. After "
    "each number of steps: loss of {batches} other batches at these very parameters, by PEFT, by packlora.accelerate, and by "
    "PEFT with everything in float32. excess: mean of the loss less that in float32; gained: how much lower the float32 loss "
    "is than before training."
)


def copy_adapter(source: Trainee, into: Trainee) -> None:
    with torch.no_grad():
        for parameter, own in zip(into.parameters, source.parameters, strict=True):
            parameter.copy_(own)


@torch.no_grad()
def losses(trainee: Trainee, first: int) -> list[float]:
    """Of the batches from this number on."""
    out = []
    for number in range(first, first + BATCHES):
        inputs = {name: every[number] for name, every in trainee.batches.items()}
        out.append(float(trainee.loss(inputs)))
    return out


def compare(
    dora: bool, base: Any, rows: list[list[int]], device: torch.device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of LoRA or DoRA."""
    ways = {
        way: Trainee(way, 0, copy.deepcopy(base), rows, device, args, narrow=True, dora=dora)
        for way in ("peft", "packlora", EXACT)
    }
    out, before, name = [], None, "DoRA" if dora else "LoRA"
    for steps in (0, *STEPS):
        while ways["peft"].done < steps:
            ways["peft"].advance()
        for way in ("packlora", EXACT):
            copy_adapter(ways["peft"], ways[way])
        found = {way: losses(trainee, max(STEPS)) for way, trainee in ways.items()}
        exact = statistics.fmean(found[EXACT])
        before = exact if before is None else before
        row: dict[str, Any] = {"case": f"{name}, {steps} steps", "kind": name, "steps": steps, "loss_fp32": exact}
        row["gained"] = before - exact
        row["excess"] = {way: statistics.fmean(found[way]) - exact for way in ("peft", "packlora")}
        row["losses"] = found
        out.append(row)
        print(row["case"], f"{exact:.4f}", row["excess"], flush=True)
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--data", choices=DATA, default="python")
    parser.add_argument("--rows", type=int, default=20000, help="of the training set, at most")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--tiny", action="store_true", help="a toy, to try the script")
    args = parser.parse_args(arguments)
    args.steps = max(STEPS) + BATCHES
    check_writable(args.out)
    device = choose_device(args.device)
    base, tokenizer, words = load_base(False, args.tiny)
    rows, _ = training_rows(args, tokenizer)
    found = [row for dora in (False, True) for row in compare(dora, base, rows, device, args)]
    figures = {
        f"{row['kind'].lower()}_{row['steps']}_{key}": value
        for row in found
        for key, value in (("gained", row["gained"]), *((f"excess_{way}", own) for way, own in row["excess"].items()))
    }
    protocol = PROTOCOL.format(
        model=words, rank=args.rank, alpha=2 * args.rank, lr=LR, batch=args.batch, batches=BATCHES,
        data=DATA[args.data].format(length=args.length, rows=len(rows), version=platform.python_version()),
    )  # fmt: skip
    write_results(args.out, f"small-updates-{device_slug(device)}", protocol, found, figures, str(device))


if __name__ == "__main__":
    main()
