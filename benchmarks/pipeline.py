"""`pipeline`: four jobs of short samples on the stages of a pipeline, by the training loop's own classes.

    torchrun --nproc-per-node 4 -m benchmarks pipeline --out pipeline-h200.json
    torchrun --nproc-per-node 4 -m benchmarks pipeline --only 32B,het --out pipeline-h200.json
    torchrun --nproc-per-node 4 -m benchmarks pipeline --only 70B-whole --out pipeline-h200.json

A unit is some optimizer steps of every job on the same samples; each unit is a case, whose row grows by a way each time. Each
way warms up when it is first asked for. A run with another number of processes adds its rows to the file.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.peers.eager import eager
from benchmarks.planning import LENGTHS as LENGTHS_OF_SETS
from benchmarks.planning import SETS
from benchmarks.processes import alarm
from benchmarks.replicas import HOW, UNITS, Sizes, short_jobs
from benchmarks.shapes import SHAPES, SHORT, config_of, spread
from benchmarks.training import JOBS, prepared_on, run_of, run_window, timed_window, trainer_of
from packlora.adapters.attach import attach
from packlora.base.weight_files import WeightFiles
from packlora.engine.memory import free_memory, synchronize
from packlora.parallel.layout import Layout, planned
from packlora.parallel.replicas import Replicas
from packlora.parallel.sharded import load_sharded
from packlora.pipeline.estimate import planning_cost, stage_layers, staged
from packlora.pipeline.flow import StageFlow
from packlora.pipeline.links import Links
from packlora.pipeline.passes import StageDevice
from packlora.pipeline.stages import Stage, load_stage
from packlora.pipeline.timeline import end_times
from packlora.runtime import estimate
from packlora.runtime.events import Emitter
from packlora.runtime.folder import OutputFolder
from packlora.runtime.job import Job
from packlora.runtime.prepared_job import ModelShape
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.run import deterministic
from packlora.runtime.trainer import Trainer
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch, Placed, Window, WindowReport
from packlora.schedule.verify import check, with_noops
from packlora.tune.head import measure_head

FLOWING, BASELINE, UNBALANCED, SHARDED = "no_flush", "eager_one_job_fixed", "fixed_samples", "fsdp2"
WAYS = [FLOWING, BASELINE, UNBALANCED, "one_job", SHARDED]
TOGETHER = (FLOWING, UNBALANCED, "eager_no_flush", "eager_fixed_samples")
"""Ways that have no flush; what fills and drains the pipeline is a part of it, so their units are longer."""
BREAKDOWN = ["one_job_fixed", "eager_no_flush", "eager_fixed_samples"]
"""Ways to train a unit: in microbatches of all jobs or of one after the other, planned or of a fixed number of samples, with
packlora's operators or (eager_) plain ones; and one job after the other on a base that is sharded by rows. In the order of what
is asked first, for runs that end early."""
EPOCH, EPOCHS, QUICK_EPOCHS = 4, 4, 2
"""Optimizer steps of a job in an epoch, which are a unit of the ways with a flush; epochs in a unit of the ways without."""
WHOLE_WAYS = (FLOWING, BASELINE, UNBALANCED)
"""Ways of whole models, whose units take minutes."""


class RandomWeights(WeightFiles):
    """Weights in no file: they are made on the device as they are asked for. Writing and reading those of 8 layers of a 70B
    model takes longer than measuring them."""

    def __init__(self, path: str, skeleton: torch.nn.Module, device: torch.device) -> None:
        self.path, self.device, self.bytes_read = path, device, 0
        self.shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
        self.layers = sum(name.endswith("down_proj.weight") for name in self.shapes)

    def read(self, key: str, *part: slice) -> torch.Tensor:
        rows = [len(range(size)[own]) for size, own in zip(self.shapes[key], part, strict=False)]
        shape = (*rows, *self.shapes[key][len(rows) :])
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self.device)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device).mul_(spread(key, self.layers))


class UntimedFlow(StageFlow):
    """The flow of a pipeline whose clock the benchmark reads."""

    def begin(self) -> None:
        pass

    def ran(self, jobs: Mapping[str, Job]) -> None:
        return None


class Piped:
    """Four jobs in training on the stages, and, once that is asked for, on a sharded base."""

    def __init__(self, options: Options, shape: str, lengths: str, deep: bool) -> None:
        self.began, self.mesh, self.options, mesh = time.monotonic(), options.mesh, options, options.mesh
        sizes = replace(Sizes.of(options), rounds=1 if options.tiny else EPOCH)
        if lengths != "short" and not options.tiny:
            sizes = replace(sizes, longest=LENGTHS_OF_SETS["cap_tokens"])
        self.sizes, self.epochs = sizes, 3 if options.tiny else QUICK_EPOCHS if options.quick or deep else EPOCHS
        self.links = Links(mesh, Layout(((),), pipeline=mesh.size), options.device)  # type: ignore[arg-type]
        whole, some = SHAPES[SHORT[shape]], (1 if options.tiny else 4) * mesh.size
        self.layers = options.layers or (whole["num_hidden_layers"] if deep and not options.tiny else some)
        vocabulary = whole["vocab_size"] * self.layers // whole["num_hidden_layers"] // 64 * 64  # GPUs need multiples
        cut = {} if options.tiny else {"vocab_size": vocabulary}
        config = config_of(SHORT[shape], options.tiny, self.layers, **cut)
        self.folder = tempfile.TemporaryDirectory()
        config.save_pretrained(self.folder.name)
        with torch.device("meta"):
            self.skeleton: Any = AutoModelForCausalLM.from_config(config)
        self.jobs = short_jobs(sizes, config.vocab_size, lengths)
        self.longest = {job.name: sizes.longest for job in self.jobs}
        self.weights = RandomWeights(self.folder.name, self.skeleton, self.links.device)
        self.trainer = self._staged()
        self.sharded: Trainer | None = None
        self.trained = [0, 0]
        """Optimizer steps of each job on the stages, and on the sharded base: their jobs have steps of their own."""
        self.warm: set[str] = set()

    def say(self, what: str) -> None:
        """Print what is done, and when."""
        alarm(600)
        if self.mesh.is_first:
            print(f"{time.monotonic() - self.began:7.1f} s: {what}", flush=True)

    def _staged(self) -> Trainer:
        """The loop that trains on the stages."""
        mesh, path = self.mesh, Path(self.folder.name)
        self.say(f"{self.layers} layers for {mesh.size} stages, {sum(len(job.samples) for job in self.jobs)} samples")
        prepared = self.prepared = self._prepared({"pipeline": mesh.size})
        self.say("the output layer is timed")
        head = measure_head(prepared.run, prepared.shape, self.links.device)
        prepared.head_in_layers = mesh.gather(head.in_layers)[0]
        free_memory(self.links.device)
        run = prepared.run
        self.cost = planning_cost(run, prepared, mesh.size)
        counts = stage_layers(run, prepared, mesh.size)
        self.say(f"stages of {counts} layers are made and proved")
        base = load_stage(run, None, self.longest, mesh, self.links, counts, self.weights)
        assert isinstance(base.storage, Stage)
        specs = {job.config.name: job.spec for job in prepared.jobs}
        attached, adapters = attach(base.model, specs, 0, None, base.storage)
        made = [Job(one.config, one.data, [], own) for one, own in zip(prepared.jobs, adapters, strict=True)]
        self.device, events = StageDevice(base, attached, base.storage), Emitter()
        known = staged(estimate.estimate(run, prepared), run, prepared, mesh.size)
        flow = UntimedFlow(run, prepared.shape, self.links, self.device.clock, known.cost, self.cost)
        self.say("stages are ready")
        return Trainer(
            run, prepared, base, self.device, made, known, OutputFolder(path, "benchmark", None, events), events,
            group=self.links, flow=flow,
        )  # fmt: skip

    def _on_shards(self) -> Trainer:
        """The loop that trains on the base that is sharded by rows; made once."""
        if self.sharded is None:
            self.say("the sharded base is made and proved")
            prepared = self._prepared({"shard_base": True})
            base = load_sharded(prepared.run, None, self.longest, weights=self.weights)
            group = Replicas(self.mesh, Layout((tuple(JOBS),), split=self.mesh.size))  # type: ignore[arg-type]
            self.sharded = trainer_of(prepared, base, Path(self.folder.name), group)
        return self.sharded

    def _prepared(self, parallel: Row) -> PreparedRun:
        path, budget, skeleton = Path(self.folder.name), self.sizes.budget, self.skeleton
        trees = [job.tree(10**6) for job in self.jobs]
        run = run_of(trees, self.options.device, budget, path, base_model=str(path), parallel=parallel)
        samples = [job.samples for job in self.jobs]
        return prepared_on(run, SimpleNamespace(model=skeleton), budget, ModelShape.of(skeleton), samples)

    def windows(self, way: str, first: int, rounds: int) -> list[Window]:
        """The windows of a way's optimizer steps from `first` on; the pipeline is empty between them."""
        plain, size, budget = way.removeprefix("eager_"), self.mesh.size, self.sizes.budget
        orders = [job.data.planned for job in self.prepared.jobs]
        each = [orders] if way in TOGETHER else [[order] for order in orders]
        if plain in (UNBALANCED, "one_job_fixed"):
            return [fixed_samples(own, first, rounds, budget, size) for own in each]
        settings: Row = {"method": "greedy", "window_rounds": first + rounds}  # whose last ones are these
        if way == SHARDED:
            return [Planner(own, planned(budget, size), **settings).window(first) for own in each]
        return [Planner(own, budget, lag=size, cost=self.cost, **settings).window(first) for own in each]

    def unit_of(self, way: str) -> Row:
        """Figures of a way's next unit, the same on all processes."""
        rounds = self.sizes.rounds * (self.epochs if way in TOGETHER else 1)
        if way not in self.warm:
            self.warm.add(way)
            self.run(way, 2 if self.options.tiny else rounds)
        return self.run(way, rounds)

    def run(self, way: str, rounds: int) -> Row:
        """So many optimizer steps of every job."""
        trainer = self._on_shards() if way == SHARDED else self.trainer
        self.say(f"{way}: {rounds} steps of each job are planned")
        windows = self.windows(way, self.trained[way == SHARDED], rounds)
        self.trained[way == SHARDED] += rounds
        slots = [one for window in windows for one in window.microbatches]
        counts = {
            "tokens": sum(one.num_tokens for one in slots),
            "slots": len(slots),
            "noops": sum(one.is_noop for one in slots),
        }
        self.mesh.barrier()
        self.say(f"{way}: {counts['tokens']} tokens in {len(slots) - counts['noops']} microbatches are trained")
        if way == SHARDED:
            seconds = sum(timed_window(trainer, window) for window in windows)
            row = {"s": max(self.mesh.gather(seconds)), **counts}
        else:
            with eager(trainer.base.model) if way.startswith("eager_") else nullcontext(), deterministic():
                row = counts | self._through_stages(windows)
        self.say(f"{way}: {row['s']:.2f} s, {row['tokens'] / row['s']:.0f} tokens/s")
        return row

    def _through_stages(self, windows: Sequence[Window]) -> Row:
        self.device.clock.begin()
        self.mesh.barrier()
        start = time.perf_counter()
        for window in windows:
            run_window(self.trainer, window)
        synchronize(self.trainer.base.device)
        seconds = self.mesh.gather(time.perf_counter() - start)[0]
        times = self.mesh.gather(self._taken())
        busy = [sum(own["forward"]) + sum(own["backward"]) for own in times]
        return {
            "s": seconds, "bubble": 1 - sum(busy) / (self.mesh.size * seconds), "busy_s": busy,
            "simulated_s": simulated(windows, times),
        }  # fmt: skip

    def _taken(self) -> dict[str, list[float]]:
        """Seconds of forwards and of backwards since the clock began."""
        out: dict[str, list[float]] = {"forward": [], "backward": []}
        for kind, _, begin, end in self.device.clock.taken():
            out[kind].append(end - begin)
        return out


