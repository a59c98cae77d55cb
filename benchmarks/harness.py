"""The loop of every benchmark: cases are chosen, contenders timed in turn, rows written with where they come from.

A benchmark is a `Benchmark`: a table of cases, the contenders' names, a function that measures a case, and the figures that
are quoted. `packlora/tune/timing.py` holds the paired loop. The results file is written after each case, so a run that is
ended loses one case at most; `--resume` goes on with the others.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import processes
from packlora.base.device import choose_device
from packlora.engine.memory import free_memory
from packlora.errors import InputError
from packlora.files import write_json
from packlora.ops.lora_linear.plan import Plan, named_plan
from packlora.parallel.alone import OneProcess, world_size
from packlora.runtime.record import device_name, source_commit, versions
from packlora.tune.timing import Contender, Timings, paired

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a benchmark's table.

    label: its words choose it in `--only`. values: its settings, which are attributes of the case and keys of its row.
    """

    label: str
    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"case {self.label} has no {name}") from None


def case(label: str, **values: Any) -> Case:
    return Case(label, values)


@dataclass(frozen=True, slots=True)
class Options:
    """The request of one run. layers: of models, None for all; chosen: `--only` has words of cases; named: it names contenders;
    less: not all of the usual ones take part; mesh: the processes; out: the results file."""

    device: torch.device
    quick: bool = False
    layers: int | None = None
    chosen: bool = False
    named: bool = False
    less: bool = False
    mesh: OneProcess = field(default_factory=OneProcess)
    out: Path = Path("results.json")
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def tiny(self) -> bool:
        """Toy sizes that a CPU runs in seconds: they test the benchmark and measure nothing."""
        return self.device.type == "cpu"

    @property
    def whole(self) -> bool:
        """All contenders of the full cases take part."""
        return not (self.quick or self.less)

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Make a value once for a key. Only the newest key's is kept, so that two models never need memory at once."""
        if key not in self.kept:
            self.kept.clear()
            free_memory(self.device)
            self.kept[key] = make()
        return self.kept[key]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A measurement behind a name of `python -m benchmarks`.

    Attributes:
        cases: the table; toy sizes where options.tiny, a part where options.quick.
        measure: the row of a case with these contenders; what it returns is added to the label and values of the case. A
            generator gives the row again each time that it has grown; `unfinished` names the contenders that are missing.
        summary: the figures that are quoted, of all rows in the file; None for one that could not be measured.
        protocol: how it was measured, in words, for the results file.
        contenders: names; the first takes part unnamed.
        optional: contenders that take part only where they are named, or where `measure` adds them.
        by_case: every figure is of one case, so that it keeps its name where other cases are missing.
        where: "gpu" (toy sizes on a CPU), "cpu", "processes" (torchrun), "either" (gpu or torchrun) or "any" (cpu or gpu).
        plot: draws a picture beside the file, with --plots.
    """

    cases: Callable[[Options], list[Case]]
    measure: Callable[[Case, list[str], Options], Row | Iterator[Row]]
    summary: Callable[[list[Row]], Row]
    protocol: str
    contenders: Sequence[str]
    optional: Sequence[str] = ()
    by_case: bool = False
    where: str = "gpu"
    plot: Callable[[list[Row], Path], None] | None = None


# --- measuring ---------------------------------------------------------------------------------------------------------


def timed(contenders: Sequence[Contender], options: Options, weights: int | None = None, **settings: Any) -> Row:
    """Time contenders in turn (see tune/timing.paired, which takes the settings); toy sizes run two rounds.

    Args:
        weights: bytes of the frozen weights, for `gib`: the peak of each contender as if it stood alone, that is these
            weights, what it keeps, and what one step takes on top.

    Returns:
        Medians and ratios to frozen by contender; `vs_peft` holds the time of each peer over packlora's.
    """
    if options.tiny:
        settings |= {"seconds": 0, "rounds": (2, 2), "warmup": 1}
    timings = paired(contenders, options.device, **settings)
    row, own = row_of(timings), [name for name in timings.by_name if name.startswith("packlora")]
    peers = [name for name in timings.by_name if name.startswith(("peft", "sequential"))]
    row["vs_peft"] = {name: {peer: timings.ratio(peer, name) for peer in peers} for name in own}
    return row if weights is None else row | {"gib": peak_gib(timings, weights)}


def row_of(timings: Timings) -> Row:
    """What a results file keeps of a case: medians by contender, and the errors."""
    done = {name: timing for name, timing in timings.by_name.items() if timing.error is None}
    out: Row = {"rounds": max((len(timing.ms) for timing in done.values()), default=0)}
    out["ms"] = {name: statistics.median(timing.ms) for name, timing in done.items()}
    out["over_frozen"] = {name: timings.ratio(name, "frozen") for name in done if name != "frozen"}
    for kind in ("ahead_ms", "wall_ms"):
        if any(getattr(timing, kind) for timing in done.values()):
            out[kind] = {name: statistics.median(getattr(timing, kind)) for name, timing in done.items()}
            ratios = {name: timings.ratio(name, "frozen", kind) for name in done if name != "frozen"}
            out[kind.replace("_ms", "_over_frozen")] = ratios
    out["host_us"] = {name: statistics.median(timing.host_us) for name, timing in done.items()}
    out["peak_mib"] = {
        name: timing.peak_bytes / 2**20 for name, timing in done.items() if timing.peak_bytes is not None
    }
    out["notes"] = {name: timing.note for name, timing in done.items() if timing.note}
    out["failed"] = {name: timing.error for name, timing in timings.by_name.items() if timing.error is not None}
    return out


def peak_gib(timings: Timings, weights: int) -> dict[str, float]:
    return {
        name: (weights + timing.own_bytes + timing.peak_bytes) / 2**30
        for name, timing in timings.by_name.items()
        if timing.error is None and timing.own_bytes is not None and timing.peak_bytes is not None
    }


def choose(only: Sequence[str], bench: Benchmark, cases: Sequence[Case]) -> tuple[list[str], list[Case], bool]:
    """Contenders and cases that `only` names, and whether contenders were named.

    A word is a contender, `packlora:PLAN` for packlora with a plan given by name, or a word of a case's label. Words for
    the same places of labels are alternatives; words for different places must all hold.

    Raises:
        InputError: a word that is none of these, or words that no case satisfies together.
    """
    places: dict[frozenset[int], set[str]] = {}
    named: list[str] = []
    words = {(place, word) for one in cases for place, word in enumerate(one.label.split())}
    for word in only:
        found = frozenset(place for place, known in words if known == word)
        if is_contender(word, bench):
            plan_of(word)
            named.append(word)
        elif found:
            places.setdefault(found, set()).add(word)
        else:
            raise InputError(
                f"only: {word!r} is neither a contender ({', '.join([*bench.contenders, *bench.optional])}, packlora:PLAN) "
                f"nor a word of a case ({', '.join(sorted({known for _, known in words}))})"
            )

    def holds(one: Case) -> bool:
        own = one.label.split()
        return all(any(word in accepted for word in own) for accepted in places.values())

    chosen = [one for one in cases if holds(one)]
    if not chosen:
        raise InputError(
            f"only: no case has all of {', '.join(sorted(word for own in places.values() for word in own))}"
        )
    names = list(dict.fromkeys([bench.contenders[0], *named])) if named else list(bench.contenders)
    return names, chosen, bool(named)


def is_contender(word: str, bench: Benchmark) -> bool:
    return word in bench.contenders or word in bench.optional or word.startswith("packlora:")


def plan_of(contender: str) -> Plan | None:
    """The plan that a contender names after a colon. Raises InputError where there is none of that name."""
    _, _, name = contender.partition(":")
    try:
        return named_plan(name) if name else None
    except ValueError as error:
        raise InputError(f"plan {name!r}: {error}") from None


def progress_line(row: Row) -> str:
    """One case: milliseconds, and over frozen with the host and of the GPU alone; rates; errors."""
    parts = []
    for name, ms in row.get("ms", {}).items():
        ratios = [row.get(kind, {}).get(name) for kind in ("over_frozen", "ahead_over_frozen", "wall_over_frozen")]
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios if ratio is not None)
        parts.append(f"{name} {ms:.3f} ms" + (f" ({shown})" if shown else ""))
    rates = row.get("tokens_per_s") or {}
    rates = rates if isinstance(rates, dict) else {row.get("contender", "packlora"): rates}
    parts += [f"{name} {rate:.0f} tokens/s" for name, rate in rates.items()]
    parts += [f"{name} FAILED: {error}" for name, error in row.get("failed", {}).items()]
    parts += [row["error"]] if isinstance(row.get("error"), str) else []
    return f"{row['case']}: " + " | ".join(parts)


# --- a run -------------------------------------------------------------------------------------------------------------


def run(
    name: str,
    bench: Benchmark,
    out: Path,
    quick: bool = False,
    device: str = "auto",
    only: Sequence[str] = (),
    layers: int | None = None,
    resume: bool = False,
    seconds: float | None = None,
    plots: bool = False,
) -> int:
    """Measure, print a line a case, write the file.

    Args:
        only: contenders and words of cases; rows of other cases stay in the file.
        resume: cases that the file has without a failure are not measured again.
        seconds: no case but the first begins after so many, and no further part of one that is measured in parts.

    Returns:
        0, or 1 where a contender failed (the figures of the others are written).

    Raises:
        InputError: a device that is not there, a file that cannot be written, or one that is of something else.
    """
    several = world_size() > 1
    if several and bench.where not in ("processes", "either"):
        raise InputError(f"{name} runs on one process")
    if not several and bench.where == "processes":
        raise InputError(
            f"{name} measures several processes: torchrun --nproc-per-node 2 -m benchmarks {name} --out FILE"
        )
    if plots and bench.plot is None:
        raise InputError(f"plots: {name} draws no picture")
    with processes() if several else nullcontext(OneProcess()) as mesh:

        def opened() -> tuple[_File, list[str], list[Case]]:
            chosen = not all(is_contender(word, bench) for word in only)
            options = Options(_device(name, bench, quick, device), quick, layers, chosen, mesh=mesh, out=out)
            names, cases, named = choose(only, bench, bench.cases(options))
            less = not set(bench.contenders) <= set(names)
            file = _File(name, bench, out, replace(options, named=named, less=less))
            if mesh.is_first and (only or resume or several):
                file.read()
            file.begin(cases, keep=bool(only or resume))
            return file, names, cases

        file, names, cases = mesh.together(opened)
        done = [
            label for label, row in file.rows.items() if resume and not (row.get("failed") or row.get("unfinished"))
        ]
        done, began = mesh.gather(done)[0], time.monotonic()

        def is_over(begun: bool) -> bool:
            return seconds is not None and bool(mesh.gather(begun and time.monotonic() - began > seconds)[0])

        for number, one in enumerate(one for one in cases if one.label not in done):
            if is_over(number > 0):
                break
            found = bench.measure(one, names, file.options)
            for row in [found] if isinstance(found, dict) else found:
                file.rows[one.label] = {"case": one.label, **one.values, **row}
                if mesh.is_first:
                    file.write()
                if row.get("unfinished") and is_over(True):
                    break
            free_memory(file.options.device)
            if mesh.is_first:
                print(progress_line(file.rows[one.label]), flush=True)
        file.options.kept.clear()
        return _ended(bench, file, plots) if mesh.is_first else 0


def _device(name: str, bench: Benchmark, quick: bool, device: str) -> torch.device:
    """Raises InputError where the benchmark needs a GPU and there is none."""
    chosen = torch.device("cpu") if bench.where == "cpu" else choose_device(device)
    if chosen.type == "cpu" and bench.where not in ("cpu", "any") and not (quick and device == "cpu"):
        raise InputError(f"{name} measures a GPU; --quick --device cpu tries it with toy sizes on the CPU")
    return chosen


def _ended(bench: Benchmark, file: _File, plots: bool) -> int:
    """Print the figures and every contender that failed; 1 if there is one."""
    for key, value in json.loads(file.out.read_text())["summary"].items():
        print(f"{key}: {value}")
    if plots:
        assert bench.plot is not None, "it was refused"
        bench.plot(list(file.rows.values()), file.out)
    failed = [(row["case"], *one) for row in file.rows.values() for one in row.get("failed", {}).items()]
    for label, name, error in failed:
        print(f"failed: {label}: {name}: {error}", file=sys.stderr)
    return 1 if failed else 0


def label_of(row: Row) -> str:
    """The label of a row's case; older files of `anchors` name the contender beside it."""
    label, contender = row["case"], row.get("contender", "")
    return label if label.endswith(contender) else f"{label} {contender}"


