"""`benchmarks small`: where the host decides. Small models, single layers and training of short samples, in every mode.

    python -m benchmarks small --out small-h200.json --parts train             # three pieces that add to one file
    python -m benchmarks small --out small-h200.json --parts layers
    python -m benchmarks small --out small-h200.json --parts models
    python -m benchmarks small --out small-h200.json --parts models --resume   # goes on where a piece was ended

Each side is compared in its best mode: as it is, under torch.compile, or with CUDA graphs that torch.compile records. Parts
models and layers are in small_models.py, train in small_train.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import small_train
from benchmarks.layer import progress_line
from benchmarks.modes import MODES, forget
from benchmarks.options import PARTS, Options, Outcome, choose
from benchmarks.results import text_table
from benchmarks.small_models import (
    CONTENDERS,
    LayerCase,
    ModelCase,
    layer_cases,
    measure_layer,
    measure_model,
    model_cases,
)
from benchmarks.small_train import TrainCase
from packlora.schedule.planner import WINDOW_ROUNDS

Case = ModelCase | LayerCase | TrainCase
OWN, PEER = "packlora", "peft_bf16"
PROTOCOL = (
    "models: decoder layers of models (8x0.6B: 8 layers of Qwen3-0.6B's shape, 4x8B: 4 of Llama-3.1-8B's, 0.6B and "
    "1.7B: whole), random bfloat16 weights, from embeddings to hidden states and back from a random upstream "
    "gradient, samples of 2048 tokens. frozen: no adapter, forward and input gradient. peft_bf16: the PEFT model with "
    "bfloat16 adapters, LoRA or DoRA r 16, alpha 32, no dropout, B not zero. packlora: packlora.accelerate on it. "
    "Each in three modes: eager; compiled: torch.compile; reduce-overhead: torch.compile(mode='reduce-overhead'); of "
    "the model for 8x0.6B with LoRA and one sample, else of each decoder layer. "
    "Compiled, transformers gives attention a mask tensor, to all sides alike. layers: the cases of `bench layer` and "
    "of the layers of `bench dora`, packlora by accelerate() and PEFT with bfloat16 adapters, in the same modes; "
    "without dropout what packlora gives is compared with PEFT's eager layer first. The contenders of one mode run in "
    "turn inside one loop, in a new random order each round; wall_ms: 15 more rounds in which each run is waited for, "
    "medians. A side's best mode is that of its least wall_ms; a figure against PEFT's best is the ratio of these "
    "medians. For layers L2 is flushed before each run; weights and activations of a model are larger than L2, so "
    "there it makes no difference and is not done. compile_s: of the first three runs, in a process that may have "
    "compiled other cases. train: four jobs of short samples (ranks 8 to 64, dropout 0.1, {batch} samples a step of a "
    "job, at most {budget} tokens a microbatch; lengths as in short- jobs) in the training loop's own windows of {window} "
    "steps of each job; PEFT "
    "one job after the other with bfloat16 adapters: packed into rows that keep samples apart; in rows of 1024 tokens "
    "that do not; both again with liger-kernel; compiled: the job with the most tokens, r 16, its tokens as one "
    "stream in batches of 4 x 1024, reduce-overhead, no padding; its rate stands for all four jobs and its start "
    "counts once. Optimizer steps included, real tokens, planning beside training not counted. tokens_per_s: median "
    "over {units} units, windows or {rounds} steps of each job, after {warmup}, and for packlora after {lead} more, for it "
    "meets new shapes of microbatches for as long. with_start: over as many tokens as packlora trains on, and what "
    "compiling, recording graphs and choosing plans took. predicted: the profiler's, for the microbatches alone."
)


def cases(options: Options) -> list[Case]:
    """Those of the parts that are asked for."""
    makers: dict[str, Any] = {"models": model_cases, "layers": layer_cases, "train": small_train.cases}
    return [case for part in PARTS["small"] if options.wants(part) for case in makers[part](options)]


def part_of(row: dict[str, Any]) -> str:
    part: str = row["part"]
    return part


def run(options: Options) -> Outcome:
    """Measure; prints a line per case."""
    names, chosen = choose(options.only, CONTENDERS, [], cases(options))
    rows = list(options.kept)
    for case in options.each(chosen, rows):
        rows.append(measured_row(case, names, options))
    rows.sort(key=lambda row: PARTS["small"].index(part_of(row)))
    protocol = PROTOCOL.format(
        batch=small_train.BATCH, budget=small_train.BUDGET, units=small_train.UNITS, rounds=small_train.ROUNDS,
        window=WINDOW_ROUNDS,
        warmup=small_train.WARMUP, lead=small_train.LEAD,
    )  # fmt: skip
    return Outcome(protocol, rows, options.keys(summary(rows), by_case=True), table(rows))


def measured_row(case: Case, names: Sequence[str], options: Options) -> dict[str, Any]:
    """A case's row of the results; prints it."""
    if isinstance(case, TrainCase):
        return small_train.measured_row(case, options)
    measure: Any = measure_model if isinstance(case, ModelCase) else measure_layer
    timings, seconds = measure(case, names, options)
    row = {
        "part": case.part, "case": case.label, "of": case.of, "mode": case.mode, "dora": case.dora, **timings.row(),
        "compile_s": seconds,
    }  # fmt: skip
    print(progress_line(row) + "".join(f" | {name} compiled in {s:.1f} s" for name, s in seconds.items()), flush=True)
    del timings
    forget(options.device)
    return row


