"""One LoRA or DoRA job as published figures measure it: tokens per second beside what people use.

Owns the table of cases, the inputs on disk and the `packlora train` contender. Each contender runs in a process of its
own, so that its peak of memory is its own. `anchor_trainer.py` holds the other two contenders: the Hugging Face Trainer
with PEFT, and the same after `packlora.accelerate`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.results import check_writable, device_slug, write_results

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONTENDERS = ("train", "trainer_peft", "accelerate")
WORDS = 5000
WARM_STEPS = 2
"""Optimizer steps at the start that are not counted: kernels are compiled and graphs recorded in them."""

_QWEN3 = {
    "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-1.7B": {
        **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-4B": {
        **_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-14B": {
        **_QWEN3, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "Llama-3-8B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}  # fmt: skip

SUROGATE = "Surogate, docs/reference/benchmarks.md, H100 SXM"
NEMO = "NVIDIA NeMo AutoModel, docs/performance-summary.mdx (2026-06-12), one H100"


@dataclass(frozen=True, slots=True)
class Anchor:
    """One job: a model's shape, samples of exactly `sequence` tokens, and what others publish for it."""

    shape: str
    sequence: int = 2048
    microbatch: int = 2
    accumulation: int = 4
    dropout: float = 0.0
    use_dora: bool = False
    trained: bool = False
    """Begin with an adapter whose DoRA scales differ from 1 by about 1e-2, as after some training."""
    steps: int = 12
    published: dict[str, int] = field(default_factory=dict)
    """Tokens per second by contender, as others publish them."""
    source: str = ""

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.microbatch * self.accumulation


def _surogate(unsloth_nf4: int, unsloth: int, surogate: int, surogate_fp8: int) -> dict[str, int]:
    return {"Unsloth NF4": unsloth_nf4, "Unsloth": unsloth, "Surogate": surogate, "Surogate FP8": surogate_fp8}


ANCHORS = {
    "s06": Anchor("Qwen3-0.6B", steps=40, published=_surogate(21000, 24500, 62000, 58000), source=SUROGATE),
    "s17": Anchor("Qwen3-1.7B", steps=24, published=_surogate(20000, 23000, 37500, 37500), source=SUROGATE),
    "s4": Anchor("Qwen3-4B", published=_surogate(12600, 13100, 17500, 18700), source=SUROGATE),
    "s8": Anchor("Qwen3-8B", published=_surogate(8600, 9100, 11600, 12900), source=SUROGATE),
    "s14": Anchor("Qwen3-14B", steps=8, published=_surogate(5200, 5600, 6800, 8000), source=SUROGATE),
    "nemo8": Anchor("Llama-3-8B", 4096, 2, 16, 0.1, steps=6, published={"NeMo AutoModel": 12473}, source=NEMO),
    "nemoq7": Anchor("Qwen2.5-7B", 4096, 2, 16, 0.1, steps=6, published={"NeMo AutoModel": 14110}, source=NEMO),
    "dora8": Anchor("Qwen3-8B", dropout=0.05, use_dora=True, trained=True, steps=8),
    "dora8_small": Anchor("Qwen3-8B", dropout=0.05, use_dora=True, steps=8),
}
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 16, "vocab_size": WORDS + 8}  # fmt: skip
PROTOCOL = (
    "One job on random bfloat16 weights of the model's shape; LoRA or DoRA r 16, alpha 32, on {targets}; AdamW, clipping, "
    "samples of exactly the sequence length (so packing gains nothing), global batch = microbatch x accumulation. train: "
    "`python -m packlora train`, defaults but max_tokens_per_microbatch = microbatch x sequence. trainer_peft: the Hugging "
    "Face Trainer with PEFT, bfloat16 base, float32 adapters under autocast, sdpa, use_liger_kernel. accelerate: the same "
    "Trainer after packlora.accelerate(model). tokens_per_s: tokens of an optimizer step over the median time from the end "
    "of one step to the end of the next, the first {warm} left out. gib: peak of memory allocated on the device. wall_s: the "
    "contender's whole process. published: figures of others from the source named, not measured here."
)
Row = dict[str, Any]


