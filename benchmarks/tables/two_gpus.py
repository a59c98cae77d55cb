"""The section of docs/benchmarks.md on several GPUs: replicas, a sharded base, tensor parallelism, a pipeline."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.tables.result_files import measured

REPLICAS_GOAL, TENSOR_GOAL, BUBBLE_GOAL = 0.95, 1.06, 0.06
"""Efficiency of divided jobs, at least; time over that of the frozen layers, cut alike, at most; idle share of a pipeline's
stages, at most."""


def two_gpus() -> list[str]:
    """Replicas, a sharded base, tensor parallelism, a pipeline: what there are files of."""
    out: list[str] = []
    for part in (_replicas(), _tensor_parallel(), _pipeline()):
        out += [*([""] if out and part else []), *part]
    return out


def _replicas() -> list[str]:
    file = measured("replicas-h200")
    if file is None:
        return []
    summary, rows = file["summary"], file["rows"]
    shape = file["protocol"].removeprefix("Part jobs: ").partition(", ")[0]
    lines = [
        "**Replicas.** Training four LoRA jobs of short samples (ranks 8 to 64, dropout 0.1, about 8192 tokens of each in an "
        f"optimizer step) on {shape}, on GPUs of one host ({file['device']}, NCCL): real tokens per second, optimizer steps "
        "included, planning not ([replicas-h200.json](../benchmarks/results/replicas-h200.json)). It runs the classes of the "
        "training loop, not `packlora train`; microbatches of at most 8192 tokens a GPU are CUDA graphs. Efficiency: tokens "
        "per second over those of one GPU and the number of GPUs, with divided jobs until the last GPU is done with its own; "
        "*busy*: the GPUs' own rates added up:",
        "",
        "| GPUs | who trains what | tokens/s | efficiency | busy |",
        "|---|---|---|---|---|",
    ]
    sizes = sorted({row["processes"] for row in rows if row["part"] == "jobs"})
    for size in sizes:
        one, jobs, samples = (f"{summary[f'{way}_{size}_tokens_per_s']:.0f}" for way in ("one_of", "jobs", "samples"))
        by_jobs, busy = (f"{summary[f'{kind}efficiency_jobs_{size}']:.3f}" for kind in ("", "busy_"))
        lines += [
            f"| 1 of {size} | all jobs | {one} | 1 | |",
            f"| {size} | each job whole on one | {jobs} | {by_jobs} | {busy} |",
            f"| {size} | every microbatch divided | {samples} | {summary[f'efficiency_samples_{size}']:.3f} | |",
        ]
    lines += [""]
    placed = "predicted time" if "placed by predicted time" in file["protocol"] else "tokens"
    for size in sizes:
        lines.append(_divided_jobs(size, [row for row in rows if row["part"] == "jobs"], summary, placed))
    for size in sorted({row["processes"] for row in rows if row["part"] == "fsdp2"}):
        value, layers = summary.get(f"fsdp2_over_replica_{size}"), _of_part(rows, "fsdp2", size)[0]["layers"]
        lines.append(
            f"With a base that is sharded over {size} GPUs (`parallel.shard_base`, FSDP2; {layers} layers of Llama-3.1-8B's "
            "shape, one LoRA job, 4 x 2048 tokens a GPU and step) a step "
            + (
                "failed."
                if value is None
                else f"takes {value:.3f} of the time that it takes with the base on each GPU."
            )
        )
    return lines


def _of_part(rows: list[dict[str, Any]], part: str, size: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["part"] == part and row["processes"] == size]


def _divided_jobs(size: int, rows: list[dict[str, Any]], summary: dict[str, Any], placed: str) -> str:
    """What the table shows of them, in words. placed: by what of theirs."""
    rows = _of_part(rows, "jobs", size)
    seconds, tokens = ([sum(row["jobs"][key][rank] for row in rows) for rank in range(size)] for key in ("s", "tokens"))
    met = "met" if summary[f"efficiency_jobs_{size}"] >= REPLICAS_GOAL else "missed"
    bits = "have" if all(same for row in rows for same in row["bits_equal"].values()) else "do not have"
    return (
        f"On {size} GPUs the goal for divided jobs, an efficiency of {REPLICAS_GOAL}, is {met}. Jobs are placed by their "
        f"{placed}: the most tokens on a GPU are {max(tokens) / min(tokens):.3f} times the fewest, but the longest time is "
        f"{max(seconds) / min(seconds):.3f} times the shortest. Adapters of divided jobs {bits} the bits that one GPU gives "
        "the same jobs."
    )


def _tensor_parallel() -> list[str]:
    file = measured("tensor-parallel-h200")
    if file is None:
        return []
    rows = file["rows"]
    layers = ", ".join(sorted({f"{row['layers']} of {row['shape']}" for row in rows}))
    lines = [
        f"**Tensor parallelism.** Decoder layers ({layers}) of the shapes of Llama-3.1-8B and -70B, cut over GPUs of one host "
        f"({file['device']}, NCCL), bfloat16, forward and backward; LoRA r 16 with dropout 0.1 on all linear layers: time over "
        "that of the same frozen layers, cut alike "
        "([tensor-parallel-h200.json](../benchmarks/results/tensor-parallel-h200.json)). PEFT runs over the same slices, with "
        "its part of a row-parallel layer in the sum that the frozen layer needs; transformers' own tensor parallelism is not "
        "measured. *With its step*: the job's message, clipping and AdamW after every run. The last two columns are of that, "
        "beside the frozen layers:",
        "",
        "| shape, tokens | GPUs | sequence parallel | frozen, ms | packlora | with its step | PEFT | more collectives "
        "| bytes sent over frozen |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        frozen = f"{row['ms']['frozen']:.1f}" if "frozen" in row["ms"] else "failed"
        ratios = [_three(row["over_frozen"].get(name)) for name in ("packlora", "packlora_stepped", "peft_bf16")]
        sent, stepped = (row["messages"].get(name) for name in ("frozen", "packlora_stepped"))
        wire = ["failed"] * 2
        if sent and stepped:
            wire = [str(stepped["collectives"] - sent["collectives"]), f"{stepped['sent'] / sent['sent']:.3f}"]
        lines.append(
            f"| {row['shape']}, {row['samples']} x 2048 | {row['processes']} | {'yes' if row['sequence'] else 'no'} "
            f"| {' | '.join([frozen, *ratios, *wire])} |"
        )
    return [*lines, "", *_tensor_words(rows)]


def _three(value: float | None) -> str:
    return "failed" if value is None else f"{value:.3f}"


def _tensor_words(rows: list[dict[str, Any]]) -> list[str]:
    """What the table shows: the goal, the messages, few tokens."""

    def label(row: dict[str, Any]) -> str:
        how = " with sequence parallelism" if row["sequence"] else ""
        return f"{row['shape']}{how} on {row['processes']} GPUs ({_three(row['over_frozen'].get('packlora'))})"

    def between(own: list[dict[str, Any]], name: str) -> str:
        found = [row["over_frozen"][name] for row in own if name in row["over_frozen"]]
        return f"{min(found):.2f} to {max(found):.2f}" if found else "nothing"

    main = [row for row in rows if row["samples"] == max(row["samples"] for row in rows)]
    rest = [row for row in rows if row not in main]
    holds = [row for row in main if row["over_frozen"].get("packlora", TENSOR_GOAL + 1) <= TENSOR_GOAL]
    lines = [
        f"The goal at {main[0]['samples']} x 2048 tokens is at most {TENSOR_GOAL}. Held by: "
        f"{', '.join(map(label, holds)) or 'none'}. Missed by: "
        f"{', '.join(label(row) for row in main if row not in holds) or 'none'}. PEFT has {between(main, 'peft_bf16')}. "
        "Layers send nothing for adapters without sequence parallelism, and a step one message; with it each block's input is "
        "joined once more in the backward.",
    ]
    if rest:
        host = [row["host_us"]["packlora"] / row["ms"]["packlora"] / 1000 for row in rest if "packlora" in row["ms"]]
        lines.append(
            f"With {rest[0]['samples']} x 2048 tokens the host decides, not the GPUs: its launches take at least "
            f"{min(host, default=0):.0%} of packlora's time, {between(rest, 'packlora')}, with its step "
            f"{between(rest, 'packlora_stepped')}, where PEFT has {between(rest, 'peft_bf16')}."
        )
    return lines


def _pipeline() -> list[str]:
    file = measured("pipeline-h200")
    if file is None:
        return []
    rows, summary = file["rows"], file["summary"]
    lines = [
        f"**Pipeline.** Four LoRA jobs of short samples (ranks 8 to 64, dropout 0.1) on {rows[0]['layers']} layers of "
        f"Llama-3.1-70B's shape, cut into stages on GPUs of one host ({file['device']}, NCCL), bfloat16: eight optimizer steps "
        "of every job, planning not counted ([pipeline-h200.json](../benchmarks/results/pipeline-h200.json)); medians. Bubble: "
        "share of the stages' time in which they run nothing:",
        "",
        "| GPUs | microbatches | seconds | tokens/s | bubble |",
        "|---|---|---|---|---|",
    ]
    sizes = sorted({row["processes"] for row in rows})
    words = {
        "no_flush": "of all jobs, without a flush",
        "fixed_samples": "of all jobs, of a fixed number of samples",
        "one_job": "of one job after the other, with a flush",
        "one_job_fixed": "the same, of a fixed number of samples",
        "eager_no_flush": "of all jobs, without a flush, LoRA in plain operations",
        "eager_fixed_samples": "the same, of a fixed number of samples",
        "eager_one_job_fixed": "the same, of one job after the other, with a flush",
        "fsdp2": "of one job after the other, on a sharded base",
    }
    for size in sizes:
        for way, said in words.items():
            own = [row[way] for row in rows if row["processes"] == size and way in row]
            own = [one | {"rate": one["tokens"] / one["s"]} for one in own]
            if own:
                s, rate = (statistics.median(one[key] for one in own) for key in ("s", "rate"))
                bubbles = [one["bubble"] for one in own if "bubble" in one]
                bubble = f"{statistics.median(bubbles):.1%}" if bubbles else ""
                lines.append(f"| {size} | {said} | {s:.2f} | {rate:.0f} | {bubble} |")
    lines += [""]
    for size in sizes:
        bubble, met = summary[f"bubble_4jobs_{size}gpu"], "missed"
        if bubble <= BUBBLE_GOAL:
            met = "met"
        fixed, rate = (summary[f"{key}_{size}gpu"] for key in ("speedup_over_unbalanced", "tokens_per_s_per_gpu_70b"))
        flush = statistics.median(
            row["one_job"]["s"] / row["no_flush"]["s"] for row in rows if row["processes"] == size
        )
        lines.append(
            f"On {size} GPUs four jobs together are {flush:.2f} times as fast as one after the other, and {fixed:.2f} times as "
            f"fast as with a fixed number of samples. By the number of layers a GPU would train {rate:.0f} tokens/s of the "
            f"whole model. The goal of a bubble of at most {BUBBLE_GOAL:.0%} is {met}."
        )
        if (eager := summary.get(f"eager_no_flush_over_1f1b_{size}gpu")) is not None:
            lines[-1] += (
                f" Over one job after the other in plain operations, a fixed number of samples to a microbatch, they are "
                f"{summary[f'speedup_over_1f1b_{size}gpu']:.2f} times as fast, and {eager:.2f} times in plain operations too."
            )
    return lines
