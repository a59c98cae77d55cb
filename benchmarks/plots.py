"""Pictures of benchmark results, written beside the JSON file as PNG and SVG. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

TITLES = {
    "frozen": "frozen layer", "packlora": "packlora", "packlora_fp32": "packlora, float32 adapters",
    "packlora_merged": "packlora, merged (lossy)", "packlora_stepped": "packlora, norm in every pass",
    "paper": "Scaling-DoRA's formulas", "peft_bf16": "PEFT, bfloat16",
    "peft_fp32_autocast": "PEFT, float32 adapters", "peft_compiled": "PEFT, torch.compile",
}  # fmt: skip
COLOURS = {
    "frozen": "#8a8a8a", "packlora": "#0b6e99", "packlora_fp32": "#53b3d1", "packlora_merged": "#53b3d1",
    "packlora_stepped": "#8fc9dd", "paper": "#7a5c9e",
    "peft_bf16": "#d9822b", "peft_fp32_autocast": "#b5483a", "peft_compiled": "#e8b96a",
}  # fmt: skip
"""Blue is packlora, orange to red is PEFT; told apart by lightness as well."""
FORMS = {
    "naive": ("g (s lora + base) - base", "#b5483a"), "rounded_g": ("(g - 1) base + g s lora, g rounded", "#d9822b"),
    "stable": ("the same, float32 g", "#53b3d1"), "direct": ("g (base + s lora), float32: packlora", "#0b6e99"),
}  # fmt: skip
"""Of peers.compose.near_unity_errors."""


def write_plots(name: str, rows: list[dict[str, Any]], out: Path) -> list[Path]:
    """Draw what the benchmark has a picture of.

    Args:
        name: of the benchmark.
        rows: of its results.
        out: the results file; a picture is `<its name without .json>-<what>.png` and `.svg`.

    Returns:
        The files written.
    """
    import matplotlib

    matplotlib.use("Agg")
    figures: dict[str, Any] = {}
    if name == "layer" and (curves := throughput(rows)):
        figures["throughput"] = _draw_throughput(curves)
    if name == "model" and (bars := [row for row in rows if row["kind"] == "layer"]):
        figures["layers"] = _draw_bars(bars, [f"{row['shape']}\n{row['T']} tokens" for row in bars])
    if name == "dora" and (near := [row for row in rows if "errors" in row]):
        figures["near-unity"] = _draw_near_unity(near)
    if name == "dora" and (bars := [r for r in rows if r["part"] == "layer" and r["T"] == 8192 and not r["dropout"]]):
        figures["layers"] = _draw_bars(bars, [f"{row['K']} x {row['N']}\nr {row['r']}" for row in bars])
    if name == "pipeline" and (cases := ways_by_case(rows)):
        figures["ways"] = _draw_ways(cases)
    if name in ("graphs", "multi"):
        figures["ratios"] = _draw_bars(rows, [row["case"].replace(" ", "\n") for row in rows])
    return saved(figures, out)


def saved(figures: Mapping[str, Any], out: Path) -> list[Path]:
    """Write each figure to `<name of the results file>-<its name>` as PNG and SVG; the paths."""
    written = []
    for what, figure in figures.items():
        for kind in ("png", "svg"):
            path = out.with_name(f"{out.stem}-{what}.{kind}")
            figure.savefig(path, dpi=150, bbox_inches="tight")
            written.append(path)
    return written


def ways_by_case(rows: list[dict[str, Any]]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Of a pipeline, by case and way: tokens per second and the bubble, where there is one; medians over units."""
    out: dict[str, dict[str, tuple[float, float | None]]] = {}
    for case in dict.fromkeys(row["case"].rpartition(" unit ")[0] for row in rows):
        own = [row for row in rows if row["case"].startswith(f"{case} unit ")]
        ways = dict.fromkeys(
            way for row in own for way, value in row.items() if isinstance(value, dict) and "s" in value
        )
        for way in ways:
            units = [row[way] for row in own if way in row]
            bubbles = [unit["bubble"] for unit in units if "bubble" in unit]
            rate = median(unit["tokens"] / unit["s"] for unit in units)
            out.setdefault(case, {})[way] = rate, median(bubbles) if bubbles else None
    return out


