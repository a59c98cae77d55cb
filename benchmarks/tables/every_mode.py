"""The section of docs/benchmarks.md on small models, single layers and short samples, each side in its best mode."""

from __future__ import annotations

from typing import Any

from benchmarks.modes import MODES
from benchmarks.small import OWN, PEER, against_peft, best, part_of, wall
from benchmarks.small_models import CONTENDERS
from benchmarks.tables.result_files import not_measured, of_each, ratio

NAMES = dict(zip(CONTENDERS, ("frozen", "packlora", "PEFT"), strict=True))
WAYS = {
    "packlora": "packlora", "peft_packed": "PEFT, packed", "peft_rows": "PEFT, rows cut without regard to samples",
    "peft_packed_liger": "PEFT, packed, liger-kernel", "peft_rows_liger": "PEFT, rows, liger-kernel",
    "peft_compiled": "PEFT, compiled, one shape",
}  # fmt: skip
TRAINED = {"06b": "Qwen3-0.6B's shape", "8b": "8 layers of Llama-3.1-8B's shape"}


def every_mode() -> list[str]:
    """Whole models, then training; of single layers those in which PEFT is ahead. One device after the other."""
    return of_each("small-h200", "small-h100", section=_on_a_device)


def _on_a_device(name: str, file: dict[str, Any]) -> list[str]:
    rows = file["rows"]
    lines = [
        f"Where the host, not the GPU, may set the time, on one {file['device']}, bfloat16: milliseconds on the wall of a "
        "forward and backward, as it is (eager), under `torch.compile`, and under its mode `reduce-overhead`, which records "
        "CUDA graphs. Of 8x0.6B 1x2048 lora the whole model is compiled, of other models each decoder layer. LoRA or DoRA r 16 "
        f"without dropout ([{name}.json](../benchmarks/results/{name}.json)).",
    ]
    for section in (_models(rows), _layers(rows), _train(rows)):
        lines += ["", *section] if section else []
    return lines + not_measured(file)


def _models(rows: list[dict[str, Any]]) -> list[str]:
    own = [row for row in rows if part_of(row) == "models"]
    lines = []
    for of in dict.fromkeys(row["of"] for row in own):
        by_mode = {row["mode"]: wall(row) for row in own if row["of"] == of}
        cells = []
        for name in CONTENDERS:
            times = [by_mode.get(mode, {}).get(name) for mode in MODES]
            cells.append(" / ".join("-" if ms is None else f"{ms:.1f}" for ms in times))
        title = of.removeprefix("model ").replace("_", " ")
        lines.append(f"| {title} | {' | '.join(cells)} | {ratio(against_peft(own, of))} |")
    if not lines:
        return []
    head = " | ".join(f"{NAMES[name]}: eager / compiled / reduce-overhead" for name in CONTENDERS)
    return [f"| model | {head} | PEFT's best over packlora's best |", "|---|---|---|---|---|", *lines]


def layers_behind(rows: list[dict[str, Any]]) -> tuple[dict[str, float], int]:
    """Single layers that PEFT computes faster on the wall, each side in its best mode, as times of PEFT over packlora's, the
    worst first; and how many layers there are."""
    own = [row for row in rows if part_of(row) == "layers"]
    ratios = {of: against_peft(own, of) for of in dict.fromkeys(row["of"] for row in own)}
    found = {of: value for of, value in ratios.items() if value is not None and value < 1}
    return dict(sorted(found.items(), key=lambda item: item[1])), len(ratios)


def _layers(rows: list[dict[str, Any]]) -> list[str]:
    own = [row for row in rows if part_of(row) == "layers"]
    if not own:
        return []
    behind, cases = layers_behind(rows)
    lines = []
    for of, value in behind.items():
        mine, peer = (best(own, of, name) for name in (OWN, PEER))
        assert mine is not None and peer is not None
        lines.append(f"| {of} | {mine[0]} {mine[1]:.3f} | {peer[0]} {peer[1]:.3f} | {value:.2f} |")
    words = f"Of {cases} cases of one layer, each side in its best mode on the wall, PEFT is ahead in {len(behind)}"
    if not lines:
        return [f"{words}."]
    head = ["| layer | packlora, ms | PEFT, ms | PEFT over packlora |", "|---|---|---|---|"]
    return [f"{words}:", "", *head, *lines]


def _train(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if part_of(row) != "train":
            continue
        title, own = TRAINED[row["key"]], row["tokens_per_s"].get(OWN)
        for name, rate in row["tokens_per_s"].items():
            times = "" if name == OWN or own is None else f"{own / rate:.2f}x"
            start = f"{row['with_start_tokens_per_s'][name]:.0f} | {row['start_s'][name]:.1f}"
            lines.append(f"| {title} | {WAYS[name]} | {rate:.0f} | {start} | {times} |")
        lines += [f"| {title} | {WAYS[name]} | failed | | | |" for name in row["failed"]]
        if row.get("predicted_tokens_per_s"):
            lines.append(f"| {title} | packlora, predicted | {row['predicted_tokens_per_s']:.0f} | | | |")
    if not lines:
        return []
    return [
        "Training four jobs of short samples (ranks 8 to 64, dropout 0.1), real tokens per second with optimizer steps; PEFT "
        "trains one job after the other. *With the start*: over all of the benchmark, with what compiling, recording graphs "
        "and choosing plans took (*start*). PEFT's compiled way is one job on one shape without padding, which is the least "
        "that it can take; its start counts once. *Predicted*: by the profiler, for the microbatches alone. No figure here "
        "holds loading, reading data or checkpoints: they are in [the command's](#the-command-from-start-to-end).",
        "",
        "| model | way | tokens/s | with the start | start, s | packlora over it |",
        "|---|---|---|---|---|---|",
        *lines,
    ]


def command() -> list[str]:
    """Where the time of `packlora train` goes, from the start of its process to its end."""
    return of_each("command-h200", "command-h100", section=_command)


def _command(name: str, file: dict[str, Any]) -> list[str]:
    lines = [
        "`packlora train` on Qwen3-0.6B's shape (random weights) and four jsonl files of short samples, with packlora's own "
        f"defaults, checkpoints among them, timed from outside on one {file['device']}: seconds, first with empty caches "
        f"of compiled kernels ([{name}.json](../benchmarks/results/{name}.json)). *Before*: Python's imports, the model, the "
        "data. *Stalls*: what microbatches took beyond the median, where shapes of them were new or a checkpoint was begun.",
        "",
        "| | whole | before | first microbatch | stalls | after the last | tokens | tokens/s | between stalls |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in file["rows"]:
        keys = ("wall_s", "before_training_s", "first_microbatch_s", "stalls_s", "end_s")
        rates = (row["tokens"], row["tokens_per_s"], row["between_stalls_tokens_per_s"])
        cells = [*(f"{row[key]:.1f}" for key in keys), *(f"{value:.0f}" for value in rates)]
        lines.append(f"| {row['run']} | {' | '.join(cells)} |")
    return lines
