"""The sections of docs/benchmarks.md on a model with experts and on a vision-language model."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.result_files import measured, ratio

EXPERTS = {"frozen": "frozen", "packlora": "packlora", "packlora_torch": "packlora without its kernels", "peft": "PEFT"}
VLM = {"frozen": "frozen", "packlora": "packlora", "peft": "PEFT"}


def experts() -> list[str]:
    """Every case of `python -m benchmarks experts`."""
    file = measured("experts-h200")
    if file is None:
        return []
    rows: list[dict[str, Any]] = file["rows"]
    named = {name: words for name, words in EXPERTS.items() if any(name in row["ms"] for row in rows)}
    lines = [
        f"{rows[0]['layers']} layers of Qwen3-30B-A3B's shape (128 experts, 8 a token) on one {file['device']}, forward and "
        "backward in bfloat16, adapters of rank 16 on the attention and on all experts: ms (over frozen; peak GiB) "
        "([experts-h200.json](../benchmarks/results/experts-h200.json)). Frozen and PEFT run transformers' grouped products, "
        "packlora its own forward of the experts. PEFT has no DoRA on experts, and no several jobs in a batch:",
        "",
        *_head("work, tokens", named),
    ]
    for row in rows:
        title = f"{'four jobs' if row['jobs'] > 1 else 'one job'}, {'DoRA' if row['dora'] else 'LoRA'}, {row['T']}"
        lines.append(f"| {title} | {_cells(row, named)} |")
    ratios = [f"{ratio(row['vs_peft'])}x at {row['T']}" for row in rows if "peft" in row["ms"]]
    lines += ["", f"PEFT's time over packlora's, by tokens: {', '.join(ratios)}."]
    waits = sorted({row["T"] for row in rows if row["host_us"]["frozen"] > 1e3 * row["ms"]["frozen"]})
    if waits:
        tokens = ", ".join(map(str, waits))
        lines += ["", f"At {tokens} tokens the host takes as long to launch the frozen model as the GPU to run it."]
    return lines


def vlm() -> list[str]:
    """Every case of `python -m benchmarks vlm`."""
    file = measured("vlm-h200")
    if file is None:
        return []
    rows: list[dict[str, Any]] = file["rows"]
    lines = [
        f"{rows[0]['layers']} layers of the language model and as many of the vision tower of Qwen3-VL-8B's shape on one "
        f"{file['device']}, one sample of {rows[0]['T']} tokens with an image of {rows[0]['patches']} patches, DoRA on all "
        "linear layers of both: ms (over frozen; peak GiB) ([vlm-h200.json](../benchmarks/results/vlm-h200.json)). Adapters "
        "are bfloat16, or float32, which PEFT computes under autocast:",
        "",
        *_head("work, rank", VLM, "PEFT over packlora"),
    ]
    for row in rows:
        work = "forward and backward" if row["backward"] else "forward alone, in eval mode"
        title = f"{work}, r {row['r']}, {row['regime']} adapters"
        lines.append(f"| {title} | {_cells(row, VLM)} | {ratio(row['vs_peft'])} |")
    return lines


def _head(first: str, names: dict[str, str], *more: str) -> list[str]:
    columns = [first, *names.values(), *more]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


def _cells(row: dict[str, Any], names: dict[str, str]) -> str:
    """Of each contender its ms, and in brackets what it is over the frozen model's and its peak GiB; nothing of one that took
    no part."""
    out = []
    for name in names:
        more = [] if name == "frozen" else [ratio(row["over_frozen"].get(name))]
        more += [f"{row['gib'][name]:.1f}"] if name in row["gib"] else []
        text = f"{row['ms'][name]:.0f} ({'; '.join(more)})" if name in row["ms"] else ""
        out.append("failed" if name in row["failed"] else text)
    return " | ".join(out)
