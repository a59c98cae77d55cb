"""Sections of docs/benchmarks.md on other projects' kernels, LoRAFusion's workloads, and memory as it was predicted."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.result_files import measured, not_measured, of_each, ratio


def peers() -> list[str]:
    """The linear layers of a decoder layer by several projects, one device after the other."""
    tables = of_each("peers-h200", "peers-h100", section=_peer_table)
    if not tables:
        return []
    return [
        "q, k, v, o, gate, up and down of a decoder layer of Llama-3.1-8B's shape, r 16, by the kernels of several projects: "
        "time of forward and backward over that of the frozen layers, of the GPU alone / on the wall. A dash: the project "
        "leaves such layers to PEFT. Gradients of all are checked against PEFT in float32.",
        "",
        *tables,
    ]


def _peer_table(name: str, file: dict[str, Any]) -> list[str]:
    rows = file["rows"]
    lines = [
        f"One {file['device']} ([{name}.json](../benchmarks/results/{name}.json)):",
        "",
        "| | " + " | ".join(row["case"].removeprefix("block ") for row in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    for contender in dict.fromkeys(contender for row in rows for contender in row["over_frozen"]):
        cells = []
        for row in rows:
            both = [row.get(kind, {}).get(contender) for kind in ("ahead_over_frozen", "wall_over_frozen")]
            cells.append(
                "failed" if contender in row["failed"] else "-" if None in both else " / ".join(map(ratio, both))
            )
        lines.append(f"| {contender} | {' | '.join(cells)} |")
    return lines + not_measured(file)


def workloads() -> list[str]:
    """Tokens per second on LoRAFusion's five workloads."""
    tables = of_each("workloads-h200", "workloads-h100", section=_workload_table)
    if not tables:
        return []
    return [
        "Four LoRA jobs of rank 16 on Llama-3.1-8B's shape, with samples as long as those of LoRAFusion's five workloads "
        "(estimated distributions): real tokens per second, optimizer steps included, the median of the counted units, of "
        "which one may compile kernels or record graphs. PEFT trains one job after the other, by itself and with LoRAFusion's "
        "kernels in its layers, eagerly; *rows* are cut without regard to samples, the easiest for it. *Apart*: no global "
        "batch's tail shares a microbatch with the next one. Microbatches by greedy packing alone, with integer programs "
        "where a bound is not met (what training uses), and apart.",
        "",
        *tables,
    ]


def _workload_table(name: str, file: dict[str, Any]) -> list[str]:
    ways = list(dict.fromkeys(way for row in file["rows"] for way in row["tokens_per_s"]))
    counted = {len(row["seconds"]["packlora"]) - row["warmup"]["packlora"] for row in file["rows"]}
    lines = [
        f"One {file['device']}, {' or '.join(map(str, sorted(counted)))} units counted "
        f"([{name}.json](../benchmarks/results/{name}.json)):",
        "",
        f"| | {' | '.join(ways)} | microbatches |",
        "|---|" + "---|" * (len(ways) + 1),
    ]
    for row in file["rows"]:
        rates = row["tokens_per_s"]
        cells = [f"{rates[way]:.0f}" if way in rates else "failed" for way in ways]
        counts = " / ".join(map(str, row["microbatches"].values()))
        lines.append(f"| {row['key']} | {' | '.join(cells)} | {counts} |")
    return lines + not_measured(file)


def plan_memory() -> list[str]:
    """Predicted and measured peaks."""
    if (file := measured("plan-memory-h200")) is None:
        return []
    lines = [
        f"GiB that `packlora plan` predicts from shapes, and the peak of training on one {file['device']} "
        "([plan-memory-h200.json](../benchmarks/results/plan-memory-h200.json)):",
        "",
        "| | predicted | peak | predicted over peak |",
        "|---|---|---|---|",
    ]
    for row in file["rows"]:
        known = "predicted_over_peak" in row
        cells = (row["predicted_gib"], row["peak_gib"], row["predicted_over_peak"]) if known else (None,) * 3
        lines.append(f"| {row['case']} | {' | '.join(map(ratio, cells))} |")
    return lines
