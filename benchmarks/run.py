"""`python -m benchmarks NAME`: what was asked for is checked, the benchmark runs, its results are written and printed.

    python -m benchmarks layer --out layer-h200.json
    torchrun --nproc-per-node 2 -m benchmarks replicas --out replicas-h200.json

plans/timing.py holds the paired loop, options.py what can be asked for, results.py the file, plots.py the pictures.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    dora,
    expert_parallel,
    experts,
    graphs,
    layer,
    megatron,
    model,
    multi,
    peer_block,
    pipeline,
    quantised,
    replicas,
    small,
    sweep,
    tensor_parallel,
    vlm,
    workloads,
)
from benchmarks.options import PARTS, USUAL_SHAPES, WITH_LAYERS, Options, Outcome
from benchmarks.plots import write_plots
from benchmarks.processes import processes
from benchmarks.progress import Progress
from benchmarks.results import check_writable, device_slug, rows_of_other_parts, write_results
from benchmarks.schedule import run_schedule
from benchmarks.studies.short_jobs import SHAPES
from benchmarks.traffic import commands
from packlora.base.device import choose_device
from packlora.errors import InputError
from packlora.parallel.agreement import together
from packlora.parallel.mesh import Mesh, world_size
from packlora.runtime.record import device_name

ON_A_DEVICE: dict[str, Any] = {
    "layer": layer, "multi": multi, "graphs": graphs, "model": model, "dora": dora, "small": small,
    "quantised": quantised, "experts": experts, "sweep": sweep, "vlm": vlm, "peers": peer_block, "workloads": workloads,
    "megatron": megatron,
}  # fmt: skip
ON_PROCESSES: dict[str, Any] = {"replicas": replicas, "tensor-parallel": tensor_parallel, "pipeline": pipeline}
ON_EITHER: dict[str, Any] = {"experts": expert_parallel, "megatron": megatron}
"""What benchmarks of ON_A_DEVICE are under torchrun."""
NAMES = (*ON_A_DEVICE, "schedule", *ON_PROCESSES)


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
    shape: str | None = None,
    units: int | None = None,
    lengths: str | None = None,
    seconds: int | None = None,
) -> int:
    """Run a benchmark, write its results and print a table.

    Args:
        name: one of NAMES.
        out: the JSON file to write.
        quick: a subset in seconds; the only way on a CPU, with toy sizes.
        device: auto, cpu, cuda or cuda:<number>.
        only: contenders and words of cases, separated by commas; see options.choose.
        layers: of the models in benchmarks of WITH_LAYERS, to shrink them.
        plots: also write pictures beside the file.
        parts: those to measure, of PARTS, separated by commas; rows of the others stay in the file as they are.
        ncu: measure nothing; print the command lines that count the DRAM traffic of `layer`.
        resume: go on where a run that was ended left off.
        shape: of the model in `replicas`, one of short_jobs.SHAPES, or in `pipeline`, one of pipeline.SHAPES.
        units: that are counted in `pipeline`.
        lengths: of samples in `pipeline`, one of pipeline.LENGTHS.
        seconds: no case begins after so many; what is measured is written, and `resume` goes on with the rest.

    Returns:
        Exit code: 0, or 1 where a contender failed (the others' figures are written).

    Raises:
        InputError: an unknown name, no GPU, words in `only` or `parts` that mean nothing here, a file whose other parts
            cannot be kept, or a run to go on with that was asked for something else.
    """
    if name not in NAMES:
        raise InputError(f"bench: {name!r} is not a benchmark; there are {', '.join(NAMES)}")
    if layers is not None and name not in WITH_LAYERS:
        raise InputError(f"bench {name}: --layers is for {', '.join(WITH_LAYERS)}")
    shapes = {"replicas": SHAPES, "pipeline": pipeline.SHAPES}
    if shape is not None and shape not in shapes.get(name, ()):
        known = " and ".join(f"{one} ({', '.join(own)})" for one, own in shapes.items())
        raise InputError(f"bench {name}: --shape is for {known}; got {shape!r}")
    for key, value in (("--units", units), ("--lengths", lengths)):
        if value is not None and name != "pipeline":
            raise InputError(f"bench {name}: {key} is for pipeline")
    if lengths is not None and lengths not in pipeline.LENGTHS:
        raise InputError(f"bench {name}: --lengths is one of {', '.join(pipeline.LENGTHS)}; got {lengths!r}")
    if seconds is not None and (name == "schedule" or name in ON_PROCESSES or world_size() > 1):
        raise InputError(f"bench {name}: --seconds is for benchmarks of one process, {', '.join(ON_A_DEVICE)}")
    if ncu and name != "layer":
        raise InputError(f"bench {name}: --ncu is for layer")
    wanted = _parts(name, parts)
    if plots and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plots needs matplotlib, which is not installed (pip install matplotlib)")
    if ncu:
        print("\n".join(commands(out.with_suffix("").with_name(f"{out.stem}-ncu"))))
        return 0
    if name == "schedule":  # measures no device
        if only or device not in ("auto", "cpu"):
            raise InputError("bench schedule runs on the CPU and in full; --only and --device are not for it")
        if resume:
            raise InputError("bench schedule runs in one piece; --resume is not for it")
        return run_schedule(out, quick, plots)
    if name in ON_PROCESSES or (name in ON_EITHER and world_size() > 1):
        if (plots or resume) and name != "pipeline":
            raise InputError(f"bench {name} runs in one piece and has no pictures; --resume and --plots are not for it")
        shape = shape or USUAL_SHAPES.get(name, "")
        lengths = lengths or pipeline.SHORT
        plain = Options(torch.device("cpu"), quick, _words(only), layers, wanted, (), out, None, shape, units, lengths)
        with processes(name) as mesh:
            return _measure_together(name, plain, device, resume, mesh, plots)
    if world_size() > 1:
        raise InputError(
            f"bench {name} runs on one process; torchrun is for {' and '.join([*ON_PROCESSES, *ON_EITHER])}"
        )
    chosen = _device(name, device, quick)
    check_writable(out)
    return _measure(name, _options(name, out, chosen, quick, _words(only), layers, wanted, resume, seconds), plots)


def _measure(name: str, options: Options, plots: bool) -> int:
    assert options.out is not None and options.progress is not None
    outcome = ON_A_DEVICE[name].run(options)
    _write(options.progress.asked["name"], options, outcome)
    options.progress.done()
    if left := options.progress.left:
        print(f"the time is up: {len(left)} cases are not measured, {left[0]} is the next; --resume goes on with them")
    if plots:
        _draw(name, outcome, options.out)
    return report_failures(outcome.rows)


def _write(label: str, options: Options, outcome: Outcome) -> None:
    assert options.out is not None
    print()
    for line in outcome.table:
        print(line)
    left = _not_measured(options, outcome)
    write_results(options.out, label, outcome.protocol, outcome.rows, outcome.summary, str(options.device), left)


def _not_measured(options: Options, outcome: Outcome) -> list[str]:
    """Cases that the time did not suffice for, now and when the parts that are kept were measured."""
    assert options.out is not None
    earlier = json.loads(options.out.read_text()).get("not_measured", []) if options.kept else []
    measured = {row["case"] for row in outcome.rows}
    now = options.progress.left if options.progress is not None else []
    return [label for label in dict.fromkeys([*earlier, *now]) if label not in measured]


def _measure_together(name: str, plain: Options, device: str, resume: bool, mesh: Mesh, plots: bool = False) -> int:
    """Measure on all processes; the first one writes. Its file keeps the rows of other numbers of processes.

    Args:
        plain: the options but for the device, what is kept and where rows go meanwhile.
    """
    bench, out, shape = (ON_PROCESSES | ON_EITHER)[name], plain.out, plain.shape
    called = getattr(bench, "LABEL", name)
    assert out is not None

    def asked() -> tuple[str, Options]:
        chosen = _device(name, device, plain.quick)
        if device not in ("auto", "cpu", "cuda"):
            raise InputError(f"device: {device!r} is one device, but {mesh.size} processes were started; use auto")
        usual = name == "pipeline" or shape == USUAL_SHAPES.get(name, "")  # a file of pipelines has all shapes
        label = f"{called}-{device_slug(chosen)}" if usual else f"{called}-{shape.lower()}-{device_slug(chosen)}"
        kept: tuple[dict[str, Any], ...] = ()
        progress = None
        if name == "pipeline":
            pipeline.ways_of(plain.only)
        if mesh.is_first:
            check_writable(out)
            if not (plain.quick or plain.only or plain.layers is not None or plain.units is not None):
                again = [f"{part} {mesh.size}" for part in plain.parts or PARTS.get(name, ("all",))]
                if name == "pipeline":
                    again = [pipeline.case_of(mesh.size, shape, plain.lengths)]
                kept = rows_of_other_parts(out, label, device_name(chosen), again, bench.part_of)
            if name == "pipeline":
                words = {
                    "name": label, "device": device_name(chosen), "processes": mesh.size, "quick": plain.quick,
                    "only": list(plain.only), "layers": plain.layers, "units": plain.units, "shape": shape,
                    "lengths": plain.lengths,
                }  # fmt: skip
                progress = Progress(out, words, resume)
        return label, replace(plain, device=chosen, kept=kept, progress=progress)

    label, options = together(mesh, asked)
    outcome = bench.run(options, mesh)
    if not mesh.is_first:
        return 0
    _write(label, options, outcome)
    if options.progress is not None:
        options.progress.done()
    if plots:
        _draw(name, outcome, out)
    return report_failures(outcome.rows)


def _draw(name: str, outcome: Outcome, out: Path) -> None:
    for path in write_plots(name, outcome.rows, out):
        print(f"wrote {path}")


def _device(name: str, device: str, quick: bool) -> torch.device:
    chosen = choose_device(device)
    if chosen.type == "cpu" and not (quick and device == "cpu"):
        raise InputError(
            f"bench {name} measures a GPU, and {'the CPU was asked for' if device == 'cpu' else 'there is none here'}; "
            "--quick --device cpu tries it with toy sizes on the CPU"
        )
    return chosen


def _options(
    name: str,
    out: Path,
    device: torch.device,
    quick: bool,
    only: tuple[str, ...],
    layers: int | None,
    parts: tuple[str, ...],
    resume: bool,
    seconds: int | None,
) -> Options:
    """With the rows of other parts that stay in the file, and with those that a run that was ended has left."""
    label = f"{name}-{device_slug(device)}"
    kept: tuple[dict[str, Any], ...] = ()
    if parts:
        kept = rows_of_other_parts(out, label, device_name(device), parts, ON_A_DEVICE[name].part_of, resume)
        if kept and (quick or only or layers is not None):
            raise InputError(
                f"bench {name}: {out} holds other parts in full; --quick, --only and --layers need a new file"
            )
    asked = {
        "name": label, "device": device_name(device), "quick": quick, "only": list(only), "layers": layers,
        "parts": list(parts),
    }  # fmt: skip
    return Options(device, quick, only, layers, parts, kept, out, Progress(out, asked, resume, seconds))


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _parts(name: str, words: str | None) -> tuple[str, ...]:
    """The parts to measure; none for all. Raises InputError for one that the benchmark does not have."""
    wanted = tuple(dict.fromkeys(_words(words)))
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
