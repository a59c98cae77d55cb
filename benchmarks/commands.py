"""`anchors` and `command`: `packlora train` by its command, on models, tokenizers and samples that are written to a folder.

`anchors` measures one LoRA or DoRA job as published figures do: tokens per second beside the Hugging Face Trainer with PEFT,
and the same after `packlora.accelerate` (trainer.py). Each contender runs in a process of its own, so that its peak of memory
is its own. `command` times a run of four jobs from outside, first with empty caches: what a person waits for.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
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

from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.shapes import SHAPES, TARGETS, TINY

WORDS = 5000
WARM_STEPS = 2
"""Optimizer steps at the start that are not counted: kernels are compiled and graphs recorded in them."""
SUROGATE = "Surogate, docs/reference/benchmarks.md"
NEMO = "NVIDIA NeMo AutoModel, docs/performance-summary.mdx (2026-06-12), one H100"
NAMES = ("Unsloth NF4", "Unsloth", "Surogate", "Surogate FP8", "Surogate QoFP8")
PUBLISHED = {
    "H100 SXM": {
        "Qwen3-0.6B": (21000, 24500, 62000, 58000, 45600), "Qwen3-1.7B": (20000, 23000, 37500, 37500, 30600),
        "Qwen3-4B": (12600, 13100, 17500, 18700, 15500), "Qwen3-8B": (8600, 9100, 11600, 12900, 10200),
        "Qwen3-14B": (5200, 5600, 6800, 8000, 6200),
    },
    "H200": {
        "Qwen3-0.6B": (18300, 21700, 65200, 62000, 48000), "Qwen3-1.7B": (18300, 21400, 39000, 40800, 32800),
        "Qwen3-4B": (12100, 12800, 18300, 20500, 16500), "Qwen3-8B": (8400, 9100, 11700, 14000, 10900),
    },
}  # fmt: skip
"""Tokens per second that Surogate's page has of NAMES, by card and shape: the same rank, samples and batches as here."""


def words_of(draw: np.random.Generator, number: int, words: int) -> str:
    return " ".join(f"w{word}" for word in draw.integers(0, words, number))


def write_tokenizer(folder: Path, words: int) -> None:
    """A tokenizer of words, each of which is a token."""
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    vocabulary = [*names.values(), *(f"w{at}" for at in range(words))]
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)


def shape_of(name: str, words: int, tiny: bool) -> Row:
    return SHAPES[name] | ({**TINY, "vocab_size": words + 8} if tiny else {})


def write_rows(path: Path, values: Sequence[Any], key: str = "text") -> None:
    """Rows of one key."""
    path.write_text("".join(json.dumps({key: value}) + "\n" for value in values))


def run_trainer(folder: Path, what: str) -> Row:
    """A process of trainer.py; what it prints last. Raises RuntimeError where it fails."""
    words = [sys.executable, "-m", "benchmarks.trainer", str(folder), what]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError("out of memory" if "OutOfMemoryError" in done.stderr else last)
    result: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_packlora(file: Path, out: Path, **environment: str) -> tuple[Row, list[Row], list[Row]]:
    """`packlora train` by its command: the result of run.json, and the lines of metrics.jsonl and microbatches.jsonl.

    Raises:
        RuntimeError: it failed.
    """
    words = [sys.executable, "-m", "packlora", "train", str(file), "--set", f"output_dir={out}"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-500:])
    logs = [(out / f"{name}.jsonl").read_text().splitlines() for name in ("metrics", "microbatches")]
    metrics, microbatches = ([json.loads(line) for line in lines] for lines in logs)
    return json.loads((out / "run.json").read_text())["result"], metrics, microbatches


# --- anchors -----------------------------------------------------------------------------------------------------------


def _anchor(label: str, shape: str, **more: Any) -> Case:
    """A job whose samples have exactly `sequence` tokens. trained: begin with an adapter whose DoRA scales differ from 1 by
    about 1e-2. nemo: tokens per second by NeMo AutoModel."""
    values = {
        "sequence": 2048,
        "microbatch": 2,
        "accumulation": 4,
        "dropout": 0.0,
        "use_dora": False,
        "trained": False,
        "compute": "dtype",
        "quantization": None,
        "steps": 12,
        "nemo": None,
    }
    return case(label, **values | {"shape": shape} | more)


