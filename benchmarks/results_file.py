"""Where benchmark results go and what every file of them holds, so that a figure can be traced to how it was obtained."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

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
