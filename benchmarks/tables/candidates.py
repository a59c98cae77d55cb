"""The section of docs/benchmarks.md on sweeps: sixteen candidates beside PEFT, and what halving saves."""

from __future__ import annotations

from benchmarks.tables.result_files import measured, ratio

NAMES = {"packlora": "packlora, all together", "peft_compiled": "PEFT, compiled, one after the other"}


def candidates() -> list[str]:
    """What there is of both."""
    beside, halving = _beside_peft(), _halving()
    return [*beside, *([""] if beside and halving else []), *halving]


def _halving() -> list[str]:
    file = measured("sweep-cpu")
    if file is None:
        return []
    summary, (row, grid) = file["summary"], file["rows"]
    return [
        f"{row['candidates']} LoRA candidates on SmolLM2-135M and real data, on two threads of a CPU "
        f"([sweep-cpu.json](../benchmarks/results/sweep-cpu.json)): successive halving, which ends {row['stopped']} of them "
        f"early, takes {ratio(summary['time_over_grid'])} of the seconds, {ratio(summary['cpu_time_over_grid'])} of the "
        f"processors' time and {ratio(summary['tokens_over_grid'])} of the trained tokens of the whole grid "
        f"({grid['seconds']:.0f} s), loading and evaluations included. The held-out loss of its best is "
        f"{summary['loss_over_grid_best']:.4f} times that of the grid's.",
    ]


def _beside_peft() -> list[str]:
    """Both ways, with what they take in memory."""
    file = measured("sweep-h200")
    if file is None:
        return []
    summary, (row,) = file["summary"], file["rows"]
    lines = [
        f"{row['candidates']} LoRA candidates (ranks 8 to 64 by four learning rates) on the same short samples, "
        f"{row['layers']} layers of Llama-3.1-8B's shape on one {file['device']}, real tokens per second, optimizer steps "
        "included ([sweep-h200.json](../benchmarks/results/sweep-h200.json)). PEFT's is one candidate of rank 16 on batches of "
        "one shape without padding, which stands for all; its start counts once:",
        "",
        "| way | tokens/s | with the start | start, s | peak GiB | held by torch, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in NAMES.items():
        if name not in row["tokens_per_s"]:
            lines.append(f"| {title} | failed | | | | |")
            continue
        cells = [f"{row[key][name]:.0f}" for key in ("tokens_per_s", "with_start_tokens_per_s")]
        gib = (f"{one:.1f}" for one in row["gib"][name])
        lines.append(f"| {title} | {' | '.join([*cells, format(row['start_s'][name], '.1f'), *gib])} |")
    both = f"{ratio(summary['sweep_vs_peft'])}x, with the start {ratio(summary['sweep_with_start_vs_peft'])}x"
    return [*lines, "", f"packlora over PEFT: {both}."]