_NEMO = {"sequence": 4096, "accumulation": 16, "dropout": 0.1, "steps": 4}
ANCHOR_CASES = [
    _anchor("s06", "Qwen3-0.6B", steps=40),
    _anchor("s06_fp8", "Qwen3-0.6B", compute="fp8", steps=40),
    _anchor("s17", "Qwen3-1.7B", steps=24),
    _anchor("s4", "Qwen3-4B"),
    _anchor("s8", "Qwen3-8B"),
    _anchor("q8", "Qwen3-8B", quantization="nf4"),
    _anchor("s8_fp8", "Qwen3-8B", compute="fp8"),
    _anchor("dora8_small", "Qwen3-8B", dropout=0.05, use_dora=True, steps=8),
    _anchor("dora8_small_fp8", "Qwen3-8B", dropout=0.05, use_dora=True, compute="dora_fp8", steps=8),
    _anchor("dora8", "Qwen3-8B", dropout=0.05, use_dora=True, trained=True, steps=8),
    _anchor("dora8_fp8", "Qwen3-8B", dropout=0.05, use_dora=True, trained=True, compute="dora_fp8", steps=8),
    _anchor("s14", "Qwen3-14B", steps=8),
    _anchor("nemo8", "Llama-3.1-8B", nemo=12473, **_NEMO),
    _anchor("nemoq7", "Qwen2.5-7B", nemo=14110, **_NEMO),
]
"""In an order in which few base models are written."""


def published(one: Case, card: str) -> Row:
    """Figures of others for a case: on this card, else on an H100."""
    if one.nemo:
        return {"published": {"NeMo AutoModel": one.nemo}, "source": NEMO}
    card = card if one.shape in PUBLISHED.get(card, {}) else "H100 SXM"
    if one.use_dora or one.shape not in PUBLISHED[card]:
        return {"published": {}, "source": ""}
    names = ("Unsloth NF4", "Surogate QoFP8") if one.quantization else NAMES[:4]
    figures = dict(zip(NAMES, PUBLISHED[card][one.shape], strict=True))
    return {"published": {name: figures[name] for name in names}, "source": f"{SUROGATE}, {card}"}


OTHERS = {"s06": ["trainer_frozen", "trainer_peft_compiled", "accelerate_compiled"]}
"""More contenders, for a model whose launches take the host longer than the GPU computes."""


def anchor_cases(options: Options) -> list[Case]:
    """Each contender is a case of its own, with a row of its own."""
    card = "H200" if torch.cuda.is_available() and "H200" in torch.cuda.get_device_name() else "H100 SXM"
    return [
        case(f"{one.label} {contender}", anchor=one.label, contender=contender, **one.values, **published(one, card))
        for one in (ANCHOR_CASES[:1] if options.quick else ANCHOR_CASES)
        for contender in ["train", "trainer_peft", "accelerate"] + ([] if options.quick else OTHERS.get(one.label, []))
        if contender == "train" or one.compute == "dtype"
    ]


SETTINGS = ("sequence", "microbatch", "accumulation", "steps", "trained", "compute", "quantization")
"""Values of a case that its contenders read."""


def measure_anchor(one: Case, names: list[str], options: Options) -> Row:
    """Run a contender to its end. A row without tokens_per_s says why in `error`."""
    settings = {key: one.values[key] for key in SETTINGS}
    if options.tiny:
        settings |= {"sequence": 32, "accumulation": 1, "steps": 4}
    folder = options.shared((one.shape, one.trained), tempfile.TemporaryDirectory)
    adapter = {
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": one.dropout,
        "use_dora": one.use_dora,
        "target_modules": TARGETS,
    }
    path, error = Path(folder.name), None
    write_anchor(path, {**settings, "adapter": adapter, "shape": shape_of(one.shape, WORDS, options.tiny)})
    start = time.perf_counter()
    tokens_per_step = settings["sequence"] * settings["microbatch"] * settings["accumulation"]
    try:
        if one.contender == "train":
            ends, gib = train_anchor(path, settings, adapter)
        else:
            result = run_trainer(path, one.contender)
            ends, gib = result["ends"], result["gib"]
    except RuntimeError as failure:
        error = str(failure)
    row: Row = {"wall_s": time.perf_counter() - start, "tokens_per_s": None}
    if error is not None:
        return row | {"error": error}
    took = [end - before for before, end in itertools.pairwise(ends)][WARM_STEPS - 1 :]
    seconds = statistics.median(took)
    return row | {
        "tokens_per_s": tokens_per_step / seconds, "step_s": seconds, "fastest_step_s": min(took),
        "slowest_step_s": max(took), "counted": len(took), "gib": gib, "tokens": tokens_per_step * len(ends),
    }  # fmt: skip


