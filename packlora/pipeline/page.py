"""The part of the report about a pipeline: when each stage ran what, beside what was predicted, and how long stages waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packlora.report import charts
from packlora.report.metrics import PIPELINE, read_lines

KEYS = ("slots", "tokens", "seconds", "busy", "bubble", "predicted_seconds", "predicted_bubble", "peak_memory", "spans")


def section(folder: Path, styles: Mapping[str, str]) -> str:
    """HTML; empty where no pipeline ran. Of a run that went on with another number of stages it is about the newest number.

    Args:
        styles: class of the style sheet by job.
    """
    lines = read_lines(folder / PIPELINE, *KEYS)
    if not lines:
        return ""
    lines = [line for line in lines if len(line["busy"]) == len(lines[-1]["busy"])]
    drawn = next((line for line in reversed(lines) if line["spans"]), None)
    seconds, stages = sum(line["seconds"] for line in lines), len(lines[0]["busy"])
    tokens = sum(line["tokens"] for line in lines)
    bubble = 1 - sum(map(sum, (line["busy"] for line in lines))) / (stages * seconds) if seconds else 0.0
    foreseen = sum(line["predicted_seconds"] for line in lines)
    idle = sum(line["predicted_bubble"] * line["predicted_seconds"] for line in lines) / foreseen if foreseen else 0.0
    rows = [
        f"<tr><th scope='row'>{stage}</th><td>{sum(line['busy'][stage] for line in lines):.3g} s</td>"
        f"<td>{sum(line['busy'][stage] for line in lines) / seconds:.1%}</td>"
        f"<td>{max(line['peak_memory'][stage] for line in lines) / 2**30:.3g} GiB</td></tr>"
        for stage in range(stages)
    ]  # fmt: skip
    table = (
        "<div class='scroll' tabindex='0'><table><thead><tr><th scope='col'>Stage</th><th scope='col'>Busy</th>"
        "<th scope='col'>of the time</th><th scope='col'>Peak memory</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    caption = (
        f"It was empty {len(lines)} times, and ran for {seconds:.3g} s in between, {tokens / seconds / stages:,.0f} tokens/s a "
        f"device and {lines[-1]['mfu']:.1%} of the speed of one matrix product (floating-point operations of frozen layers, "
        f"adapters and the output layer; attention scores not counted). Stages waited {bubble:.1%} of that time; predicted: "
        f"{idle:.1%}, {foreseen:.3g} s. Forwards are opaque."
    )
    pictures = ""
    if drawn is not None:
        shares, last = drawn["jobs"], max(end for *_, end in drawn["spans"])
        pictures = _picture("Measured, the longest", drawn["spans"], shares, styles, stages, last)
        end = max((end for *_, end in drawn["predicted_spans"]), default=0.0)
        pictures += _picture("The same, predicted", drawn["predicted_spans"], shares, styles, stages, end)
    return f"<section><h2>Pipeline</h2><p class='caption'>{caption}</p>{table}{pictures}</section>"


def _picture(
    title: str, spans: Sequence[Any], shares: Sequence[Mapping[str, int]], styles: Mapping[str, str], stages: int, end: float
) -> str:  # fmt: skip
    """Stages below each other; a box is split by the tokens of the jobs that share it."""
    x = charts.linear_axis("seconds", [0, end], tight=True)
    y = charts.Axis("stage", stages, 0, tuple((stage + 0.5, str(stage)) for stage in range(stages)))
    marks = []
    for stage, kind, slot, start, stop in spans:
        bottom, total = stage + 0.9, sum(shares[slot].values())
        for name, tokens in shares[slot].items():
            top = bottom - 0.8 * tokens / total
            style = f"mark fill {'faint ' if kind == 'backward' else ''}{styles.get(name, '')}"
            tip = f"{kind} of slot {slot} on stage {stage}: {1e3 * (stop - start):.3g} ms\n{name}: {tokens:,} tokens"
            marks.append(charts.bar(start, stop, bottom, top, x, y, style, tip))
            bottom = top
    return charts.chart(title, marks, x, y, height=30 + 44 * stages)
