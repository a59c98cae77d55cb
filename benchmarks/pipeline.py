"""`benchmarks pipeline`: four jobs through the stages of a pipeline, without a flush and otherwise, with parts left out
one by one, and on a sharded base.

    torchrun --nproc-per-node 2 -m benchmarks pipeline --out pipeline-h200.json
    torchrun --nproc-per-node 4 -m benchmarks pipeline --out pipeline-h200.json --shape 32B --lengths het
    torchrun --nproc-per-node 2 -m benchmarks pipeline --out short.json --layers 4 --units 1 --quick

A run with another number of processes, another shape or other lengths of samples adds its rows to the file. Each way of a
unit is kept as soon as it is measured, for --resume.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.model import LLAMA_70B, QWEN_32B, TARGETS, TINY
from benchmarks.options import USUAL_SHAPES, Options, Outcome
from benchmarks.peers.eager import eager
from benchmarks.processes import alarm
from benchmarks.replicas import LONGEST, Sizes, short_jobs
from benchmarks.results import text_table
from benchmarks.schedule_cases import LENGTHS as LENGTHS_OF_SETS
from benchmarks.schedule_cases import SETS, draw_lengths
from benchmarks.studies.short_jobs import (
    CLIP,
    DROPOUT,
    JOBS,
    LR,
    ShortJob,
    prepared_on,
    samples_of,
    timed_window,
    trainer_of,
)
from packlora.adapters.attach import attach
from packlora.base.weight_files import WeightFiles
from packlora.config import Run
from packlora.errors import InputError
from packlora.parallel.layout import Layout, planned
from packlora.parallel.mesh import Mesh
from packlora.parallel.pipeline import Links
from packlora.parallel.replicas import Replicas
from packlora.parallel.sharded import load_sharded
from packlora.parallel.stages import Stage, load_stage
from packlora.runtime import profiler
from packlora.runtime.events import Emitter
from packlora.runtime.folder import OutputFolder
from packlora.runtime.job import Job
from packlora.runtime.memory import free_memory, synchronize
from packlora.runtime.microbatch import MicrobatchResult
from packlora.runtime.pipelined import PipelinedTrainer
from packlora.runtime.prepared_job import ModelShape
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.run import deterministic
from packlora.runtime.stage import StageDevice, StagePending
from packlora.runtime.trainer import Trainer
from packlora.runtime.wave import Wave
from packlora.schedule.planner import Planner
from packlora.schedule.simulate import end_times, makespan
from packlora.schedule.types import Microbatch, Placed, Window, WindowReport
from packlora.schedule.verify import check, with_noops
from packlora.tune.head import measure_head

LAYERS_EACH = 4
"""Layers of a stage, about."""
SHAPE, SHORT = USUAL_SHAPES["pipeline"], "short"
"""The usual ones."""
SHAPES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    SHAPE: ("Llama-3.1-70B", LlamaConfig, LlamaForCausalLM, LLAMA_70B),
    "32B": ("Qwen2.5-32B", Qwen2Config, Qwen2ForCausalLM, QWEN_32B),
}
"""Name of the model, and how one of its shape is made."""
LENGTHS = (SHORT, *SETS)
"""Of samples: as in bench replicas, or of the four jobs of a set of bench schedule."""
FLOWING = "no_flush"
EAGER, BASELINE, UNBALANCED, SHARDED = "eager_", "eager_one_job_fixed", "fixed_samples", "fsdp2"
WAYS = (
    FLOWING, "one_job", UNBALANCED, "one_job_fixed", "eager_no_flush", "eager_fixed_samples", BASELINE, SHARDED,
)  # fmt: skip
"""How a unit is trained: in microbatches of all jobs or of one after the other, planned or of a fixed number of samples, with
packlora's operators or (eager_) plain ones; and one job after the other on a base that is shared by rows."""
PROTOCOL = (
    "{layers} over the stages, cut by a layer's time and that of the output layer; "
    "the vocabulary is cut as the layers are; random bfloat16 weights made on the devices; "
    "four LoRA jobs (ranks {ranks}) on all linear layers, dropout {dropout}, AdamW, clipping; lengths of samples: short, as in "
    "bench replicas, of at most {longest} tokens, or evenly spread quantiles of the sets of bench schedule, of at most {cap} "
    "(xsum, cnn_dailymail and wikisum are estimates); about {step_tokens} tokens a job and optimizer step, loss on all tokens. "
    "The training loop's own classes. A unit is {rounds} optimizer steps of every job on the same samples, the "
    "ways in turn, one unit to warm up and {units} counted; planning is not counted. no_flush: as training runs it, "
    "microbatches of at most {budget} tokens planned for the pipeline. one_job: 1F1B of one job after the other, the pipeline"
    " empty at every step of a job. fixed_samples: all jobs without a flush, jobs in turn, as many samples of a job to a "
    "microbatch as fit if all were as long as its longest. one_job_fixed: such microbatches of one job after the other. "
    "eager_: the same with LoRA in plain PyTorch operations, as PEFT's forward has them, A and B cast to bfloat16, each job's "
    "tokens by themselves; the frozen model's attention, norms and loss and the optimizer are as they are. fsdp2: the base "
    "shared by rows over the processes (parallel.shard_base), one job after the other, samples divided. WAY_over_1f1b: the "
    "time of eager_one_job_fixed over a way's. s: until the first stage is done with the last backward. bubble: share of the "
    "stages' time in which they run neither forward nor backward, both timed on the device; busy_s: seconds in which each "
    "stage does. makespan_error: the simulator's end of the order that ran, from these times, beside the measured one, "
    "relative. tokens_per_s_per_gpu_70b, _32b: scaled from these layers to the model's 80, 64. Keys that end in _32b, or in a "
    "set of lengths, are of these; the others are of 70B and short."
)


