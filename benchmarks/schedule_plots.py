"""Pictures of `python -m benchmarks schedule`: the bubble by number of jobs, and planning time over samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import saved

OURS, THEIRS, NONE = "#0b6e99", "#d9822b", "#8a8a8a"
"""packlora; LoRAFusion as published; no scheduler."""


def write_plots(rows: Sequence[dict[str, Any]], published: dict[str, Any], out: Path) -> list[Path]:
    """Draw into `<name of the results file>-bubble` and `-time`, as PNG and SVG. Returns the files written."""
    import matplotlib

    matplotlib.use("Agg")
    figures = {"bubble": _draw_bubbles(rows, published), "time": _draw_time(rows, published)}
    return saved(figures, out)


def _draw_bubbles(rows: Sequence[dict[str, Any]], published: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    mine = [row for row in rows if row["part"] == "jobs" and row["model"] == "70b" and row["balanced"]]
    counts = sorted({row["jobs"] for row in mine})
    bars = {
        "random order (simulated)": (NONE, {r["jobs"]: r["bubble"] for r in mine if r["method"] == "random"}),
        "LoRAFusion (published, measured by its authors)": (THEIRS, published["bubble_by_jobs"]),
        "packlora (simulated)": (OURS, {r["jobs"]: r["bubble"] for r in mine if r["method"] == "auto"}),
    }
    figure, panel = pyplot.subplots(figsize=(6.4, 3.6))
    for place, (title, (colour, heights)) in enumerate(bars.items()):
        at = [n + (place - 1) * 0.27 for n in range(len(counts))]
        drawn = panel.bar(at, [100 * heights[count] for count in counts], 0.25, color=colour, label=title)
        panel.bar_label(drawn, fmt="%.1f", fontsize=7, padding=1)
    panel.axhline(100 * published["bubble_mlora"], color="#b5483a", linestyle=":", linewidth=1)
    panel.text(len(counts) - 0.55, 100 * published["bubble_mlora"] + 0.6, "mLoRA (published)", fontsize=7, ha="right")
    panel.set_xticks(range(len(counts)), [f"{count} job{'s' if count > 1 else ''}" for count in counts])
    panel.set_ylabel("pipeline bubble, %")
    panel.set_title("4 stages, 70B shape, mixed lengths (estimates)", fontsize=10)
    panel.margins(y=0.12)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False)
    return figure


def _draw_time(rows: Sequence[dict[str, Any]], published: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    mine = sorted(
        (row["samples"], row["seconds"])
        for row in rows
        if row["part"] == "time" and row["method"] == "auto" and not row["workers"]
    )
    figure, panel = pyplot.subplots(figsize=(5.2, 3.6))
    panel.plot(*zip(*mine, strict=True), color=OURS, marker="o", label="packlora, one process")
    theirs = sorted(published["seconds_by_samples"].items())
    panel.plot(*zip(*theirs, strict=True), color=THEIRS, marker="s", label="LoRAFusion (published, other machine)")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("samples")
    panel.set_ylabel("planning time, s")
    panel.set_title("4 jobs, 4 stages", fontsize=10)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False)
    return figure
