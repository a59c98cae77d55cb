"""The sweep of a run, as report.html and the last words on the terminal show it: from sweep.json, which may be missing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from packlora.changes import SHOWN
from packlora.report import charts
from packlora.report.cells import badge, row, sub, table

BEST = "best"
"""Folder of an output folder that holds the adapter of the best candidate."""
Line = dict[str, Any]
MOST_SHOWN = 200
"""Candidates in a picture, the best ones; and in the table on the terminal a tenth of them."""


def read_sweep(folder: Path) -> Line | None:
    """Content of sweep.json; None where the file is missing or unusable."""
    try:
        found = json.loads((folder / SHOWN).read_text(encoding="utf-8"))
        lines = [line for line in found["candidates"] if isinstance(line["parameters"], dict) and line["name"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return {**found, "candidates": lines} if lines else None


def copied_from(folder: Path) -> str:
    """Name of the job whose adapter a folder of a run holds, which may be the copy of the best candidate's. Raises OSError,
    ValueError or LookupError where it is not known."""
    file = folder.parent / SHOWN
    if folder.name != BEST or not file.is_file():
        return folder.name
    return str(json.loads(file.read_text(encoding="utf-8"))["best"])


def name_of(metric: str) -> str:
    """Name of the compared metric, for people."""
    return "held-out " + metric.removeprefix("eval_") if metric.startswith("eval_") else f"{metric} in training"


def section(folder: Path, styles: Mapping[str, str]) -> str:
    """Section of the page on a sweep: parallel coordinates and the ranking. styles: class of the style sheet by job."""
    sweep = read_sweep(folder)
    if sweep is None:
        return ""
    lines: list[Line] = sweep["candidates"][:MOST_SHOWN]
    best = f"Best: <b>{escape(str(sweep['best']))}</b>, a copy is in <code>best/</code>." if sweep.get("best") else ""
    metric = str(sweep.get("metric", "eval_loss"))
    named = name_of(metric)
    caption = f"From the best {escape(named)} to the worst. {best if sweep.get('status') == 'done' else ''}"
    return (
        f"<section><h2>Sweep</h2>{_coordinates(lines, metric, named, styles)}{_table(lines, metric, named, styles)}"
        f"<p class='caption'>{caption}</p></section>"
    )


def _coordinates(lines: list[Line], metric: str, named: str, styles: Mapping[str, str]) -> str:
    """A vertical axis for each swept key and one for what is compared; a line for each candidate that has one."""
    keys = list(lines[0]["parameters"])
    columns = [[line["parameters"].get(key) for line in lines] for key in keys] + [[line.get(metric) for line in lines]]
    scales = [_Scale(column) for column in columns]
    labels = [*keys, named]
    x = charts.Axis("", -0.15, len(labels) - 0.85, tuple((float(at), label) for at, label in enumerate(labels)))
    y = charts.Axis("", -0.08, 1.08, ())
    marks = [charts.line([(at, 0.0), (at, 1.0)], x, y, "grid") for at in range(len(labels))]
    for rank, line in reversed(list(enumerate(lines))):
        if line.get(metric) is not None:
            values = [column[rank] for column in columns]
            places = [
                (float(at), scale.at(value)) for at, (scale, value) in enumerate(zip(scales, values, strict=True))
            ]
            marks.append(charts.line(places, x, y, f"mark bold {styles.get(str(line['name']), 'neutral')}"))
    overlay = "".join(
        charts.note(text, (at, place), x, y, "", f"{labels[at]}: {text}")
        for at, scale in enumerate(scales)
        for text, place in scale.marks
    )
    return charts.chart("Values of the candidates and what came of them", marks, x, y, height=320, overlay=overlay)


class _Scale:
    """Places of a column's values from 0 to 1; numbers by size, by their logarithm where they span much, all else in a row."""

    def __init__(self, column: list[Any]) -> None:
        known = [value for value in column if value is not None]
        self.numbers = [
            float(value) for value in known if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        self.is_number = bool(self.numbers) and len(self.numbers) == len(known)
        self.words = list(dict.fromkeys(map(_text, known)))
        if self.is_number:
            self.low, self.high = min(self.numbers), max(self.numbers)
            self.log = self.low > 0 and self.high / self.low > 30
            self.marks = [(f"{value:.4g}", self.at(value)) for value in dict.fromkeys((self.low, self.high))]
        else:
            self.marks = [(word, self.at(word)) for word in self.words]

    def at(self, value: Any) -> float:
        if not self.is_number:
            return self.words.index(_text(value)) / max(1, len(self.words) - 1) if value is not None else 0.0
        low, high, value = (map(math.log, (self.low, self.high, value))) if self.log else (self.low, self.high, value)
        return (value - low) / (high - low) if high > low else 0.5


def _table(lines: Sequence[Line], metric: str, named: str, styles: Mapping[str, str]) -> str:
    keys = list(lines[0]["parameters"])
    columns = ["Rank", *map(escape, keys), "Steps", escape(named.capitalize()), "Status"]
    rows = []
    for line in lines:
        name, values = str(line["name"]), [line["parameters"].get(key) for key in keys]
        status, why = str(line["status"]), str(line["reason"])
        cells = [
            (str(line["rank"]), line["rank"]), *((escape(_text(value)), value) for value in values),
            (str(line["step"]), line["step"]), (_value(line, metric), line.get(metric)),
            (badge("ended early" if why and status == "stopped" else status) + sub(why, "why"), status),
        ]  # fmt: skip
        attributes = f'class="{styles.get(name, "neutral")}"'
        rows.append(row(columns, f"<span class='name'>{escape(name)}</span>", name, cells, attributes))
    return table(("Candidate", *columns), rows)


def summary(folder: Path) -> tuple[Table | None, set[str], list[str]]:
    """The last words on a sweep: a table, the jobs that it tells of, and names of folders to ask first."""
    sweep = read_sweep(folder)
    if sweep is None:
        return None, set(), []
    names = {str(line["name"]) for line in sweep["candidates"]}
    return ranked_table(folder), names, [BEST] * (folder / BEST).is_dir()


def ranked_table(folder: Path) -> Table | None:
    """The best candidates, for the terminal."""
    sweep = read_sweep(folder)
    if sweep is None:
        return None
    keys, metric = list(sweep["candidates"][0]["parameters"]), str(sweep.get("metric", "eval_loss"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "candidate", *keys, "steps", name_of(metric), "status"):
        table.add_column(name, overflow="fold")
    for line in sweep["candidates"][: MOST_SHOWN // 10]:
        values = [_text(line["parameters"].get(key)) for key in keys]
        cells = [line["rank"], line["name"], *values, line["step"], _value(line, metric), line["status"]]
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _value(line: Line, metric: str) -> str:
    return "" if line.get(metric) is None else f"{line[metric]:.4f}"
