"""Where benchmark results go and what every file of them holds, so that a figure can be traced to how it was obtained."""

from __future__ import annotations

import re
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from packlora.errors import InputError
from packlora.files import write_json
from packlora.prepare import source_commit, versions
from packlora.train import device_name


def write_results(
    out: Path, name: str, protocol: str, rows: list[dict[str, Any]], summary: dict[str, Any], device: str = "cpu"
) -> None:
    """Write a results file with its provenance.

    Args:
        out: the JSON file.
        name: of the benchmark.
        protocol: what was run and how it was timed, in words.
        rows: one mapping per measurement.
        summary: the figures that are quoted.
        device: torch device that the figures were measured on.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        out,
        {
            "name": name,
            "commit": source_commit(),
            "date": datetime.now(UTC).date().isoformat(),
            "device": device_name(torch.device(device)),
            "versions": versions(),
            "protocol": protocol,
            "rows": rows,
            "summary": summary,
        },
    )
    print(f"wrote {out}")


def check_writable(out: Path) -> None:
    """Raises InputError, before anything is measured, where the results could not be written."""
    if out.is_dir():
        raise InputError(f"out: {out} is a folder; name a file, for example {out / 'results.json'}")
    if out.suffix != ".json":
        raise InputError(f"out: {out} must end in .json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise InputError(f"out: cannot write {out}: {error}") from None


def device_slug(device: torch.device) -> str:
    """For file names: `h200`, `a100-sxm4-80gb`, `cpu`."""
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower().removeprefix("nvidia").strip()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def text_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a plain table: first column to the left, the others to the right."""
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [header, *rows]
    ]