class _File:
    """The results file of a benchmark: rows by label, and the labels of cases that it should have. Raises InputError where it
    cannot be written."""

    def __init__(self, name: str, bench: Benchmark, out: Path, options: Options) -> None:
        self.bench, self.out, self.options = bench, out, options
        self.name = f"{name}-{device_slug(options.device)}"
        self.asked = {"quick": options.quick, "layers": options.layers, "named": options.less}
        self.rows: dict[str, Row] = {}
        self.wanted: list[str] = []
        check_writable(out)

    def read(self) -> None:
        """Take the rows that the file has; each says which commit it was measured at.

        Raises:
            InputError: it is no results file, or one of another benchmark, device or request.
        """
        if not self.out.exists():
            return
        try:
            file = json.loads(self.out.read_text())
            found = file["name"], file["device"], file.get("asked", dict.fromkeys(self.asked, False) | {"layers": None})
            origin = {"commit": file["commit"], "date": file["date"]}
            self.rows = {label_of(row): {"measured": origin} | row for row in file["rows"]}
            self.wanted = file.get("not_measured", [])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"out: {self.out} is no results file ({error!r}); name another file") from None
        asked = self.name, device_name(self.options.device), self.asked
        if found != asked:
            raise InputError(f"out: {self.out} is of {found}, this is {asked}; name another file")

    def begin(self, cases: Sequence[Case], keep: bool) -> None:
        """Expect these cases. Where rows are not kept, those of this table go; rows of other tables always stay."""
        self.wanted = list(dict.fromkeys([*self.wanted, *(one.label for one in cases)]))
        if not keep:
            own = {one.label.partition(" unit ")[0] for one in cases}
            self.rows = {key: row for key, row in self.rows.items() if key.partition(" unit ")[0] not in own}

    def write(self) -> None:
        """Write rows in the order of the table, behind rows of other tables (of another number of processes)."""
        table = {one.label: self.rows.get(one.label) for one in self.bench.cases(self.options)}
        ordered = [*(row for label, row in self.rows.items() if label not in table), *filter(None, table.values())]
        summary, missing = self.bench.summary(ordered), [label for label in self.wanted if label not in self.rows]
        more: Row = {"asked": self.asked} if any(self.asked.values()) else {}
        more |= {"not_measured": missing} if missing else {}
        if any(self.asked.values()) or (None in table.values() and not self.bench.by_case):
            summary = {f"part_{key}": value for key, value in summary.items()}
        write_results(self.out, self.name, self.bench.protocol, ordered, summary, self.options.device, **more)


def write_results(
    out: Path, name: str, protocol: str, rows: list[Row], summary: Row, device: torch.device, **more: Any
) -> None:
    """Write a results file with commit, day, device and versions."""
    content = {
        "name": name, "commit": source_commit(), "date": datetime.now(UTC).date().isoformat(), "device": device_name(device),
        "versions": versions(), "protocol": protocol, "rows": rows, "summary": summary, **more,
    }  # fmt: skip
    write_json(out, content)


def check_writable(out: Path) -> None:
    """Raises InputError, before anything is measured, where results could not be written."""
    if out.is_dir() or out.suffix != ".json":
        raise InputError(f"out: {out} must be a file that ends in .json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise InputError(f"out: cannot write {out}: {error}") from None


def device_slug(device: torch.device) -> str:
    """The device in file names: `h200`, `a100-sxm4-80gb`, `cpu`."""
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).lower().removeprefix("nvidia")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