def write_anchor(folder: Path, settings: Row) -> None:
    """Samples and settings of a case; the base model, its tokenizer and, where asked for, a trained adapter, unless they are
    there. Samples are token ids: transformers reads the tokenizer of a qwen2 folder as Qwen2Tokenizer, which has no words."""
    number = settings["microbatch"] * settings["accumulation"] * settings["steps"]
    ids = np.random.default_rng(0).integers(0, WORDS, (number, settings["sequence"]))
    write_rows(folder / "data.jsonl", ids.tolist(), "input_ids")
    (folder / "case.json").write_text(json.dumps(settings))
    if not (folder / "base" / "config.json").exists():
        write_tokenizer(folder / "base", WORDS)
        run_trainer(folder, "base")


def train_anchor(folder: Path, settings: Row, adapter: Row) -> tuple[list[float], float]:
    """Ends of optimizer steps in seconds, and the peak of memory in GiB."""
    start = {"init_from": str(folder / "adapter")} if settings["trained"] else {}
    size, budget = settings["microbatch"] * settings["accumulation"], settings["microbatch"] * settings["sequence"]
    job = {
        "name": "a", "data": {"path": str(folder / "data.jsonl"), "max_length": settings["sequence"]},
        "adapter": adapter | start,
        "train": {"num_train_epochs": 1, "learning_rate": 1e-4, "global_batch_size": size},
    }  # fmt: skip
    run = {
        "base_model": str(folder / "base"),
        "compute": settings["compute"],
        "quantization": settings["quantization"],
        "max_tokens_per_microbatch": budget,
        "jobs": [job],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    result, steps, _ = run_packlora(folder / "run.yaml", folder / "out")
    shutil.rmtree(folder / "out")
    return [step["elapsed"] for step in steps if step.get("loss") is not None], (
        result["peak_memory_bytes"] or 0
    ) / 2**30


def anchor_summary(rows: list[Row]) -> Row:
    """Figures by case and contender: `s8_tokens_per_s`, `s8_trainer_peft_tokens_per_s`, `s8_gib`, ..."""
    out: Row = {}
    for row in rows:
        key = row["case"].split()[0] + ("" if row["contender"] == "train" else f"_{row['contender']}")
        out |= {f"{key}_{name}": row[name] for name in ("tokens_per_s", "gib") if row.get(name) is not None}
    return out


ANCHORS = Benchmark(
    anchor_cases, measure_anchor, anchor_summary,
    f"One job on random bfloat16 weights of the model's shape; LoRA or DoRA r 16, alpha 32, on {', '.join(TARGETS)}; "
    "AdamW, clipping, samples of token ids of exactly the sequence length (packing gains nothing), global batch = microbatch "
    "x accumulation. train: `python -m packlora train`, defaults but max_tokens_per_microbatch = microbatch x "
    "sequence; of the rows _fp8 with compute: fp8; of q8 with quantization: nf4, in the Trainer by bitsandbytes. "
    "trainer_peft: the Hugging Face Trainer with PEFT, bfloat16 base, float32 adapters under autocast, "
    "sdpa, use_liger_kernel. accelerate: the same Trainer after packlora.accelerate(model). "
    "trainer_frozen: the same without adapters, gradients down to a factor of the embedding's output. "
    "_compiled: with torch_compile, block by block. tokens_per_s: tokens of an optimizer step over the median time from the "
    f"end of one step to the end of the next, the first {WARM_STEPS} left out. gib: peak of memory allocated on the device. "
    "wall_s: the contender's whole process. published: figures of others from the source named, not measured here.",
    ["packlora"], by_case=True,
)  # fmt: skip


# --- the command, from start to end ----------------------------------------------------------------------------------------

RANKS, SAMPLES, MEAN, SPREAD, SHORTEST, LONGEST = (8, 16, 32, 64), 3000, 250, 0.6, 16, 1500
"""Jobs by rank; samples of each; words of a sample: median and the spread of their logarithm, bounds."""


def command_cases(options: Options) -> list[Case]:
    return [case("cold", run="nothing compiled before"), case("warm", run="compiled before")]


def write_command(folder: Path, tiny: bool) -> Path:
    """The base model, the data and the run file, which is returned."""
    words, number, mean = (1000, 24, 20) if tiny else (1000, SAMPLES, MEAN)
    write_tokenizer(folder / "base", words)
    (folder / "case.json").write_text(json.dumps({"shape": shape_of("Qwen3-0.6B", words, tiny), "trained": False}))
    run_trainer(folder, "base")
    draw, jobs = np.random.default_rng(0), []
    for rank in RANKS:
        lengths = np.clip(draw.lognormal(np.log(mean), SPREAD, number), SHORTEST, LONGEST).astype(int)
        write_rows(folder / f"r{rank}.jsonl", [words_of(draw, length, words) for length in lengths])
        adapter = {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.1}
        train = {"num_train_epochs": 1, "learning_rate": 1e-4}
        jobs.append({"name": f"r{rank}", "data": {"path": f"r{rank}.jsonl"}, "adapter": adapter, "train": train})
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({"base_model": str(folder / "base"), "output_dir": "out", "jobs": jobs}))
    return file


