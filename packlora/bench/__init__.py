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

NAMES = ("layer", "multi", "graphs", "model", "dora", "schedule")
PARTS = {
    "model": ("lora", "dora", "layers"),
    "dora": ("norm", "compose", "layer", "multi", "model", "paper-model", "quality"),
}
"""Of benchmarks that can be measured in pieces; a piece replaces its rows in the file and leaves the others."""


def run_bench(
    name: str,
    out: Path,
    quick: bool = False,
    device: str = "auto",
    only: str | None = None,
    layers: int | None = None,
    plots: bool = False,
    ncu: bool = False,
    parts: str | None = None,
    resume: bool = False,
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
        parts: those to measure, of PARTS, separated by commas; rows of the others stay in the file as they are.
        ncu: measure nothing; print the command lines that count the DRAM traffic of `layer`.
        resume: go on where a run that was ended left off.

    Returns:
        Exit code: 0, or 1 where a contender failed (the others' figures are written).

    Raises:
        InputError: an unknown name, no GPU, words in `only` or `parts` that mean nothing here, a file whose other parts
            cannot be kept, or a run to go on with that was asked for something else.
    """
    from packlora.base.device import choose_device
    from packlora.bench.options import Options
    from packlora.bench.progress import Progress
    from packlora.bench.results import check_writable, device_slug, rows_of_other_parts, write_results
    from packlora.errors import InputError
    from packlora.runtime.record import device_name

    if name not in NAMES:
        raise InputError(f"bench: {name!r} is not a benchmark; there are {', '.join(NAMES)}")
    if layers is not None and name not in PARTS:
        raise InputError(f"bench {name}: --layers is for {' and '.join(PARTS)}")
    wanted = _parts(name, parts)
    if ncu:
        if name != "layer":
            raise InputError(f"bench {name}: --ncu is for layer")
        from packlora.bench.traffic import commands

        print("\n".join(commands(out.with_suffix("").with_name(f"{out.stem}-ncu"))))
        return 0
    if name == "schedule":  # measures no device
        if only or device not in ("auto", "cpu"):
            raise InputError("bench schedule runs on the CPU and in full; --only and --device are not for it")
        if resume:
            raise InputError("bench schedule runs in one piece; --resume is not for it")
        return int(importlib.import_module("packlora.bench.schedule").run_schedule(out, quick, plots))
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
    bench = importlib.import_module(f"packlora.bench.{name}")
    label = f"{name}-{device_slug(chosen)}"
    kept: tuple[dict[str, Any], ...] = ()
    if wanted:
        kept = rows_of_other_parts(out, label, device_name(chosen), wanted, bench.part_of)
        if kept and (quick or words or layers is not None):
            raise InputError(
                f"bench {name}: {out} holds other parts in full; --quick, --only and --layers need a new file"
            )
    asked = {
        "name": label,
        "device": device_name(chosen),
        "quick": quick,
        "only": list(words),
        "layers": layers,
        "parts": list(wanted),
    }
    progress = Progress(out, asked, resume)
    options = Options(chosen, quick, words, layers, wanted, kept, out, progress)
    outcome = bench.run(options)
    print()
    for line in outcome.table:
        print(line)
    write_results(out, label, outcome.protocol, outcome.rows, outcome.summary, str(chosen))
    progress.done()
    if plots:
        from packlora.bench.plots import write_plots

        for path in write_plots(name, outcome.rows, out):
            print(f"wrote {path}")
    return report_failures(outcome.rows)


def _parts(name: str, words: str | None) -> tuple[str, ...]:
    """The parts to measure; none for all. Raises InputError for one that the benchmark does not have."""
    from packlora.errors import InputError

    wanted = tuple(dict.fromkeys(word.strip() for word in (words or "").split(",") if word.strip()))
    if wanted and name not in PARTS:
        raise InputError(f"bench {name}: --parts is for {' and '.join(PARTS)}")
    for word in wanted:
        if word not in PARTS[name]:
            raise InputError(f"parts: bench {name} has no part {word!r}; it has {', '.join(PARTS[name])}")
    return () if wanted and set(wanted) == set(PARTS[name]) else wanted


def report_failures(rows: list[dict[str, Any]]) -> int:
    """Print every contender that failed; 1 if there is one."""
    failed = [(row["case"], name, error) for row in rows for name, error in row["failed"].items()]
    for case, name, error in failed:
        print(f"failed: {case}: {name}: {error}", file=sys.stderr)
    return 1 if failed else 0
