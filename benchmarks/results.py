"""Where benchmark results go and what every file of them holds, so that a figure can be traced to how it was obtained."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from packlora.errors import InputError
from packlora.files import write_json
from packlora.runtime.record import device_name, source_commit, versions


def write_results(
    out: Path, name: str, protocol: str, rows: list[dict[str, Any]], summary: dict[str, Any], device: str = "cpu",
    not_measured: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write a results file with its provenance.

    Args:
        out: the JSON file.
        name: of the benchmark.
        protocol: what was run and how it was timed, in words.
        rows: one mapping per measurement.
        summary: the figures that are quoted.
        device: torch device that the figures were measured on.
        not_measured: labels of cases that the time did not suffice for.
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
            **({"not_measured": list(not_measured)} if not_measured else {}),
        },
    )
    print(f"wrote {out}")


def rows_of_other_parts(
    out: Path,
    name: str,
    device: str,
    parts: Sequence[str],
    part_of: Callable[[dict[str, Any]], str],
    resume: bool = False,
) -> tuple[dict[str, Any], ...]:
    """Rows that stay in a results file when some of its parts are measured again; each says where it comes from.

    Args:
        out: the file; nothing is kept where there is none.
        name, device: of the benchmark and the device that it runs on now, which must be those of the file.
        parts: that are measured again.
        part_of: the part of a row.
        resume: these parts go on where the time of an earlier run was up.

    Raises:
        InputError: the file cannot be read, or is of another benchmark or device, or holds less than whole parts.
    """
    if not out.exists():
        return ()
    try:
        file = json.loads(out.read_text())
        found, rows, summary = (file["name"], file["device"]), file["rows"], file["summary"]
        origin = {"commit": file["commit"], "date": file["date"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"out: cannot keep the other parts of {out}, it is no results file: {error!r}") from None
    if found != (name, device):
        raise InputError(f"out: {out} is of {found[0]} on {found[1]}; this is {name} on {device}: name another file")
    if any(key.startswith("part_") for key in summary) and not (resume and "not_measured" in file):
        raise InputError(f"out: {out} was written with --quick, --only, --layers or --seconds; name another file")
    return tuple({"measured": origin, **row} for row in rows if part_of(row) not in parts)


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