# --- figures -----------------------------------------------------------------------------------------------------------


def wall(row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds on the wall by contender; on a CPU all are."""
    times: dict[str, float] = row.get("wall_ms", row["ms"])
    return times


def best(rows: Sequence[dict[str, Any]], of: str, name: str, modes: Sequence[str] = MODES) -> tuple[str, float] | None:
    """The mode in which a contender takes least time in a case, and the milliseconds; None where it failed in all."""
    found = {row["mode"]: wall(row)[name] for row in rows if row.get("of") == of and name in wall(row)}
    known = {mode: ms for mode, ms in found.items() if mode in modes}
    return min(known.items(), key=lambda item: item[1]) if known else None


def against_peft(rows: Sequence[dict[str, Any]], of: str, modes: Sequence[str] = MODES) -> float | None:
    """Time of PEFT in its best mode over packlora's in its best of `modes`."""
    own, peer = best(rows, of, OWN, modes), best(rows, of, PEER)
    return peer[1] / own[1] if own and peer else None


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted; None where one could not be measured. worst_wall_vs_peft is None, not a minimum over fewer
    cases, where a case of models or layers has no figure."""
    timed = [row for row in rows if part_of(row) != "train"]
    names = list(dict.fromkeys(row["of"] for row in timed))
    out: dict[str, Any] = {}
    for key, of in (
        ("8x06b", "model 8x0.6B 1x2048 lora_r16"),
        ("8x06b_dora", "model 8x0.6B 1x2048 dora_r16"),
        ("17b", "model 1.7B 1x2048 lora_r16"),
    ):
        out[f"compiled_{key}_2048_vs_peft_best"] = against_peft(timed, of, MODES[1:])
    ratios = {of: against_peft(timed, of) for of in names}
    known = {of: value for of, value in ratios.items() if value is not None}
    gpu = Options(torch.device("cuda"))
    whole = {case.of for case in model_cases(gpu)} | {case.of for case in layer_cases(gpu)}
    out["worst_wall_vs_peft"] = min(known.values()) if whole <= known.keys() else None
    out["worst_wall_vs_peft_case"] = min(known, key=known.__getitem__) if whole <= known.keys() else None
    out["wall_cases"] = len(known)
    train = {f"train_{key}": None for key in ("06b_tokens_per_s", "06b_vs_peft_best", "8b_vs_peft_best")}
    return out | train | small_train.summary([row for row in rows if part_of(row) == "train"])


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each case and contender with its time in each mode; then training."""
    lines = []
    timed = [row for row in rows if part_of(row) != "train"]
    for of in dict.fromkeys(row["of"] for row in timed):
        by_mode = {row["mode"]: wall(row) for row in timed if row["of"] == of}
        for name in CONTENDERS:
            cells = [f"{by_mode[mode][name]:.3f}" if name in by_mode.get(mode, {}) else "-" for mode in MODES]
            ratio = against_peft(timed, of) if name == OWN else None
            if set(cells) != {"-"}:
                lines.append([of, name, *cells, "" if ratio is None else f"{ratio:.3f}"])
    out = (
        text_table(["case", "contender", *(f"{mode} ms" for mode in MODES), "PEFT's best / best"], lines)
        if lines
        else []
    )
    train = small_train.table([row for row in rows if part_of(row) == "train"])
    if train:
        out += ["", *text_table(["case", "way", "tokens/s", "with the start", "start s"], train)]
    return out
