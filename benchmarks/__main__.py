"""Run a benchmark by its name:

    python -m benchmarks anchors --out benchmarks/results/anchors-h100.json
    python -m benchmarks anchors --quick --out anchors-cpu.json      # toy sizes, on any device

`packlora bench NAME` runs the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import anchors

BENCHMARKS = {"anchors": anchors}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    names = parser.add_subparsers(dest="name", required=True)
    for name, benchmark in BENCHMARKS.items():
        own = names.add_parser(name, help=(benchmark.__doc__ or "").split("\n")[0])
        own.add_argument("--out", type=Path, required=True, help="the JSON file to write")
        own.add_argument("--quick", action="store_true", help="toy sizes, on any device")
        benchmark.add_arguments(own)
    args = parser.parse_args()
    BENCHMARKS[args.name].run(args)


if __name__ == "__main__":
    main()
