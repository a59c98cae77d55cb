"""Completions of jobs that learn from rewards on the page of a run: the best and the worst of the newest step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from packlora.report.cells import row, table
from packlora.rl.data import FOLDER

SHOWN = 3
"""Completions of each end, by job."""
LONGEST = 400
"""Characters of a text."""
COLUMNS = ("Step", "Reward", "Advantage", "Tokens", "Completion")


def section(folder: Path, jobs: Sequence[tuple[str, str]]) -> str:
    """Section of the page; empty where nothing was drawn yet. jobs: names and classes of the style sheet."""
    rows = [line for name, style in jobs for line in _rows(folder / name / FOLDER, name, style)]
    if not rows:
        return ""
    return (
        f"<section><h2>Completions</h2>{table(('Job', *COLUMNS), rows)}<p class='caption'>The best and the worst by reward of "
        "the newest step of each job. Files of all: <code>NAME/rollouts/</code>.</p></section>"
    )


def _rows(folder: Path, name: str, style: str) -> Iterator[str]:
    newest = max(folder.glob("step-*.json"), key=_number, default=None)
    try:
        found = None if newest is None else json.loads(newest.read_text(encoding="utf-8"))["completions"]
        ranked = sorted(found or [], key=lambda one: -one["reward"])
        shown = ranked if len(ranked) <= 2 * SHOWN else ranked[:SHOWN] + ranked[-SHOWN:]
        for one in shown:
            yield _row(one, 0 if newest is None else _number(newest), name, style)
    except (OSError, ValueError, KeyError, TypeError):
        return


def _row(one: dict[str, Any], step: int, name: str, style: str) -> str:
    text = one["text"] if len(one["text"]) <= LONGEST else one["text"][:LONGEST] + " ..."
    cells = [
        (f"{step:,}", step), (f"{one['reward']:.4g}", one["reward"]), (f"{one['advantage']:+.3g}", one["advantage"]),
        (f"{len(one['ids']):,}", len(one["ids"])), (f"<span class='said'>{escape(text)}</span>", text),
    ]  # fmt: skip
    return row(COLUMNS, f"<span class='name'>{escape(name)}</span>", name, cells, f'class="{style}"')


def _number(file: Path) -> int:
    number = file.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else 0
