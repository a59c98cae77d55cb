"""The section of docs/benchmarks.md on sixteen candidates of a sweep."""

from __future__ import annotations

from packlora.bench.studies.result_files import measured, ratio

NAMES = {"packlora": "packlora, all together", "peft_compiled": "PEFT, compiled, one after the other"}


def candidates() -> list[str]:
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