def fixed_samples(orders: Sequence[Any], first: int, rounds: int, budget: int, stages: int) -> Window:
    """Global batches of the jobs in turn, each in microbatches of equally many samples in their order."""
    out: list[Microbatch] = []
    for number in range(first, first + rounds):
        for order in orders:
            batch = order.batch(number)
            each = max(1, budget // int(max(order.lengths)))
            parts = [batch[at : at + each] for at in range(0, len(batch), each)]
            for part in parts:
                placed = tuple(Placed(order.name, number, int(sample), int(length)) for sample, length in part)
                out.append(Microbatch(placed, ((order.name, number),) if part is parts[-1] else ()))
    out = with_noops(out, stages)
    check(out, stages, capacity=budget)
    noops = sum(one.is_noop for one in out)
    return Window(first, rounds, tuple(out), WindowReport("fixed", 0, len(out) - noops, noops, "", 0.0))


def simulated(windows: Sequence[Window], times: Sequence[dict[str, list[float]]]) -> float:
    """The end of the order that ran, from the times of forwards and backwards by stage."""
    out, at = 0.0, 0
    for window in windows:
        by_stage: list[list[tuple[float, float]]] = [[] for _ in times]
        for microbatch in window.microbatches:
            for own, stage in zip(times, by_stage, strict=True):
                stage.append((0.0, 0.0) if microbatch.is_noop else (own["forward"][at], own["backward"][at]))
            at += not microbatch.is_noop
        out += max(ends[-1] for ends in end_times(by_stage)[1])
    return out


Kind = tuple[str, str, bool]
"""Shape, lengths, and whether all layers of the model take part."""
USUAL: Kind = ("70B", "short", False)


def _kind(row: Row) -> Kind:
    return row.get("shape", "70B"), row.get("lengths", "short"), row.get("deep", False)


def _unusual(shape: str, lengths: str, deep: bool) -> list[str]:
    """Words of a figure's key, of which the usual ones are left out."""
    words = [word for word, usual in ((shape, "70B"), (lengths, "short")) if word != usual]
    return words + ["whole"] * deep


def pipeline_cases(options: Options) -> list[Case]:
    """The usual shape and lengths, 70B and short; others, and whole models, whose labels name all, take part where `--only` has
    words."""
    size = options.mesh.size
    kinds: list[Kind] = [(shape, lengths, False) for shape in ("70B", "32B") for lengths in ("short", *SETS)]
    kinds += [(shape, "short", True) for shape in ("70B", "32B")]
    return [
        case(
            " ".join([f"x{size}", *words, f"unit {number}"]), processes=size, shape=kind[0], lengths=kind[1], deep=kind[2],
            unit=number,
        )
        for kind in (kinds if options.chosen else kinds[:1])
        for words in [[] if kind == USUAL else [kind[0] + "-whole" * kind[2], kind[1]]]
        for number in range(1, 2 if options.quick else 1 + UNITS)
    ]  # fmt: skip


def measure_pipeline(one: Case, names: list[str], options: Options) -> Iterator[Row]:
    """Gives the row of a unit again after each way; another one is first each time."""
    kind = _kind(dict(one.values))
    made: Piped = options.shared(kind, lambda: Piped(options, *kind))
    row: Row = {"layers": made.layers, "failed": {}}
    names = [name for name in names if name in WHOLE_WAYS] if one.deep else names
    turn = (one.unit - 1) % len(names)
    order = names[turn:] + names[:turn]
    for number, way in enumerate(order, 1):
        row = row | {way: made.unit_of(way)}
        yield row | ({"unfinished": order[number:]} if order[number:] else {})


def pipeline_summary(rows: list[Row]) -> Row:
    """Medians over units; of makespan_error the largest of all. Keys of other shapes and lengths end in their words."""
    out: Row = {}
    errors: list[float] = []
    of = {(_kind(row), row["processes"]) for row in rows}
    for kind, size in sorted(of, key=lambda one: (one[0] != USUAL, one)):
        own = [row for row in rows if (_kind(row), row["processes"]) == (kind, size)]

        def over(way: str, base: str, own: list[Row] = own) -> float | None:
            return _median([rate_of(row[way]) / rate_of(row[base]) for row in own if way in row and base in row])

        end = "".join(f"_{word.lower()}" for word in _unusual(*kind))
        out |= {
            f"speedup_over_1f1b_{size}gpu{end}": over(FLOWING, BASELINE),
            f"speedup_over_unbalanced_{size}gpu{end}": over(FLOWING, UNBALANCED),
            f"speedup_over_one_job_{size}gpu{end}": over(FLOWING, "one_job"),
            f"speedup_over_fsdp2_{size}gpu{end}": over(FLOWING, SHARDED),
            f"bubble_4jobs_{size}gpu{end}": _median([row[FLOWING]["bubble"] for row in own if FLOWING in row]),
            f"bubble_1job_{size}gpu{end}": _median([row["one_job"]["bubble"] for row in own if "one_job" in row]),
            **{
                f"{way}_over_1f1b_{size}gpu{end}": over(way, BASELINE)
                for way in WAYS + BREAKDOWN
                if way not in (FLOWING, BASELINE)
            },
        }  # fmt: skip
        flowing = [row[FLOWING] for row in own if FLOWING in row]
        errors += [statistics.median(abs(one["simulated_s"] / one["s"] - 1) for one in flowing)] if flowing else []
        whole = SHAPES[SHORT[kind[0]]]["num_hidden_layers"]
        rate = _median([rate_of(row[FLOWING]) * row["layers"] / whole / size for row in own if FLOWING in row])
        key = "_".join(["tokens_per_s_per_gpu", kind[0].lower(), *_unusual("70B", *kind[1:])])
        out[key] = out[f"{key}_{size}gpu"] = rate
    return out | {"makespan_error": max(errors, default=None)}


def rate_of(way: Row) -> float:
    """Tokens a second."""
    return float(way["tokens"] / way["s"])


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def plot_rates(rows: list[Row], out: Path) -> None:
    """Tokens a second of each way, medians over units, with the share of the time in which stages wait; a panel for each number
    of stages, shape and lengths."""
    from matplotlib.figure import Figure

    of = sorted({(row["processes"], *_kind(row)) for row in rows})
    figure = Figure(figsize=(6.4, 3.2 * len(of)))
    for panel, kind in zip(figure.subplots(len(of), squeeze=False)[:, 0], of, strict=True):
        own = [row for row in rows if (row["processes"], *_kind(row)) == kind]
        ways = [way for way in reversed(WAYS + BREAKDOWN) if any(way in row for row in own)]
        rates = [_median([rate_of(row[way]) for row in own if way in row]) for way in ways]
        bubbles = [_median([row[way]["bubble"] for row in own if way in row and "bubble" in row[way]]) for way in ways]
        bars = panel.barh(ways, rates, color=["#0b6e99" if way == FLOWING else "#8a8a8a" for way in ways])
        told = ["" if bubble is None else f"bubble {bubble:.1%}" for bubble in bubbles]
        panel.bar_label(bars, told, fontsize=7, padding=2)
        panel.set(
            xlabel="tokens per second", title=f"{kind[0]} stages, {own[0]['layers']} layers of {kind[1]}, {kind[2]}"
        )
        panel.margins(x=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out.with_name(f"{out.stem}-rates.svg"), bbox_inches="tight")


PIPELINE = Benchmark(
    pipeline_cases, measure_pipeline, pipeline_summary,
    "4 layers a stage of the model's shape, cut by a layer's time and that of the output layer; the vocabulary is "
    f"cut as the layers are; whole: all layers and the whole vocabulary, "
    f"three ways, units of {QUICK_EPOCHS} epochs; random bfloat16 weights made on the devices; {HOW}. Lengths of samples: "
    "short, as in the benchmark replicas, or evenly spread quantiles of the sets of the benchmark schedule, of at most 4096 "
    f"(xsum, cnn_dailymail and wikisum are estimates). A unit is {EPOCHS} epochs of {EPOCH} optimizer steps of every job where "
    "the pipeline is not empty between steps, one epoch where it is; all epochs have the same samples. The ways in turn, "
    f"a unit to warm up and {UNITS} units counted. no_flush: as training runs it, "
    "microbatches planned for the pipeline. one_job: 1F1B of one job after the other, the pipeline empty at every "
    "step of a job. fixed_samples: all jobs without a flush, jobs in turn, as many samples of a job to a microbatch "
    "as fit if all were as long as its longest. one_job_fixed: such microbatches of one job after the other. "
    "eager_: the same with LoRA in plain PyTorch operations, as PEFT's forward has them, A and B cast to bfloat16, "
    "each job's tokens by themselves; eager_no_flush, eager_fixed_samples and one_job_fixed take part where they are named. "
    "fsdp2: the base sharded by rows over the processes (parallel.shard_base), one "
    "job after the other, samples divided. WAY_over_1f1b: a way's tokens a second over those of "
    "eager_one_job_fixed; all speedups are of rates. s: until "
    "the first stage is done with the last backward. bubble: share of the stages' time in which they run neither "
    "forward nor backward, both timed on the device; busy_s: seconds in which each stage does. makespan_error: the "
    "simulator's end of the order that ran, from these times, beside the measured one, relative. "
    "tokens_per_s_per_gpu_70b, _32b: scaled from these layers to the model's 80, 64. Keys that end in _32b, or in a "
    "set of lengths, are of these; the others are of 70B and short.",
    WAYS, BREAKDOWN, by_case=True, where="processes", plot=plot_rates,
)  # fmt: skip