def main() -> None:
    """Measure the cases asked for; rows of other cases stay in the file as they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--quick", action="store_true", help="toy sizes, on any device")
    parser.add_argument("--only", default=",".join(ANCHORS), help="cases, separated by commas")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="separated by commas")
    args = parser.parse_args()
    check_writable(args.out)
    names, contenders = args.only.split(","), args.contenders.split(",")
    if unknown := sorted({*names} - {*ANCHORS}) + sorted({*contenders} - {*CONTENDERS}):
        raise SystemExit(
            f"anchors: {unknown[0]!r} is neither a case ({', '.join(ANCHORS)}) nor a contender ({', '.join(CONTENDERS)})"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.quick:
        raise SystemExit("anchors: this needs a GPU; --quick runs toy sizes on a CPU")
    label = f"anchors-{device_slug(device)}"
    rows = _kept(args.out, label, names, contenders)
    with tempfile.TemporaryDirectory(prefix="anchors-") as scratch:
        for name in names:
            folder = Path(scratch) / name
            anchor = write_inputs(folder, ANCHORS[name], args.quick)
            for contender in contenders:
                row = {"case": name, "contender": contender, **measure(folder, anchor, contender)}
                rows.append(row | {"published": anchor.published, "source": anchor.source})
                print(_line(row), flush=True)
                write_results(args.out, label, _protocol(), rows, summary_of(rows, args.quick), str(device))
            shutil.rmtree(folder)


def _line(row: Row) -> str:
    start = f"{row['case']:12} {row['contender']:13}"
    if row["tokens_per_s"] is None:
        return f"{start} failed: {row['error']}"
    return f"{start} {row['tokens_per_s']:9.0f} tokens/s {row['gib']:6.1f} GiB {row['wall_s']:6.1f} s"


def _protocol() -> str:
    return PROTOCOL.format(targets=", ".join(TARGETS), warm=WARM_STEPS)


def _kept(out: Path, label: str, names: list[str], contenders: list[str]) -> list[Row]:
    """Rows of an earlier file that are not measured again. Each names the commit that it was measured at."""
    if not out.exists():
        return []
    file = json.loads(out.read_text())
    if file["name"] != label:
        raise SystemExit(f"anchors: {out} is of {file['name']}; this is {label}. Name another file.")
    origin = {"measured": {"commit": file["commit"], "date": file["date"]}}
    return [origin | row for row in file["rows"] if not (row["case"] in names and row["contender"] in contenders)]


def summary_of(rows: list[Row], quick: bool = False) -> dict[str, Any]:
    """Figures by case and contender: `s8_tokens_per_s`, `s8_trainer_peft_tokens_per_s`, `s8_gib`, ..."""
    out: dict[str, Any] = {}
    for row in rows:
        own = "" if row["contender"] == "train" else f"_{row['contender']}"
        for key in ("tokens_per_s", "gib"):
            if row.get(key) is not None:
                out[f"{'part_' * quick}{row['case']}{own}_{key}"] = row[key]
    return out


# --- inputs ------------------------------------------------------------------------------------------------------------


def write_inputs(folder: Path, anchor: Anchor, quick: bool) -> Anchor:
    """Write the base model, its tokenizer, samples and, where asked for, a trained adapter. Returns the case as it is run."""
    if quick:
        anchor = replace(anchor, sequence=32, accumulation=2, steps=5)
    folder.mkdir(parents=True)
    shape = SHAPES[anchor.shape] | (TOY if quick else {})
    words = {word: at for at, word in enumerate(["<eos>", "<pad>", "<unk>", *(f"w{at}" for at in range(WORDS))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder / "base")
    draw = np.random.default_rng(0)
    texts = [
        " ".join(f"w{word}" for word in draw.integers(0, WORDS, anchor.sequence - 1))
        for _ in range(anchor.microbatch * anchor.accumulation * anchor.steps)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "case.json").write_text(
        json.dumps({
            "shape": shape, "sequence": anchor.sequence, "microbatch": anchor.microbatch,
            "accumulation": anchor.accumulation, "adapter": adapter_of(anchor), "trained": anchor.trained,
        })
    )  # fmt: skip
    _python(folder, "base")
    return anchor


def adapter_of(anchor: Anchor) -> dict[str, Any]:
    """Keys that a run file and PEFT's LoraConfig share."""
    return {
        "r": 16, "lora_alpha": 32, "lora_dropout": anchor.dropout, "use_dora": anchor.use_dora, "target_modules": TARGETS
    }  # fmt: skip


def _python(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.anchor_trainer", str(folder), what], capture_output=True, text=True
    )
    if what == "base" and done.returncode:
        raise SystemExit(f"anchors: the base model was not written:\n{done.stderr[-3000:]}")
    return done


# --- contenders --------------------------------------------------------------------------------------------------------


def measure(folder: Path, anchor: Anchor, contender: str) -> Row:
    """Run a contender to its end. A row without tokens_per_s says why in `error`."""
    start = time.perf_counter()
    try:
        ends, gib = _train(folder, anchor) if contender == "train" else _trainer(folder, contender)
    except RuntimeError as error:
        return {"tokens_per_s": None, "error": str(error), "wall_s": time.perf_counter() - start}
    took = [end - before for before, end in itertools.pairwise(ends)][WARM_STEPS - 1 :]
    seconds = statistics.median(took)
    return {
        "tokens_per_s": anchor.tokens_per_step / seconds, "step_s": seconds, "fastest_step_s": min(took),
        "slowest_step_s": max(took), "steps": len(took), "gib": gib, "wall_s": time.perf_counter() - start,
        "tokens": anchor.tokens_per_step * anchor.steps if contender == "train" else anchor.tokens_per_step * len(ends),
    }  # fmt: skip


def _train(folder: Path, anchor: Anchor) -> tuple[list[float], float]:
    """`packlora train` by its command: ends of optimizer steps in seconds, and the peak of memory in GiB."""
    out = folder / "out"
    adapter = adapter_of(anchor) | ({"init_from": str(folder / "adapter")} if anchor.trained else {})
    job = {
        "name": "a", "data": {"path": str(folder / "data.jsonl"), "max_length": anchor.sequence}, "adapter": adapter,
        "train": {
            "num_train_epochs": 1, "learning_rate": 1e-4, "global_batch_size": anchor.microbatch * anchor.accumulation,
        },
    }  # fmt: skip
    file = folder / "run.yaml"
    budget = anchor.microbatch * anchor.sequence
    run_keys = {"base_model": str(folder / "base"), "output_dir": str(out), "max_tokens_per_microbatch": budget}
    file.write_text(yaml.safe_dump({**run_keys, "jobs": [job]}))
    done = subprocess.run([sys.executable, "-m", "packlora", "train", str(file)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-500:])
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    peak = json.loads((out / "run.json").read_text())["result"]["peak_memory_bytes"] or 0
    shutil.rmtree(out)
    return [step["elapsed"] for step in steps if step.get("loss") is not None], peak / 2**30


def _trainer(folder: Path, contender: str) -> tuple[list[float], float]:
    done = _python(folder, contender)
    if done.returncode:
        if "OutOfMemoryError" in done.stderr:
            raise RuntimeError("out of memory")
        raise RuntimeError((done.stderr.strip() or "no message").splitlines()[-1])
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result["ends"], result["gib"]
