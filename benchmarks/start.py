"""`start`: seconds from a command to what a person waits for: a refusal, the first optimizer step, the end.

On a CPU the smallest of five processes counts, since other processes make all of them slower; on a GPU one run with empty
caches and one after it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.commands import write_command
from benchmarks.harness import Benchmark, Case, Options, Row, case

RUNS = 5
SECONDS = 600.0
"""After which a command is given up."""


def start_cases(options: Options) -> list[Case]:
    if not options.tiny:
        return [case("cold", run="nothing compiled before"), case("warm", run="compiled before")]
    return [
        case("bad_path", run="a data file that is not there"),
        case("bad_line", run="a malformed line of data"),
        case("first_step", run="a model of two layers"),
        case("demo_first_step", run="packlora demo"),
    ][: 3 if options.quick else 4]


def command_timed(
    words: list[str], folder: Path, end_at_step: bool = False, environment: Mapping[str, str] = MappingProxyType({})
) -> Row:
    """Run `packlora WORDS` in a folder.

    Args:
        end_at_step: end it after its first optimizer step.

    Returns:
        first_step_s: until the first step's line is on standard output, None where there is none; wall_s: until the end;
        cpu_s: processor time of all its processes; code: exit code.
    """
    before, start, first = _cpu(), time.perf_counter(), None
    places = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "packlora", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(places)},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if first is None and "  step 1/" in line:
            first = time.perf_counter() - start
            if end_at_step:
                process.send_signal(signal.SIGTERM)
    code = process.wait(SECONDS)
    return {"first_step_s": first, "wall_s": time.perf_counter() - start, "cpu_s": _cpu() - before, "code": code}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_start(one: Case, names: list[str], options: Options) -> Row:
    def make() -> tuple[Any, Path]:
        folder = tempfile.TemporaryDirectory()
        return folder, write_command(Path(folder.name), options.tiny)

    _, file = options.shared("start", make)
    if not options.tiny:
        caches = {"TRITON_CACHE_DIR": str(file.parent / "triton"), "PACKLORA_CACHE": str(file.parent / "packlora")}
        return command_timed(["train", file.name, "--set", f"output_dir={one.label}"], file.parent, environment=caches)
    runs = [_on_a_cpu(one.label, file, number) for number in range(1 if options.quick else RUNS)]
    key = "first_step_s" if "step" in one.label else "wall_s"
    best = min(runs, key=lambda run: run[key])
    return {"seconds": best[key], "cpu_s": min(run["cpu_s"] for run in runs), "all_s": [run[key] for run in runs]}


def _on_a_cpu(label: str, file: Path, number: int) -> Row:
    """One process of a case. Raises RuntimeError where it does something else than what is measured."""
    folder, out = file.parent, f"{label}-{number}"
    if label == "demo_first_step":
        found = command_timed(["demo", "--output-dir", str(folder / out)], folder, end_at_step=True)
    else:
        words = ["train", file.name, "--set", f"output_dir={out}", "--max-steps", "2"]
        slips = {"bad_path": "nothing.jsonl", "bad_line": "bad.jsonl"}
        (folder / "bad.jsonl").write_text('{"text": "w1 w2"}\n{"text": \n')
        if label in slips:
            words += ["--set", f"jobs.0.data.path={slips[label]}"]
        found = command_timed(words, folder)
    wanted = 2 if label.startswith("bad") else 0
    if (label != "demo_first_step" and found["code"] != wanted) or (wanted == 0 and found["first_step_s"] is None):
        raise RuntimeError(f"{label} ended with {found}")
    return found


def start_summary(rows: list[Row]) -> Row:
    out: Row = {}
    for row in rows:
        if "seconds" in row:
            out[f"{row['case']}_s"] = row["seconds"]
        else:
            out |= {f"{row['case']}_{key}": row[key] for key in ("first_step_s", "wall_s")}
    return out


START = Benchmark(
    start_cases, measure_start, start_summary,
    "`python -m packlora` in a process of its own, from its start. On a CPU the least of five: until the end of a command that "
    "refuses a data path or a malformed line of data; until the line of the first optimizer step of `train` on four jobs of 24 "
    "samples on a model of two layers, and of `demo`, whose model was converted before; cpu_s: processor time of all its "
    "processes. On a GPU the run of the benchmark `command` (Qwen3-0.6B's shape, four jobs of 3000 samples, 3.58 million "
    "tokens), with empty caches of Triton and packlora, and again: until the first step's line and until the end.",
    ["packlora"], by_case=True, where="any",
)  # fmt: skip
