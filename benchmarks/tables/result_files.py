"""Result files of benchmarks, as they are read for pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def results(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return loaded


def measured(name: str) -> dict[str, Any] | None:
    """A results file of a whole benchmark on a GPU, or None while there is none.

    Raises:
        ValueError: the file holds a part of the benchmark (--quick, --only, --layers), which is not for the README.
    """
    if not (ROOT / "benchmarks" / "results" / f"{name}.json").exists():
        return None
    file = results(name)
    if any(key.startswith("part_") for key in file["summary"]):
        raise ValueError(f"{name}.json holds a part of the benchmark; run it without --quick, --only and --layers")
    return file


def of_each(*names: str, section: Callable[[str, dict[str, Any]], list[str]]) -> list[str]:
    """Lines of a section for each of these files that is there, one device after the other."""
    lines: list[str] = []
    for name in names:
        if (file := measured(name)) is not None:
            lines += [*([""] if lines else []), *section(name, file)]
    return lines


def not_measured(file: dict[str, Any]) -> list[str]:
    """The cases that the time did not suffice for."""
    left = file.get("not_measured")
    return ["", f"Not measured: {', '.join(left)}."] if left else []


def ratio(value: float | None) -> str:
    return "failed" if value is None else f"{value:.2f}"
