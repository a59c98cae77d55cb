"""Run a benchmark by its name, in a checkout:

python -m benchmarks layer --out layer-h200.json
python -m benchmarks layer --quick --device cpu --out layer.json       # toy sizes in seconds, on any machine
python -m benchmarks model --only layer,T8192 --out model-h200.json    # these cases again; the file's others stay
torchrun --nproc-per-node 2 -m benchmarks replicas --out replicas-h200.json
python -m benchmarks tables                                            # write the tables of README and docs again
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from packlora.command_line import loading
from packlora.errors import InputError

NAMES = {
    "layer": "layers:LAYER", "multi": "layers:MULTI", "dora": "layers:DORA", "model": "models:MODEL", "graphs": "models:GRAPHS",
    "small": "small:SMALL", "schedule": "schedule:SCHEDULE", "workloads": "training:WORKLOADS",
    "replicas": "replicas:REPLICAS", "pipeline": "pipeline:PIPELINE", "tensor-parallel": "tensor_parallel:TENSOR_PARALLEL",
    "megatron": "megatron:MEGATRON", "peers": "peer_block:PEERS", "anchors": "commands:ANCHORS", "command": "commands:COMMAND",
    "start": "start:START", "serve": "serve:SERVE", "rl": "rewards:RL", "fit": "fit:FIT", "large": "large:LARGE",
    "parity": "quality:PARITY", "dora-fidelity": "quality:FIDELITY", "dora-convergence": "quality:CONVERGENCE",
    "sweep": "quality:SWEEP", "fp8": "fp8:FP8", "speed": "training:SPEED", "sampling": "sampling:SAMPLING",
    "quantised": "models:QUANTISED", "experts": "models:EXPERTS", "vlm": "models:VLM",
}  # fmt: skip
"""Benchmarks by module and name."""


def main(words: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where a contender failed, 2 for arguments that mean nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*NAMES, "tables"], metavar="NAME", help=", ".join([*NAMES, "tables"]))
    parser.add_argument("--out", type=Path, metavar="FILE", help="the JSON file to write")
    parser.add_argument("--quick", action="store_true", help="a part in seconds or minutes; toy sizes on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<number>")
    parser.add_argument("--only", default="", help="contenders, packlora:PLAN, words of cases; commas between")
    parser.add_argument("--layers", type=int, help="models of so many layers")
    parser.add_argument("--resume", action="store_true", help="go on with the cases that FILE does not have")
    parser.add_argument("--seconds", type=float, help="begin no case after so many")
    parser.add_argument("--plots", action="store_true", help="draw the picture that docs show, beside FILE")
    args = parser.parse_args(words)
    if args.name == "tables":
        from benchmarks import tables

        tables.write()
        return 0
    if args.out is None:
        parser.error("--out FILE is missing")
    from benchmarks.harness import run

    module, _, name = NAMES[args.name].partition(":")
    with loading():  # as the command does: what libraries make is not searched for garbage
        bench = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    only = [word.strip() for word in args.only.split(",") if word.strip()]
    try:
        return run(
            args.name,
            bench,
            args.out,
            args.quick,
            args.device,
            only,
            args.layers,
            args.resume,
            args.seconds,
            args.plots,
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; --resume goes on where it was", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
