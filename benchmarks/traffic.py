"""DRAM traffic of one forward and backward of a layer, counted by NVIDIA Nsight Compute.

    python -m benchmarks layer --ncu                                   # prints the command lines
    python -m benchmarks.traffic run packlora 4096           # what ncu runs: one counted forward and backward
    python -m benchmarks.traffic table *.csv                 # what the counts come to

The setting is that of LoRAFusion's table: K = N, T = 8192, r 16, dropout 0.1, bfloat16.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.layer import Case, Inputs, contender
from benchmarks.results import text_table
from packlora.plans.timing import FLUSH_BYTES

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
CONTENDERS = ("frozen", "peft_bf16", "packlora")
WIDTHS = (4096, 5120, 8192)
TOKENS = 8192
UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}
"""As ncu names them, with --print-units base or without."""


def commands(folder: Path) -> list[str]:
    """Shell lines that count every contender at every width into `folder`, then print the table.

    The caches are left as they are between kernels: what one kernel leaves in L2 for the next is not read from DRAM.
    """
    lines = [f"mkdir -p {folder}"]
    for width in WIDTHS:
        for name in CONTENDERS:
            lines.append(
                f"ncu --metrics {','.join(METRICS)} --csv --page raw --print-units base --profile-from-start off "
                "--cache-control none --clock-control none --target-processes all "
                f"--log-file {folder / f'{name}-{width}.csv'} "
                f"{sys.executable} -m benchmarks.traffic run {name} {width}"
            )
    return [*lines, f"{sys.executable} -m benchmarks.traffic table {folder}/*.csv"]


def run_counted(contender_name: str, width: int) -> None:
    """Warm up, then one forward and backward between the profiler's start and stop, with L2 flushed before it."""
    device = torch.device("cuda")
    work = contender(contender_name, Inputs.random(Case(width, width, TOKENS), device)).make()
    for _ in range(5):
        work.clear()
        work.step()
    work.clear()
    torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device).fill_(1)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    work.step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def parse_ncu_csv(lines: Iterable[str]) -> dict[str, int]:
    """DRAM bytes, read and written, by kernel name, from `ncu --csv --page raw` or `--page details`.

    Lines before the header (ncu's own messages) are passed over.

    Raises:
        ValueError: there is no header with the metrics, a unit is unknown, or nothing was counted.
    """
    rows = csv.reader(line for line in lines if line.startswith('"'))
    header = next(rows, None)
    if header is None or "Kernel Name" not in header:
        raise ValueError("no csv of ncu: no line has the column Kernel Name")
    name = header.index("Kernel Name")
    out: dict[str, int] = defaultdict(int)
    if "Metric Name" in header:  # --page details: one line per kernel and metric
        metric, unit, value = (header.index(f"Metric {part}") for part in ("Name", "Unit", "Value"))
        for row in rows:
            if row[metric] in METRICS:
                out[row[name]] += _bytes(row[value], row[unit])
    else:  # --page raw: one line per kernel, the units in a line of their own
        columns = [header.index(wanted) for wanted in METRICS if wanted in header]
        if len(columns) != len(METRICS):
            raise ValueError(f"the csv lacks a column of {', '.join(METRICS)}")
        units = next(rows, [])
        for row in rows:
            out[row[name]] += sum(_bytes(row[column], units[column]) for column in columns)
    if not out:
        raise ValueError("the csv holds no kernel: was the profiler started?")
    return dict(out)


def _bytes(value: str, unit: str) -> int:
    if unit not in UNITS:
        raise ValueError(f"unit {unit!r} is not one of {', '.join(UNITS)}")
    return round(float(value.replace(",", "")) * UNITS[unit])


def traffic_table(files: list[Path]) -> list[str]:
    """GiB of each contender and its share of eager PEFT's, from files named CONTENDER-WIDTH.csv."""
    totals = {}
    for file in files:
        name, _, digits = file.stem.rpartition("-")
        totals[int(digits), name] = sum(parse_ncu_csv(file.read_text().splitlines()).values())
    rows = []
    for (width, name), total in sorted(totals.items()):
        eager = totals.get((width, "peft_bf16"))
        rows.append(
            [f"{width}x{width} T{TOKENS}", name, f"{total / 2**30:.3f}", f"{total / eager:.3f}" if eager else "-"]
        )
    return text_table(["case", "contender", "GiB", "of eager PEFT"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    run = parts.add_parser("run")
    run.add_argument("contender")
    run.add_argument("width", type=int)
    table = parts.add_parser("table")
    table.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    if args.part == "run":
        run_counted(args.contender, args.width)
    else:
        print("\n".join(traffic_table(args.files)))


if __name__ == "__main__":
    main()
