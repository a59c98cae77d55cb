"""Texts of the page of a run: numbers, badges, and tables that a reader can sort, as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

UNKNOWN = "&ndash;"
SYMBOLS = {
    "done": "✓",
    "failed": "✕",
    "interrupted": "◼",
    "stopped": "◼",
    "ended early": "◼",
    "broken off": "◼",
    "running": "▶",
    "waiting": "…",
}


def _three(number: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def short(number: float) -> str:
    """Number with a unit from 100,000 on: 135 M."""
    for limit, unit, suffix in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e5, 1e3, "k")):
        if number >= limit:
            return f"{_three(number / unit)}\u202f{suffix}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Format seconds as a person says them: 1 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.3g} s"


def size(number: float) -> str:
    """Format bytes in MiB or GiB."""
    return f"{_three(number / 2**30)} GiB" if number >= 2**30 else f"{_three(number / 2**20)} MiB"


def loss_text(value: float | None) -> str:
    """Format a loss with three decimals."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.3f}"


def mean(values: Sequence[float]) -> float | None:
    """Compute a mean; None where there are no values."""
    return sum(values) / len(values) if values else None


def sub(text: str, style: str = "") -> str:
    """Small line under a value. style: class; why for a sentence."""
    return f"<small class='{style}'>{escape(text)}</small>" if text else ""


def change(first: float | None, last: float | None) -> str:
    """Format a loss before and after, with the change in percent, but for one that was 0 up to rounding."""
    if first is None or last is None:
        return loss_text(first if last is None else last)
    percent = f"{100 * (last / first - 1):+.0f} %".replace("-", "&minus;") if first > 1e-6 else ""
    return f"{loss_text(first)} → <b>{loss_text(last)}</b><small>{percent}</small>"


def table(columns: Sequence[str], rows: Sequence[str]) -> str:
    """Table that page.js lets a reader sort by any column. columns: HTML of the headings. rows: from `row`."""
    head = "".join(f"<th scope='col'>{name}</th>" for name in columns)
    return (
        f"<div class='scroll' tabindex='0'><table class='sortable'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def row(columns: Sequence[str], name: str, key: str, cells: Sequence[tuple[str, Any]], attributes: str = "") -> str:
    """Row of a sortable table. On a narrow screen it is a card, where every value stands under its heading.

    Args:
        columns: HTML of the headings after the first.
        name: HTML of the first cell.
        key: text by which the first column is sorted.
        cells: HTML of a value and what it is sorted by, by column; None is not known and comes last.
        attributes: HTML of further attributes of the row.
    """
    values = "".join(
        f'<td data-label="{label}" data-key="{escape(str("" if by is None else by))}">{cell}</td>'
        for label, (cell, by) in zip(columns, cells, strict=True)
    )
    return f'<tr {attributes} data-key="{escape(key)}"><th scope="row">{name}</th>{values}</tr>'


def badge(status: str) -> str:
    """Status with its symbol."""
    return f'<span class="badge {escape(status.replace(" ", "-"))}">{SYMBOLS.get(status, "")} {escape(status)}</span>'