@dataclass(frozen=True, slots=True)
class Timed(StageDevice):
    """Times its forwards and backwards on the device. spans: start and end of each by kind, in order."""

    spans: dict[str, list[Any]] = field(default_factory=lambda: {"forward": [], "backward": []})

    def forward(
        self, samples: Any, weights: np.ndarray, incoming: torch.Tensor | None = None, below: torch.Tensor | None = None
    ) -> StagePending:
        with self._timed("forward"):
            return StageDevice.forward(self, samples, weights, incoming, below)

    def backward(self, pending: StagePending) -> MicrobatchResult:
        with self._timed("backward"):
            return StageDevice.backward(self, pending)

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        start = self._now()
        yield
        self.spans[kind].append((start, self._now()))

    def _now(self) -> Any:
        if self.base.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def taken(self) -> dict[str, list[float]]:
        """Seconds by kind of what has run since this was asked; the device is waited for."""
        synchronize(self.base.device)
        cuda, out = self.base.device.type == "cuda", {}
        for kind, own in self.spans.items():
            out[kind] = [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in own]
            own.clear()
        return out


class RandomWeights(WeightFiles):
    """Weights in no file: they are made on the device as they are asked for. Writing and reading those of 8 layers of a 70B
    model takes longer than measuring them.

    Args:
        path: folder with the configuration of the model.
    """

    def __init__(self, path: str, skeleton: torch.nn.Module, device: torch.device) -> None:
        self.path, self.device, self.bytes_read = path, device, 0
        self.shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}

    def read(self, key: str, *part: slice) -> torch.Tensor:
        rows = [len(range(size)[own]) for size, own in zip(self.shapes[key], part, strict=False)]
        shape = (*rows, *self.shapes[key][len(rows) :])
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self.device)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device).mul_(0.02)


# --- what is trained -----------------------------------------------------------------------------------------------------


