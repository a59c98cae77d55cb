"""Tables of the anchors: one job in tokens per second beside what people use."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.result_files import measured

TITLES = {
    "s06": "Qwen3-0.6B", "s17": "Qwen3-1.7B", "s4": "Qwen3-4B", "s8": "Qwen3-8B", "s14": "Qwen3-14B",
    "nemo8": "Llama-3-8B, 4096 tokens", "nemoq7": "Qwen2.5-7B, 4096 tokens", "dora8": "Qwen3-8B, DoRA",
    "dora8_small": "Qwen3-8B, DoRA that begins at 1",
}  # fmt: skip
IN_README = ("s06", "s8", "nemo8", "dora8")
CONTENDERS = ("train", "trainer_peft", "accelerate")


def _cells(rows: dict[tuple[str, str], dict[str, Any]], case: str) -> list[str]:
    cells = []
    for contender in CONTENDERS:
        row = rows.get((case, contender))
        if row is None:
            cells.append("-")
        elif row["tokens_per_s"] is None:
            cells.append(row["error"])
        else:
            cells.append(f"{row['tokens_per_s']:,.0f} ({row['gib']:.0f} GiB)")
    return cells


def _published(row: dict[str, Any]) -> str:
    return ", ".join(f"{who} {figure:,}" for who, figure in row["published"].items()) or "-"


def _table(file: dict[str, Any], cases: tuple[str, ...]) -> list[str]:
    rows = {(row["case"], row["contender"]): row for row in file["rows"]}
    return [
        "| model's shape | packlora train | Trainer + PEFT | the same + accelerate | published by others |",
        "|---|---|---|---|---|",
        *(
            f"| {TITLES[case]} | {' | '.join(_cells(rows, case))} | {_published(rows[case, 'train'])} |"
            for case in cases
            if (case, "train") in rows
        ),
    ]


def anchors() -> list[str]:
    """The section of docs/benchmarks.md."""
    file = measured("anchors-h100")
    if file is None:
        return []
    sources = dict.fromkeys(row["source"] for row in file["rows"] if row["source"])
    return [
        f"One job on one {file['device']}, bfloat16, rank 16 on seven projections, samples of exactly 2048 tokens where "
        "nothing else is said (so packing gains nothing): tokens per second of whole optimizer steps, and peak memory "
        "([anchors-h100.json](../benchmarks/results/anchors-h100.json)). Trainer + PEFT: the Hugging Face Trainer with liger's "
        "kernels. DoRA begins with scales that differ from 1 by about 1e-2, as after some training.",
        "",
        *_table(file, tuple(TITLES)),
        "",
        f"The last column holds figures of others, on their machines: {'; '.join(sources)}.",
    ]


def readme_table() -> list[str]:
    """The first table of the README."""
    file = measured("anchors-h100")
    return _table(file, IN_README) if file is not None else []
