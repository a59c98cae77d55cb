"""Benchmarks of packlora against the frozen model and PEFT: one module per name, one file of results each.

    packlora bench layer --out layer-h200.json

timing.py holds the paired loop, options.py what can be asked for, results.py the file, plots.py the pictures.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

NAMES = ("layer", "multi", "graphs", "model")


def run_bench(
    name: str,
    out: Path,
    quick: bool = False,
    device: str = "auto",
    only: str | None = None,
    layers: int | None = None,
    plots: bool = False,
    ncu: bool = False,
) -> int:
    """Run a benchmark, write its results and print a table.

    Args:
        name: one of NAMES.
        out: the JSON file to write.
        quick: a subset in seconds; the only way on a CPU, with toy sizes.
        device: auto, cpu, cuda or cuda:<number>.
        only: contenders and words of cases, separated by commas; see options.choose.
        layers: of the model in `model`, to shrink it.
        plots: also write pictures beside the file.
        ncu: measure nothing; print the command lines that count the DRAM traffic of `layer`.

    Returns:
        Exit code: 0, or 1 where a contender failed (the others' figures are written).

    Raises:
        InputError: an unknown name, no GPU, or words in `only` that mean nothing here.
    """
    import torch

    from packlora.bench.options import Options
    from packlora.bench.results import check_writable, device_slug, write_results
    from packlora.errors import InputError
    from packlora.model import choose_device

    if name not in NAMES:
        raise InputError(f"bench: {name!r} is not a benchmark; there are {', '.join(NAMES)}")
    if layers is not None and name != "model":
        raise InputError(f"bench {name}: --layers is for model")
    if ncu:
        if name != "layer":
            raise InputError(f"bench {name}: --ncu is for layer")
        from packlora.bench.traffic import commands

        print("\n".join(commands(out.with_suffix("").with_name(f"{out.stem}-ncu"))))
        return 0
    chosen = choose_device(device)
    if chosen.type == "cpu" and not (quick and device == "cpu"):
        raise InputError(
            f"bench {name} measures a GPU, and {'the CPU was asked for' if device == 'cpu' else 'there is none here'}; "
            "--quick --device cpu tries it with toy sizes on the CPU"
        )
    check_writable(out)
    if plots and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plots needs matplotlib, which is not installed (pip install matplotlib)")
    words = tuple(word.strip() for word in (only or "").split(",") if word.strip())
    options = Options(chosen, quick, words, layers)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen.index or 0)
    outcome = importlib.import_module(f"packlora.bench.{name}").run(options)
    print()
    for line in outcome.table:
        print(line)
    write_results(out, f"{name}-{device_slug(chosen)}", outcome.protocol, outcome.rows, outcome.summary, str(chosen))
    if plots:
        from packlora.bench.plots import write_plots

        for path in write_plots(name, outcome.rows, out):
            print(f"wrote {path}")
    return report_failures(outcome.rows)


def report_failures(rows: list[dict[str, Any]]) -> int:
    """Print every contender that failed; 1 if there is one."""
    failed = [(row["case"], name, error) for row in rows for name, error in row["failed"].items()]
    for case, name, error in failed:
        print(f"failed: {case}: {name}: {error}", file=sys.stderr)
    return 1 if failed else 0