class Piped:
    """Four jobs in training on the stages, and, where that is among the ways, on a sharded base."""

    def __init__(self, options: Options, sizes: Sizes, mesh: Mesh, scratch: Path, ways: Sequence[str]) -> None:
        self.sizes, self.mesh, self.links = sizes, mesh, Links(mesh, Layout(((),), pipeline=mesh.size), options.device)
        layers = options.layers or (mesh.size if sizes.tiny else LAYERS_EACH * mesh.size)
        _, kind, make, whole = SHAPES[options.shape]
        vocabulary = whole["vocab_size"] * layers // whole["num_hidden_layers"] // 64 * 64  # GPUs need multiples
        values = {**whole, "vocab_size": vocabulary} | (TINY if sizes.tiny else {})
        config = kind(**values | {"num_hidden_layers": layers}, tie_word_embeddings=False, use_cache=False)
        self.layers, path = layers, str(scratch / "model")
        alarm(600)
        config.save_pretrained(path)
        with torch.device("meta"):
            skeleton: Any = make(config)
        self.prepared = self._prepared(skeleton, path, options, {"pipeline": mesh.size})
        head = measure_head(self.prepared.run, self.prepared.shape, self.links.device)
        self.prepared.head_in_layers = mesh.gather(head.in_layers)[0]
        free_memory(self.links.device)
        self.cost = profiler.planning_cost(self.prepared.run, self.prepared, mesh.size)
        self.counts = profiler.stage_layers(self.prepared.run, self.prepared, mesh.size)
        longest = {job.config.name: sizes.longest for job in self.prepared.jobs}
        weights = RandomWeights(path, skeleton, self.links.device)
        base = load_stage(self.prepared.run, None, longest, mesh, self.links, self.counts, weights)
        assert isinstance(base.storage, Stage)
        specs = {job.config.name: job.spec for job in self.prepared.jobs}
        attached, adapters = attach(base.model, specs, 0, None, base.storage)
        jobs = [Job(one.config, one.data, [], own) for one, own in zip(self.prepared.jobs, adapters, strict=True)]
        self.device, events = Timed(base, attached, base.storage), Emitter()
        folder_of_run = OutputFolder(scratch, "benchmark", None, events)
        known = profiler.estimate(self.prepared.run, self.prepared, mesh.size)
        self.trainer = PipelinedTrainer(
            self.prepared.run, self.prepared, base, self.device, jobs, known, folder_of_run, events, group=self.links,
            cost=self.cost,
        )  # fmt: skip
        self.sharded: Trainer | None = None
        self.trained = [0, 0]
        """Units on the stages, and on the sharded base: their jobs have steps of their own."""
        if SHARDED in ways:
            alarm(600)
            prepared = self._prepared(skeleton, path, options, {"shard_base": True})
            base = load_sharded(prepared.run, None, longest, weights=weights)
            self.sharded = trainer_of(prepared, base, scratch, Replicas(mesh, Layout((tuple(JOBS),), split=mesh.size)))

    def _prepared(self, skeleton: Any, path: str, options: Options, parallel: dict[str, Any]) -> PreparedRun:
        sizes, short = self.sizes, jobs_of(self.sizes, options.lengths, skeleton.config.vocab_size)
        jobs = [
            {
                "name": job.name, "data": {"path": "random"},
                "adapter": {"r": job.rank, "lora_alpha": 2 * job.rank, "lora_dropout": DROPOUT, "target_modules": TARGETS},
                "train": {
                    "global_batch_size": job.batch, "max_steps": 10**6, "learning_rate": LR, "max_grad_norm": CLIP,
                    "shuffle": False,
                },
            }
            for job in short
        ]  # fmt: skip
        tree = {
            "base_model": path, "output_dir": path, "dtype": "bfloat16", "device": options.device.type, "save_every": 0,
            "max_tokens_per_microbatch": sizes.budget, "parallel": parallel, "jobs": jobs,
        }  # fmt: skip
        whole: Any = SimpleNamespace(model=skeleton)
        run = Run.model_validate(tree)
        return prepared_on(run, whole, sizes.budget, ModelShape.of(skeleton), [job.samples for job in short])

    def windows(self, way: str, number: int) -> list[Window]:
        """What a way runs in unit `number`; the pipeline is empty between the windows."""
        way = way.removeprefix(EAGER)
        orders, first = [job.data.planned for job in self.prepared.jobs], number * self.sizes.rounds
        each = [orders] if way in (FLOWING, UNBALANCED) else [[order] for order in orders]
        if way in (UNBALANCED, "one_job_fixed"):
            return [fixed_samples(own, first, self.sizes.rounds, self.sizes.budget, self.mesh.size) for own in each]
        if way == SHARDED:
            budget = planned(self.sizes.budget, self.mesh.size)
            return [
                Planner(own, budget, method="greedy", window_rounds=self.sizes.rounds).window(first) for own in each
            ]
        return [
            Planner(
                own, self.sizes.budget, stages=self.mesh.size, method="greedy", cost=self.cost,
                window_rounds=self.sizes.rounds,
            ).window(first)
            for own in each
        ]  # fmt: skip

    def predicted(self, ways: Sequence[str]) -> float:
        """Seconds of a unit, estimated from shapes and the speed of this machine; messages cost nothing."""
        return sum(
            makespan(one.microbatches, self.trainer.profile.cost) / (self.mesh.size if way == SHARDED else 1)
            for way in ways
            for one in self.windows(way, 0)
        )

    def unit(self, way: str) -> dict[str, Any]:
        """Figures of a way's next unit, the same on all processes."""
        alarm(600)
        windows = self.windows(way, self.trained[way == SHARDED])
        self.trained[way == SHARDED] += 1
        slots = [one for window in windows for one in window.microbatches]
        counts = {
            "tokens": sum(one.num_tokens for one in slots), "slots": len(slots),
            "noops": sum(one.is_noop for one in slots),
        }  # fmt: skip
        if way == SHARDED:
            assert self.sharded is not None
            self.mesh.barrier()
            seconds = sum(timed_window(self.sharded, window) for window in windows)
            return {"s": max(self.mesh.gather(seconds)), **counts}
        with eager(self.trainer.base.model) if way.startswith(EAGER) else nullcontext():
            return counts | self._through_stages(windows)

    def _through_stages(self, windows: Sequence[Window]) -> dict[str, Any]:
        self.device.taken()
        self.mesh.barrier()
        start = time.perf_counter()
        for window in windows:
            trainer = self.trainer
            trainer._waves = iter([Wave(window, slot, [one]) for slot, one in enumerate(window.microbatches)])
            trainer._ended = False
            while not trainer._ended:
                trainer._run_dry()
        synchronize(self.trainer.base.device)
        seconds = self.mesh.gather(time.perf_counter() - start)[0]
        times = self.mesh.gather(self.device.taken())
        busy = [sum(own["forward"]) + sum(own["backward"]) for own in times]
        return {
            "s": seconds, "bubble": 1 - sum(busy) / (self.mesh.size * seconds), "busy_s": busy,
            "simulated_s": simulated(windows, times),
        }  # fmt: skip