def measure_command(one: Case, names: list[str], options: Options) -> Row:
    """A run of the command, whose caches are in the folder of the run file; the first one finds them empty."""

    def make() -> tuple[Any, Path]:
        folder = tempfile.TemporaryDirectory()
        return folder, write_command(Path(folder.name), options.tiny)

    _, file = options.shared("command", make)
    caches = {"TRITON_CACHE_DIR": str(file.parent / "triton"), "PACKLORA_CACHE": str(file.parent / "packlora")}
    start = time.perf_counter()
    result, _, microbatches = run_packlora(file, file.parent / one.label, **caches)
    return where_time_went(time.perf_counter() - start, result, microbatches)


def where_time_went(wall: float, result: Mapping[str, Any], microbatches: Sequence[Row]) -> Row:
    """Seconds of a run by what they were spent on. result: of run.json; microbatches: lines of microbatches.jsonl."""
    ends = [line["elapsed"] for line in microbatches]
    took = [end - before for end, before in zip(ends, [0.0, *ends[:-1]], strict=True)]
    usual = statistics.median(took)
    tokens = [sum(line["tokens"].values()) for line in microbatches]
    smooth = [at for at, seconds in enumerate(took) if seconds < 2 * usual]
    stalls = sum(seconds - usual for at, seconds in enumerate(took) if at and seconds >= 2 * usual)
    return {
        "wall_s": wall, "training_s": result["seconds"], "before_training_s": wall - result["seconds"],
        "tokens_per_s": result["tokens"] / wall, "first_microbatch_s": took[0], "stalls_s": stalls,
        "end_s": result["seconds"] - ends[-1],
        "microbatches": len(took), "median_microbatch_s": usual, "tokens": result["tokens"],
        "between_stalls_tokens_per_s": sum(tokens[at] for at in smooth) / sum(took[at] for at in smooth),
        "predicted_s": sum(line["predicted"] for line in microbatches), "peak_gib": (result["peak_memory_bytes"] or 0) / 2**30,
    }  # fmt: skip


def command_summary(rows: list[Row]) -> Row:
    out: Row = {}
    for row in rows:
        out |= {f"{row['case']}_{key}": row[key] for key in ("wall_s", "training_s", "tokens_per_s")}
    return out


COMMAND = Benchmark(
    command_cases, measure_command, command_summary,
    "`python -m packlora train run.yaml` in a folder with Qwen3-0.6B's shape (random bfloat16 weights), a tokenizer "
    f"of words and four jsonl files of {SAMPLES} samples (log-normal lengths, median {MEAN}, {SHORTEST} to {LONGEST} "
    f"words). The run file names the model, the folder and the jobs: ranks {', '.join(map(str, RANKS))}, "
    "lora_dropout 0.1, one epoch, learning rate 1e-4; all else is packlora's default, checkpoints every 50 steps "
    "included. Two runs, the first with empty caches of Triton and packlora. wall_s: from the start of the process "
    "to its end; training_s: what run.json says of it; between_stalls_tokens_per_s: over microbatches that end less "
    "than twice the median after the one before; stalls_s: what the others took beyond the median, without the "
    "first, which is first_microbatch_s; end_s: after the last.",
    ["packlora"], by_case=True,
)  # fmt: skip
