"""`packlora train` by its command, on a run file that says the least, timed from outside to its end: what a person waits for.

    python -m benchmarks command --out benchmarks/results/command-h100.json
    python -m benchmarks command --quick --out command-cpu.json      # a toy, which measures nothing

A model of Qwen3-0.6B's shape with random weights, a tokenizer of words and four jsonl files are written to a folder; the
command trains on them twice, first with empty caches. Where the time goes is read from the run's own logs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.model import TINY, build
from benchmarks.results import check_writable, device_slug, write_results
from benchmarks.studies.short_jobs import SHAPES

SHAPE, RANKS, DROPOUT = "0.6B", (8, 16, 32, 64), 0.1
SAMPLES, MEAN, SPREAD, SHORTEST, LONGEST = 3000, 250, 0.6, 16, 1500
"""Of each job; words of a sample: median and the spread of their logarithm, bounds."""
WORDS = 1000
RUNS = {"nothing compiled before": "cold", "compiled before": "warm"}
PROTOCOL = (
    "`python -m packlora train run.yaml` in a folder with {model}'s shape (random bfloat16 weights), a tokenizer of words "
    "and four jsonl files of {samples} samples (log-normal lengths, median {mean}, {shortest} to {longest} words). The run "
    "file names the model, the folder and the jobs: ranks {ranks}, lora_dropout {dropout}, one epoch, learning rate 1e-4; all "
    "else is packlora's default, checkpoints every 50 steps included. Two runs, the first with empty caches of Triton and "
    "packlora. wall_s: from the start of the process to its end; training_s: what run.json says of it; "
    "between_stalls_tokens_per_s: over microbatches that end less than twice the median after the one before; stalls_s: "
    "what the others took beyond the median, without the first, which is first_microbatch_s; end_s: after the last."
)
Row = dict[str, Any]


def write_inputs(folder: Path, device: torch.device, quick: bool) -> Path:
    """The base model, the data and the run file, which is returned."""
    _, kind, make, values = SHAPES[SHAPE]
    size = {**values, **TINY, "head_dim": 16, "vocab_size": WORDS + 8} if quick else values
    model: Any = build(kind(**size, use_cache=False), device, make)
    model.save_pretrained(folder / "base")
    special = ("<eos>", "<pad>", "<unk>")
    vocabulary = {word: at for at, word in enumerate([*special, *(f"w{at}" for at in range(WORDS))])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("eos_token", "pad_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder / "base")
    draw, jobs = np.random.default_rng(0), []
    for rank in RANKS:
        number, mean = (24, 20) if quick else (SAMPLES, MEAN)
        lengths = np.clip(draw.lognormal(np.log(mean), SPREAD, number), SHORTEST, LONGEST).astype(int)
        rows = [{"text": " ".join(f"w{word}" for word in draw.integers(0, WORDS, length))} for length in lengths]
        (folder / f"r{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        adapter = {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": DROPOUT}
        train = {"num_train_epochs": 1, "learning_rate": 1e-4}
        jobs.append({"name": f"r{rank}", "data": {"path": f"r{rank}.jsonl"}, "adapter": adapter, "train": train})
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({"base_model": str(folder / "base"), "output_dir": "out", "jobs": jobs}))
    return file


def timed(file: Path, name: str) -> Row:
    """A run of the command. Caches are in the folder of the run file."""
    folder = file.parent
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "PACKLORA_CACHE": str(folder / "packlora")}
    out = folder / RUNS[name]
    words = [sys.executable, "-m", "packlora", "train", str(file), "--set", f"output_dir={out}"]
    start = time.perf_counter()
    with (folder / f"{RUNS[name]}.log").open("w+") as log:
        done = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **caches})
        wall = time.perf_counter() - start
        log.seek(0)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{log.read()}")
    lines = [json.loads(line) for line in (out / "microbatches.jsonl").read_text().splitlines()]
    return row_of(name, wall, json.loads((out / "run.json").read_text())["result"], lines)


def row_of(name: str, wall: float, result: Mapping[str, Any], microbatches: Sequence[Mapping[str, Any]]) -> Row:
    """Where the time of a run went. result: of run.json; microbatches: lines of microbatches.jsonl."""
    ends = [line["elapsed"] for line in microbatches]
    took = [end - before for end, before in zip(ends, [0.0, *ends[:-1]], strict=True)]
    usual = statistics.median(took)
    tokens = [sum(line["tokens"].values()) for line in microbatches]
    smooth = [at for at, seconds in enumerate(took) if seconds < 2 * usual]
    stalls = sum(seconds - usual for at, seconds in enumerate(took) if at and seconds >= 2 * usual)
    return {
        "run": name, "wall_s": wall, "training_s": result["seconds"], "before_training_s": wall - result["seconds"],
        "first_microbatch_s": took[0], "stalls_s": stalls, "end_s": result["seconds"] - ends[-1],
        "microbatches": len(took), "median_microbatch_s": usual, "tokens": result["tokens"],
        "tokens_per_s": result["tokens"] / wall,
        "between_stalls_tokens_per_s": sum(tokens[at] for at in smooth) / sum(took[at] for at in smooth),
        "predicted_s": sum(line["predicted"] for line in microbatches), "peak_gib": result["peak_memory_bytes"] / 2**30,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a toy, on any device")
    args = parser.parse_args()
    check_writable(args.out)
    if not args.quick and not torch.cuda.is_available():
        parser.error("this needs a GPU; --quick tests the study on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        file = write_inputs(Path(scratch), device, args.quick)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for name in RUNS:
            rows.append(timed(file, name))
            print(
                {key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()},
                flush=True,
            )
    summary = {
        f"{RUNS[row['run']]}_{key}": row[key] for row in rows for key in ("wall_s", "training_s", "tokens_per_s")
    }
    if args.quick:
        summary = {f"part_{key}": value for key, value in summary.items()}
    protocol = PROTOCOL.format(
        model=SHAPES[SHAPE][0], samples=SAMPLES, mean=MEAN, shortest=SHORTEST, longest=LONGEST, dropout=DROPOUT,
        ranks=", ".join(map(str, RANKS)),
    )  # fmt: skip
    write_results(args.out, f"command-{device_slug(device)}", protocol, rows, summary, str(device))


if __name__ == "__main__":
    main()