def jobs_of(sizes: Sizes, lengths: str, vocabulary: int) -> list[ShortJob]:
    """Four jobs with samples for one unit, so that all units are alike. lengths: one of LENGTHS."""
    if lengths == SHORT:
        return short_jobs(sizes, vocabulary)
    out = []
    for number, ((name, (_, rank)), kind) in enumerate(zip(JOBS.items(), SETS[lengths], strict=True)):
        drawn = np.sort(draw_lengths(kind, 1000, number)) // (128 if sizes.tiny else 1)
        drawn = np.clip(drawn, 8, sizes.longest)
        batch = max(1, round(sizes.step_tokens / drawn.mean()))
        at = (np.arange(batch * sizes.rounds) + 0.5) / (batch * sizes.rounds)
        found = np.random.default_rng(number).permutation(np.quantile(drawn, at, method="nearest"))
        out.append(ShortJob(name, rank, batch, samples_of(found, vocabulary, number), shuffle=False))
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


# --- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """A way's turn in a unit, which is counted from 1. of: what is trained where, see case_of."""

    number: int
    way: str
    of: str

    @property
    def label(self) -> str:
        return f"{self.of} unit {self.number} {self.way}"


def case_of(processes: int, shape: str, lengths: str) -> str:
    """In words, of which the usual ones are left out."""
    return " ".join([f"x{processes}", *_unusual(shape, lengths)])


def _unusual(shape: str, lengths: str) -> list[str]:
    return [word for word, usual in ((shape, SHAPE), (lengths, SHORT)) if word != usual]


def part_of(row: dict[str, Any]) -> str:
    """A run replaces the rows of its own part."""
    return case_of(row["processes"], *_of(row))


