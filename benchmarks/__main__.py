"""Run a benchmark by its name, in a checkout:

    python -m benchmarks layer --out layer-h200.json
    python -m benchmarks layer --quick --out layer-cpu.json         # toy sizes in seconds, on any device
    python -m benchmarks anchors --only s8 --out anchors-h100.json
    torchrun --nproc-per-node 2 -m benchmarks replicas --out replicas-h200.json
    python -m benchmarks tables                                     # write the tables of README and docs again

`python -m benchmarks NAME --help` lists the options of one benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from packlora.errors import InputError

STUDIES = {
    "anchors": "benchmarks.anchors",
    "command": "benchmarks.studies.command",
    "dora-convergence": "benchmarks.studies.dora_convergence",
    "dora-fidelity": "benchmarks.studies.dora_fidelity",
    "halving": "benchmarks.studies.sweep",
    "model-profile": "benchmarks.studies.model_profile",
    "parity": "benchmarks.studies.parity_cpu",
    "plan-memory": "benchmarks.studies.plan_memory",
    "short-jobs": "benchmarks.studies.short_jobs",
    "small-updates": "benchmarks.studies.small_updates",
    "speed": "benchmarks.studies.speed_cpu",
    "tables": "benchmarks.tables.write",
    "trl": "benchmarks.studies.trl_losses",
}
"""Benchmarks with options of their own, by the module whose `main` runs them."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where a contender failed, 2 for arguments that mean nothing."""
    words = sys.argv[1:] if arguments is None else arguments
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        from benchmarks.run import NAMES

        print(f"{__doc__}\npaired: {', '.join(NAMES)}\nstudies: {', '.join(STUDIES)}")
        return 0
    if name in STUDIES:
        sys.argv = [f"python -m benchmarks {name}", *words[1:]]
        importlib.import_module(STUDIES[name]).main()
        return 0
    try:
        return _paired(words)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; --resume goes on where it was", file=sys.stderr)
        return 130


def _paired(words: list[str]) -> int:
    """One of the benchmarks that time contenders in turn inside one loop."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {words[0]}", description="See docs/benchmarks.md.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    parser.add_argument("--quick", action="store_true", help="a subset in seconds, with toy sizes on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<number>")
    parser.add_argument("--only", help="contenders, packlora:PLAN, words of cases; commas between")
    parser.add_argument("--layers", type=_number, help="models of so many layers")
    parser.add_argument("--parts", help="only these are measured; rows of other parts stay in FILE; commas between")
    parser.add_argument("--shape", help="replicas: 0.6B, 1.7B or 8B; pipeline: 70B or 32B")
    parser.add_argument("--units", type=_number, help="pipeline: count so many units")
    parser.add_argument("--lengths", help="pipeline: of samples: short, or a set of schedule")
    parser.add_argument("--resume", action="store_true", help="go on where a run that was ended left off")
    parser.add_argument("--seconds", type=_number, help="begin no case after so many; --resume goes on")
    parser.add_argument("--plots", action="store_true", help="also write pictures beside FILE")
    parser.add_argument("--ncu", action="store_true", help="layer: print the command lines that count DRAM traffic")
    from benchmarks.run import run_bench

    return run_bench(words[0], **vars(parser.parse_args(words[1:])))


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
