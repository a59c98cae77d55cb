"""Tables of `packlora plan`: how they are laid out, and the one of the jobs; the files that it writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from packlora.errors import InputError
from packlora.report.progress import GAP, NAME
from packlora.report.screen import Screen
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun

BLOCKS = "▁▂▃▄▅▆▇█"
CELLS = 16
LEFT = ("job", "adapter", "method", "lengths", "settings", "")
"""Headings of columns that stand on the left; numbers beside them do not count."""


def job_figures(job: PreparedJob) -> dict[str, Any]:
    """Figures of a job for the table and the JSON."""
    lengths, peft = job.data.planned.lengths, job.spec.peft
    counts, edges = np.histogram(np.log2(lengths), bins=24)
    return {
        "name": job.config.name,
        "adapter": ("DoRA" if peft.use_dora else "rsLoRA" if peft.use_rslora else "LoRA") + f" r {peft.r}",
        "trainable_parameters": job.trainable,
        "samples": len(lengths),
        "lengths": {
            "mean": float(lengths.mean()), "p50": float(np.percentile(lengths, 50)),
            "p95": float(np.percentile(lengths, 95)), "max": int(lengths.max()), "min": int(lengths.min()),
            "histogram": {"edges": np.exp2(edges).round(1).tolist(), "counts": counts.tolist()},
        },
        "global_batch_size": job.config.train.global_batch_size,
        "steps": job.data.num_steps,
        "tokens": job.data.tokens,
        "label_share": job.data.label_share,
    }  # fmt: skip


def sparkline(lengths: Sequence[int] | np.ndarray, low: int, high: int) -> str:
    """Blocks for the number of lengths between low and high, on a logarithmic scale; a cell with any shows a block."""
    edges = np.log2([low, max(high, low + 1)])
    counts, _ = np.histogram(np.log2(lengths), bins=CELLS, range=(float(edges[0]), float(edges[1])))
    top = counts.max()
    return "".join(" " if n == 0 else BLOCKS[round(n / top * (len(BLOCKS) - 1))] for n in counts.tolist())


def print_table(console: Screen, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; where the console is too narrow, several below each other, each with the first column."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    parts = [[0]]
    for index in range(1, len(headings)):
        needed = min(widths[0], NAME) + sum(GAP + widths[column] for column in (*parts[-1][1:], index))
        if needed > console.width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(index)
    for part in parts:
        if part is not parts[0]:
            console.print()
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in part:
            side: JustifyMethod = "left" if headings[column].strip("0123456789 ") in LEFT else "right"
            table.add_column(headings[column], justify=side, no_wrap=column > 0, overflow="fold")
        for row in rows:
            table.add_row(*(Text(row[column]) for column in part))
        console.print(table)


def print_jobs(prepared: PreparedRun, console: Screen) -> None:
    """Print a row of each job."""
    low = min(int(job.data.planned.lengths.min()) for job in prepared.jobs)
    high = max(int(job.data.planned.lengths.max()) for job in prepared.jobs)
    scale = f"{low} lengths {high}"
    rows = []
    for job in prepared.jobs:
        own = job_figures(job)
        lengths = own["lengths"]
        rows.append((
            own["name"], own["adapter"], f"{own['trainable_parameters'] / 1e6:.2f} M", str(own["samples"]),
            str(own["global_batch_size"]), str(own["steps"]), f"{own['tokens']:,}", f"{own['label_share']:.0%}",
            f"{lengths['mean']:.0f}", f"{lengths['p50']:.0f}", f"{lengths['p95']:.0f}", str(lengths["max"]),
            sparkline(job.data.planned.lengths, low, high),
        ))  # fmt: skip
    headings = (
        "job", "adapter", "trainable", "samples", "batch", "steps", "tokens", "labels", "mean", "p50", "p95", "max",
        scale if len(scale) <= CELLS else "lengths",
    )  # fmt: skip
    print_table(console, headings, rows)


def write_named(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a file that an option names, or what it is a link to, in a folder that is made where there is none.

    Raises:
        InputError: it cannot be written, or the name is that of a folder, a device or a pipe, which a rename would replace.
    """
    file = Path(os.path.realpath(path))
    if file.exists() and not file.is_file():
        raise InputError(f"cannot write {path}: it is there and is no file; give the name of a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file)
    except (OSError, ValueError) as error:  # ValueError: a kind of picture that matplotlib does not know
        raise InputError(f"cannot write {path}: {error}") from None