def _of(row: dict[str, Any]) -> tuple[str, str]:
    """Shape and lengths, which older rows do not say."""
    return row.get("shape", SHAPE), row.get("lengths", SHORT)


def turns(units: int, ways: Sequence[str], of: str) -> list[Turn]:
    """Of all units that are counted, each of which begins with another way."""
    shifts = [number % len(ways) for number in range(1, units + 1)]
    return [
        Turn(number, way, of)
        for number, shift in enumerate(shifts, 1)
        for way in [*ways[shift:], *ways[:shift]]
    ]  # fmt: skip


def ways_of(only: Sequence[str]) -> tuple[str, ...]:
    """Raises InputError for a word that is no way."""
    for word in only:
        if word not in WAYS:
            raise InputError(f"only: {word!r} is none of {', '.join(WAYS)}")
    return tuple(way for way in WAYS if way in only) or WAYS


def run(options: Options, mesh: Mesh) -> Outcome:
    """Measure; the first process prints a line for each way of a unit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as deterministic() has it: read at the first product
    sizes, start = Sizes.of(options), time.perf_counter()
    # a window as training plans it; fewer rounds are mostly filling and draining
    sizes = replace(sizes, rounds=max(2 * sizes.rounds, 3), units=options.units or sizes.units)
    if options.lengths != SHORT and not sizes.tiny:
        sizes = replace(sizes, longest=LENGTHS_OF_SETS["cap_tokens"])
    ways, measured, of = ways_of(options.only), list[dict[str, Any]](), (options.shape, options.lengths)
    case = case_of(mesh.size, *of)
    every = turns(sizes.units, ways, case)
    known = options.progress.rows if options.progress is not None else {}
    done = set(mesh.gather(sorted(known))[0])
    left = [turn for turn in every if turn.label not in done]
    with ExitStack() as held:
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory()))
        held.enter_context(deterministic())
        if left:
            piped, told = Piped(options, sizes, mesh, scratch, ways), Told(mesh, start)
            told.begins(piped, ways, len(left))
            for way in ways:
                told.measured(f"{case} to warm up {way}", piped.unit(way)["s"])
        for turn in options.each(left, measured):
            own = piped.unit(turn.way)
            told.measured(turn.label, own["s"])
            row = {"case": turn.label, "number": turn.number, "way": turn.way, "layers": piped.layers}
            measured.append(row | {"figures": own, "failed": {}})
        mesh.barrier()
    known_rows = [known[label] for label in done if label in known]
    rows = [*options.kept, *unit_rows([*known_rows, *measured], mesh.size, ways, *of)]
    layers = sorted({(_of(row)[0], row["layers"]) for row in rows})
    protocol = PROTOCOL.format(
        layers=", ".join(f"{number} layers of {SHAPES[shape][0]}'s shape" for shape, number in layers), dropout=DROPOUT,
        ranks=", ".join(str(rank) for _, rank in JOBS.values()), step_tokens=sizes.step_tokens, rounds=sizes.rounds,
        units=sizes.units, budget=sizes.budget, longest=LONGEST, cap=LENGTHS_OF_SETS["cap_tokens"],
    )  # fmt: skip
    return Outcome(protocol, rows, options.keys(summary(rows)), table(rows))


class Told:
    """What the first process prints while it measures: how long everything takes."""

    def __init__(self, mesh: Mesh, start: float) -> None:
        self.mesh, self.start = mesh, start
        self.left, self.seconds = 0, list[float]()

    def begins(self, piped: Piped, ways: Sequence[str], left: int) -> None:
        """left: turns that are to be measured."""
        self.left = left + len(ways)
        alone = piped.predicted(ways) / len(ways)
        head = profiler.head_in_layers(piped.prepared.run, piped.prepared)
        self._say(
            f"{piped.layers} layers on {self.mesh.size} stages ({', '.join(map(str, piped.counts))}; the output layer and the "
            f"loss take as long as {head:.2f} of them) are ready after {self._passed:.0f} s; {self.left} turns, those to "
            f"warm up included, of about {alone:.1f} s each: {alone * self.left:.0f} s and what compiling takes"
        )

    def measured(self, label: str, seconds: float) -> None:
        self.left -= 1
        self.seconds.append(seconds)
        rest = statistics.median(self.seconds) * self.left
        self._say(f"{label}: {seconds:.3f} s; {self._passed:.0f} s so far, about {rest:.0f} s left")

    @property
    def _passed(self) -> float:
        return time.perf_counter() - self.start

    def _say(self, text: str) -> None:
        if self.mesh.is_first:
            print(text, flush=True)


def unit_rows(
    measured: Sequence[dict[str, Any]], processes: int, ways: Sequence[str], shape: str = SHAPE, lengths: str = SHORT
) -> list[dict[str, Any]]:
    """A row a unit, with the figures of each way."""
    out = []
    for number in sorted({row["number"] for row in measured}):
        own = {row["way"]: row for row in measured if row["number"] == number}
        layers = {row["layers"] for row in own.values()}
        row = {"case": f"{case_of(processes, shape, lengths)} unit {number}", "processes": processes, "shape": shape}
        row |= {"lengths": lengths, "layers": max(layers), "failed": {}}
        out.append(row | {way: own[way]["figures"] for way in ways if way in own})
    return out


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted: medians over units; of makespan_error the largest of all."""
    out: dict[str, Any] = {}
    errors = []
    for shape, lengths in sorted({_of(row) for row in rows}, key=lambda of: of != (SHAPE, SHORT)):
        end = "".join(f"_{word.lower()}" for word in _unusual(shape, lengths))
        rate = "_".join(["tokens_per_s_per_gpu", shape.lower(), *_unusual(SHAPE, lengths)])
        for size in sorted({row["processes"] for row in rows if _of(row) == (shape, lengths)}):
            own = [row for row in rows if _of(row) == (shape, lengths) and row["processes"] == size]
            found, error = _figures(own, size)
            errors += [] if error is None else [error]
            out |= {f"{key}{end}": value for key, value in found.items()}
            scale = 1 / size / SHAPES[shape][3]["num_hidden_layers"]
            out[rate] = out[f"{rate}_{size}gpu"] = _median([
                row[FLOWING]["tokens"] / row[FLOWING]["s"] * row["layers"] * scale for row in own if FLOWING in row
            ])  # fmt: skip
    out["makespan_error"] = max(errors, default=None)
    return out