def _draw_ways(cases: dict[str, dict[str, tuple[float, float | None]]]) -> Any:
    """Bars of tokens per second, with the share of time in which stages wait."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.6 + 0.36 * sum(1 + len(ways) for ways in cases.values())), layout="constrained")
    sizes = [len(ways) for ways in cases.values()]
    panels = figure.subplots(len(cases), 1, squeeze=False, gridspec_kw={"height_ratios": sizes})[:, 0]
    for panel, (case, ways) in zip(panels, cases.items(), strict=True):
        names = sorted(ways, key=lambda way: ways[way][0])
        colours = [COLOURS["peft_bf16" if way.startswith("eager_") else "packlora"] for way in names]
        bars = panel.barh(names, [ways[way][0] for way in names], color=colours)
        said = [f"{rate:,.0f}" + ("" if b is None else f", bubble {b:.0%}") for rate, b in (ways[way] for way in names)]
        panel.bar_label(bars, said, padding=3, fontsize=8)
        panel.set_title(f"{case}: tokens/s", loc="left", fontsize=9)
        panel.margins(x=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def throughput(rows: list[dict[str, Any]]) -> dict[int, dict[str, list[tuple[int, float]]]]:
    """Million tokens per second over T, by width and contender: square layers with r 16 and dropout 0.1."""
    out: dict[int, dict[str, list[tuple[int, float]]]] = {}
    for row in sorted(rows, key=lambda row: row["T"]):
        if row["K"] == row["N"] and (row["main"] or row["sweep"]):
            for name, ms in row["ms"].items():
                if name in TITLES:
                    out.setdefault(row["K"], {}).setdefault(name, []).append((row["T"], row["T"] / ms / 1e3))
    return out


def _draw_throughput(curves: dict[int, dict[str, list[tuple[int, float]]]]) -> Any:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(curves), figsize=(4.2 * len(curves), 3.6), squeeze=False)
    for panel, (width, lines) in zip(panels[0], curves.items(), strict=True):
        for name, points in lines.items():
            dashed = "--" if name == "frozen" else "-"
            panel.plot(*zip(*points, strict=True), dashed, color=COLOURS[name], label=TITLES[name], marker=".")
        panel.set_title(f"{width} x {width}", fontsize=10)
        panel.set_xlabel("tokens T")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("million tokens/s, forward + backward")
    panels[0][-1].legend(fontsize=7, frameon=False, loc="lower right")
    return figure


def _draw_bars(rows: list[dict[str, Any]], labels: list[str]) -> Any:
    """Time over the frozen one: a group of bars per row."""
    from matplotlib import pyplot

    names = [name for name in TITLES if name != "frozen" and any(row["over_frozen"].get(name) for row in rows)]
    figure, panel = pyplot.subplots(figsize=(max(5.0, 1.1 * len(rows)), 3.6))
    width = 0.8 / max(len(names), 1)
    for place, name in enumerate(names):
        heights = [row["over_frozen"].get(name) or 0.0 for row in rows]
        left = [group - 0.4 + (place + 0.5) * width for group in range(len(rows))]
        bars = panel.bar(left, heights, width * 0.92, color=COLOURS[name], label=TITLES[name])
        panel.bar_label(
            bars, [f"{height:.2f}" if height else "failed" for height in heights], fontsize=6, rotation=90, padding=2
        )
    panel.axhline(1.0, color=COLOURS["frozen"], linewidth=1, linestyle="--")
    panel.set_xticks(range(len(rows)), labels, fontsize=7)
    panel.set_ylabel("time / frozen")
    panel.margins(y=0.15)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_near_unity(rows: list[dict[str, Any]]) -> Any:
    """Largest error of a layer's output over how far g is from 1: a panel for each dtype."""
    from matplotlib import pyplot

    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, panels = pyplot.subplots(1, len(dtypes), figsize=(4.6 * len(dtypes), 3.6), squeeze=False)
    for panel, dtype in zip(panels[0], dtypes, strict=True):
        own = sorted((row for row in rows if row["dtype"] == dtype), key=lambda row: row["spread"])
        for form, (title, colour) in FORMS.items():
            dashed = "--" if form == "direct" else "-"
            heights = [row["errors"][form]["output"] for row in own]
            panel.plot([row["spread"] for row in own], heights, dashed, color=colour, label=title, marker=".")
        panel.set_xscale("log")
        panel.set_title(dtype, fontsize=10)
        panel.set_xlabel("standard deviation of g around 1")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("largest error of the output")
    panels[0][-1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
