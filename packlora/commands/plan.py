"""`packlora plan`: what a run would do, found without training, without the model's weights and without a GPU.

Owns the figures and how they are printed; packlora/pipeline/ has the picture of the timeline. Times and memory come from
profiler.py: estimates, or what was measured on this device before. See `memory_parts` there for what an estimate leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.text import Text

import packlora
from packlora.base.device import choose_device
from packlora.commands.plan_layouts import HEADINGS, Layouts, figures_of, sentences, table
from packlora.commands.plan_tables import job_figures, print_jobs, print_table, write_named
from packlora.config import Run
from packlora.data.reader import Reader
from packlora.engine.memory import UNKNOWN
from packlora.errors import InputError, plural
from packlora.files import write_json
from packlora.report.progress import duration
from packlora.report.screen import Screen, table_screen
from packlora.runtime import estimate, profiler
from packlora.runtime.choose import choose
from packlora.runtime.fit import settled
from packlora.runtime.prepare import prepare
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiler import Prediction
from packlora.runtime.profiles import FITTED, Profile
from packlora.schedule.cost import CostModel
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch
from packlora.sweep.candidates import begun
from packlora.terminal import Activity, Told, silent

SAMPLES_SHOWN = 200_000
"""Samples that are planned for the figures; of a longer run the first windows, scaled up."""
MOSTLY = 0.8
"""Share of the free memory from which on frozen weights leave too little room for anything else."""
FULL = 0.95
"""Fill from which on a microbatch counts as full."""
NAMED = 12
"""Jobs whose groups are listed by name, and groups that are listed at all."""
DRAWN = 48
"""Microbatches in the picture."""


@dataclass(slots=True)
class Figures:
    """A run under one method of scheduling.

    microbatches: without no-ops; those with at least FULL of the capacity are full. bound: fewest slots that the lengths
    allow. tokens: real ones, without padding. seconds: of all forwards and backwards, predicted. bubble: part of the stages'
    time in which nothing runs. bytes: on one device at the fullest microbatch. stopped: windows by the reason why nothing
    better was sought. part: of the run's tokens that was planned; the rest is scaled up.
    """

    method: str
    capacity: int
    microbatches: int = 0
    full: int = 0
    noops: int = 0
    bound: int = 0
    tokens: int = 0
    seconds: float = 0.0
    bubble: float = 0.0
    bytes: int = 0
    stopped: Counter[str] = field(default_factory=Counter)
    groups: tuple[tuple[str, ...], ...] = ()
    part: float = 1.0

    @property
    def gap(self) -> float:
        """Slots above the bound, as a part of it."""
        return (self.microbatches + self.noops) / self.bound - 1 if self.bound else 0.0

    @property
    def fill(self) -> float:
        return self.tokens / (self.microbatches * self.capacity)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        own = {"underfilled": self.microbatches - self.full, "gap": self.gap, "fill": self.fill}
        own["tokens_per_second"] = self.tokens_per_second
        return {**asdict(self), "stopped": dict(self.stopped), **own}


def figures(
    prepared: PreparedRun,
    known: Profile,
    method: str,
    told: Told = silent,
    cost: CostModel | None = None,
) -> tuple[Figures, list[Microbatch]]:
    """Plan the run with a method, and the microbatches that were planned.

    Args:
        told: hears how far it is.
        cost: that a pipeline is planned by; None: the profile's.

    Raises:
        InputError: the budget holds no sample of the run.
    """
    orders = [job.data.planned for job in prepared.jobs]
    ahead = sum(order.num_batches * min(order.global_batch_size, len(order.lengths)) for order in orders)
    planner = Planner(
        orders, prepared.budget, lag=known.cost.devices, method=method,
        time_limit_s=prepared.run.schedule.time_limit_s, cost=cost or known.cost,
    )  # fmt: skip
    out, samples = Figures(method, prepared.budget), 0
    planned: list[Microbatch] = []
    told(f"planning microbatches, {method}")
    for window in planner.windows():
        report = window.report
        out.bound += report.bound
        out.stopped[report.stopped] += 1
        out.groups = out.groups or report.groups
        planned += window.microbatches
        samples += sum(len(microbatch.samples) for microbatch in window.microbatches)
        told(f"planning microbatches, {method}: samples", samples, max(samples, min(ahead, SAMPLES_SHOWN)))
        if samples >= SAMPLES_SHOWN:
            break
    timeline = import_module("packlora.pipeline.timeline").simulate(planned, known.cost)
    real = [microbatch for microbatch in planned if not microbatch.is_noop]
    sizes = [microbatch.num_tokens for microbatch in real]
    out.microbatches, out.noops, out.tokens = len(real), len(planned) - len(real), sum(sizes)
    out.full = sum(size >= FULL * prepared.budget for size in sizes)
    out.seconds, out.bubble, out.bytes = timeline.makespan, timeline.bubble, known.bytes(max(sizes))
    whole = sum(job.data.tokens for job in prepared.jobs)
    out.part = min(1.0, out.tokens / whole) if samples >= SAMPLES_SHOWN else 1.0
    if out.part < 1:
        for name in ("microbatches", "full", "noops", "bound", "tokens"):
            setattr(out, name, round(getattr(out, name) / out.part))
        out.seconds /= out.part
    return out, planned


@dataclass(slots=True)
class PlannedRun:
    """All that the command shows."""

    prepared: PreparedRun
    known: Profile
    methods: list[Figures]
    shown: list[Microbatch]
    budgets: list[Prediction]
    layouts: Layouts | None = None
    """Layouts on several devices; None where `--gpus` was not given."""
    cut: str = ""
    """How layers are cut into stages."""

    def to_json(self) -> dict[str, Any]:
        run, shape = self.prepared.run, self.prepared.shape
        return {
            "packlora": packlora.__version__,
            "model": {"base_model": run.base_model, "dtype": run.dtype, **asdict(shape)},
            "device": choose_device(run.device).type,
            "max_tokens_per_microbatch": self.prepared.budget,
            "stages": self.known.cost.devices,
            "jobs": [job_figures(job) for job in self.prepared.jobs],
            "methods": {each.method: each.to_json() for each in self.methods},
            "memory": estimate.memory_parts(run, self.prepared, self.fullest),
            "profile": self.known.describe(),
            "budgets": [{**asdict(each), "tokens_per_second": each.tokens_per_second} for each in self.budgets],
            "notes": self.prepared.warnings,
        } | ({} if self.layouts is None else {"parallel": self.layouts.to_json()})

    @property
    def fullest(self) -> int:
        """Tokens of the fullest microbatch."""
        return max(microbatch.num_tokens for microbatch in self.shown)


def make_plan(run: Run, gpus: int | None = None, told: Told = silent) -> PlannedRun:
    """Check the run as training would, and plan it alone and as the run file says.

    Args:
        gpus: devices on which jobs and their microbatches are spread.

    Raises:
        InputError: as for training, or the run file does not go with so many devices.
    """
    stages = run.parallel.stages
    if gpus is not None and stages > 1:
        run.parallel.check(gpus)
        gpus = None if gpus == stages else gpus  # the pipeline itself
    run = begun(run)[0]
    if gpus is not None and run.dtype == "auto" and run.device != "cpu":  # also where there are none
        run = run.model_copy(update={"dtype": "bfloat16"})
    prepared, tensor = _prepared(run, stages == 1 and gpus is None, told), run.parallel.tensor
    run = prepared.run
    if gpus is not None and (run.parallel.divided or run.parallel.package):
        run.parallel.check(gpus)
    if run.parallel.expert > 1 and gpus is None:
        prepared.warnings.append(
            f"with parallel.expert {run.parallel.expert} devices hold the experts together; what is above is of one device "
            f"that holds all of them, --gpus {run.parallel.expert * tensor * stages} shows what they need and take"
        )
    if tensor > 1:
        prepared.warnings.append(
            f"with parallel.tensor {tensor} devices hold the base model together: time and memory above are of one device that "
            f"holds all of it; {'--gpus shows those of the devices' if stages == 1 else 'none is predicted with stages'}"
        )
    known, budgets = profiler.profile(run, prepared), list[Prediction]()
    one = known
    taken = None if gpus is None or (tensor > 1 and stages > 1) else choose(prepared, gpus, known)
    decides = taken is None or not taken.layout.is_in_parts  # in parts nothing is measured
    if run.max_tokens_per_microbatch == "auto" and choose_device(run.device).type == "cuda" and decides:
        budgets = profiler.predictions(prepared, known)
        prepared.budget = profiler.choose(budgets).budget
    cost, cut = None, ""
    if stages > 1:
        known, cost, cut = import_module("packlora.pipeline.plan").planned(prepared, known)
    used, methods = run.schedule.method, []
    for method in ("auto" if used == "solo" else "solo", used):
        made, shown = figures(prepared, known, method, told, cost)
        methods.append(made)
    layouts = None
    if gpus is not None and taken is not None:
        told(f"planning microbatches on {gpus} devices")
        alone = sum(map(one.seconds, shown)) / methods[-1].part if stages > 1 else methods[-1].seconds
        layouts = figures_of(prepared, one, gpus, taken, alone)
    return PlannedRun(prepared, known, methods, shown, budgets, layouts, cut)


def _prepared(run: Run, alone: bool, told: Told) -> PreparedRun:
    """The run as training would prepare it. alone: on one device, so that `fit` chooses."""
    prepared, device = prepare(run, reader=Reader(told)), choose_device(run.device)
    return settled(prepared, device, prepare) if alone and device.type in FITTED and run.fit != "off" else prepared


def print_plan(run: Run, json_file: Path | None = None, plot: Path | None = None, gpus: int | None = None) -> None:
    """Print a plan, and write it as JSON and as a picture where files are given."""
    if plot is not None and not plot.suffix:
        raise InputError(f"--plot {plot}: the name says the kind of picture; give one that ends in .png, .svg or .pdf")
    with Activity() as told:
        plan = make_plan(run, gpus, told)
    console = table_screen()
    print_all(plan, console)
    if json_file is not None:
        write_named(json_file, lambda file: write_json(file, plan.to_json()))
        console.print(Text(f"wrote {json_file}"), soft_wrap=True)
    if plot is not None:
        cost = plan.known.cost
        title = f"{plan.methods[-1].method}, {cost.devices} stage{'s' * (cost.devices > 1)}, first microbatches"
        draw = import_module("packlora.pipeline.picture").draw
        write_named(plot, lambda file: draw(plan.shown[:DRAWN], cost, title, file))
        console.print(Text(f"wrote {plot}"), soft_wrap=True)


# --- printing ----------------------------------------------------------------------------------------------------------


def print_all(plan: PlannedRun, console: Screen) -> None:
    """Jobs, groups, microbatches, budgets, memory, notes."""
    prepared, run, shape = plan.prepared, plan.prepared.run, plan.prepared.shape
    device = choose_device(run.device)

    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=not console.is_terminal)

    say(
        f"{run.base_model}: {shape.parameters / 1e6:,.1f} M parameters, {plural(shape.layers, 'layer')}, {run.dtype}, "
        f"on {device.type}" + (f", a pipeline of {plan.known.cost.devices} stages" if plan.cut else "")
    )
    if plan.cut:
        say(plan.cut)
    console.print()
    print_jobs(prepared, console)
    console.print()
    other, used = plan.methods
    if len(prepared.jobs) > 1:
        listed = [" + ".join(group) for group in used.groups]
        if len(prepared.jobs) > NAMED:
            listed = [f"{group[0]} and {len(group) - 1} more" for group in used.groups[:NAMED]]
        turns = "; what is left over of one turn shares a microbatch with the next" if len(listed) > 1 else ""
        say(("packed in turns: " if turns else "packed together: ") + ", then ".join(listed) + turns)
    origin = "" if run.max_tokens_per_microbatch != "auto" else ": auto"
    say(f"microbatches of at most {prepared.budget} tokens (max_tokens_per_microbatch{origin}):")
    _print_methods(plan.methods, console)
    say(
        f"{used.method} needs {plural(used.microbatches, 'microbatch', 'es')}, {other.method} {other.microbatches}; stopped: "
        + ", ".join(f"{why} ({n} of {plural(used.stopped.total(), 'window')})" for why, n in used.stopped.most_common())
    )
    if used.part < 1:
        say(f"planned: the first {used.part:.0%} of the run's tokens; counts and times are scaled up from there")
    console.print()
    say(f"times are {_origin(plan.known)}")
    for job in prepared.jobs:
        if guessed := getattr(job.data, "guessed", ""):  # RolloutData
            say(f"job {job.config.name!r}: {guessed}")
    if plan.budgets:
        _print_budgets(plan.budgets, prepared.budget, console)
    parts = estimate.memory_parts(run, prepared, plan.fullest)
    split = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
    total = f"{used.bytes / 2**30:.2f} of {plan.known.room / 2**30:.1f} GiB free"
    if plan.known.room == UNKNOWN:
        total = f"{used.bytes / 2**30:.2f} GiB; this system does not say how much is free"
    if plan.known.origin == "estimated" and not plan.cut:
        say(f"memory on {device.type}, estimated: {total} ({split})")
    else:
        say(
            f"memory on each {device.type}, {plan.known.origin}: {total} (estimate of its parts on one device: {split})"
        )
    if not plan.known.fits(plan.fullest):
        say(f"note: this does not fit; {_remedy(prepared, parts, plan.known.room)}")
    for warning in prepared.warnings:
        say(f"note: {warning}")
    if plan.layouts is not None:
        console.print()
        say(f"on {plural(plan.layouts.devices, 'device')}:")
        print_table(console, HEADINGS, table(plan.layouts))
        for sentence in sentences(plan.layouts, NAMED):
            say(sentence)


def _origin(known: Profile) -> str:
    if known.origin != "estimated":
        return (
            f"those of {sum(point.seconds is not None for point in known.points)} microbatches measured on this device"
        )
    return "estimated from the model's shape and the speed of one matrix product on this machine"


def _print_methods(methods: Sequence[Figures], console: Screen) -> None:
    headings = (
        "method", "microbatches", "full", "underfilled", "no-ops", "bound", "gap", "fill", "ms each", "bubble", "time",
        "tokens/s", "memory GiB",
    )  # fmt: skip
    rows = [
        (
            own.method, str(own.microbatches), str(own.full), str(own.microbatches - own.full), str(own.noops), str(own.bound),
            f"{own.gap:.1%}", f"{own.fill:.0%}", f"{1e3 * own.seconds / own.microbatches:.1f}", f"{own.bubble:.1%}",
            duration(own.seconds) if own.seconds >= 60 else f"{own.seconds:.1f} s", f"{own.tokens_per_second:,.0f}",
            f"{own.bytes / 2**30:.2f}",
        )
        for own in methods
    ]  # fmt: skip
    print_table(console, headings, rows)


def _remedy(prepared: PreparedRun, parts: Mapping[str, int], room: int) -> str:
    """Advice for a run that does not fit: fewer bytes for frozen weights where these alone leave little room."""
    if parts["frozen weights"] < MOSTLY * room:
        return "lower max_tokens_per_microbatch or set gradient_checkpointing: true"
    share = f"the frozen weights alone take {parts['frozen weights'] / 2**30:.1f} GiB; "
    if prepared.form is None:
        return share + "set quantization: nf4 (a quarter of 16 bits) or int8 (half), or take a smaller base model"
    return share + "take a smaller base model, or divide it over several devices (parallel)"


def _print_budgets(budgets: Sequence[Prediction], chosen: int, console: Screen) -> None:
    rows = [
        (
            str(each.budget), str(each.microbatches), f"{each.tokens_per_second:,.0f}", f"{each.bytes / 2**30:.1f}",
            "taken" if each.budget == chosen else "" if each.fits else "does not fit",
        )
        for each in budgets
    ]  # fmt: skip
    print_table(console, ("tokens", "microbatches", "tokens/s", "memory GiB", ""), rows)