def _figures(own: list[dict[str, Any]], size: int) -> tuple[dict[str, Any], float | None]:
    """Of the rows of one case; and how far the simulated time is from the measured one."""
    flowing = [row[FLOWING] for row in own if FLOWING in row]
    out = {
        f"speedup_over_1f1b_{size}gpu": _speedup(own, FLOWING, BASELINE),
        f"speedup_over_unbalanced_{size}gpu": _speedup(own, FLOWING, UNBALANCED),
        f"speedup_over_one_job_{size}gpu": _speedup(own, FLOWING, "one_job"),
        f"speedup_over_fsdp2_{size}gpu": _speedup(own, FLOWING, SHARDED),
        f"bubble_{len(JOBS)}jobs_{size}gpu": _median([way["bubble"] for way in flowing]),
        f"bubble_1job_{size}gpu": _median([row["one_job"]["bubble"] for row in own if "one_job" in row]),
    }
    for way in WAYS:
        if way not in (FLOWING, BASELINE):
            out[f"{way}_over_1f1b_{size}gpu"] = _speedup(own, way, BASELINE)
    return out, _median([abs(way["simulated_s"] / way["s"] - 1) for way in flowing])


def _speedup(rows: list[dict[str, Any]], way: str, over: str) -> float | None:
    return _median([row[over]["s"] / row[way]["s"] for row in rows if way in row and over in row])


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        [
            row["case"], way, f"{row[way]['s']:.3f}", str(row[way]["slots"]), str(row[way]["noops"]),
            f"{row[way]['bubble']:.1%}" if "bubble" in row[way] else "",
            f"{row[way]['simulated_s']:.3f}" if "bubble" in row[way] else "", f"{row[way]['tokens'] / row[way]['s']:,.0f}",
        ]
        for row in rows for way in WAYS if way in row
    ]  # fmt: skip
    return text_table(["case", "way", "s", "slots", "no-ops", "bubble", "simulated s", "tokens/s"], lines)
