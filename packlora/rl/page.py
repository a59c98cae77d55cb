"""Completions of jobs that learn from rewards on the page of a run: the best and the worst of the newest step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from packlora.report.cells import row, table
from packlora.rl.data import FOLDER
from packlora.rl.examples import examples

LONGEST = 400
"""Characters of a text."""
COLUMNS = ("Step", "Reward", "Advantage", "Tokens", "Completion")


def section(folder: Path, jobs: Sequence[tuple[str, str]]) -> str:
    """Section of the page; empty where nothing was drawn yet. jobs: names and classes of the style sheet."""
    rows = [line for name, style in jobs for line in _rows(folder / name, name, style)]
    if not rows:
        return ""
    return (
        f"<section><h2>Completions</h2>{table(('Job', *COLUMNS), rows)}<p class='caption'>The best and the worst by reward of "
        "the newest step of each job. Files of all: <code>NAME/rollouts/</code>.</p></section>"
    )


def _rows(folder: Path, name: str, style: str) -> Iterator[str]:
    newest = max(map(_number, (folder / FOLDER).glob("step-*.json")), default=0)
    for one in examples(folder, newest):
        yield _row(one, name, style)


def _row(one: Mapping[str, Any], name: str, style: str) -> str:
    text = one["completion"] if len(one["completion"]) <= LONGEST else one["completion"][:LONGEST] + " ..."
    step, reward, advantage, tokens = (one[key] for key in ("step", "reward", "advantage", "tokens"))
    cells = [
        (f"{step:,}", step), (f"{reward:.4g}", reward), (f"{advantage:+.3g}", advantage), (f"{tokens:,}", tokens),
        (f"<span class='said'>{escape(text)}</span>", text),
    ]  # fmt: skip
    return row(COLUMNS, f"<span class='name'>{escape(name)}</span>", name, cells, f'class="{style}"')


def _number(file: Path) -> int:
    number = file.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else 0
