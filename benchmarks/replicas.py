"""`replicas` and `pipeline`: four jobs of short samples on several processes, by the training loop's own classes.

    torchrun --nproc-per-node 2 -m benchmarks replicas --out replicas-h200.json
    torchrun --nproc-per-node 4 -m benchmarks pipeline --only 32B,het --out pipeline-h200.json

A unit is some optimizer steps of every job on the same samples, so that all units are alike; each unit is a case. The ways of
a benchmark run in turn within a unit. A run with another number of processes adds its rows to the file.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.peers.eager import eager
from benchmarks.planning import LENGTHS as LENGTHS_OF_SETS
from benchmarks.planning import SETS, draw_lengths
from benchmarks.processes import alarm
from benchmarks.shapes import SHAPES, SHORT, build, config_of, shared_copy
from benchmarks.training import (
    DROPOUT,
    JOBS,
    Lengths,
    ShortJob,
    make_samples,
    prepared_on,
    prepared_run,
    run_of,
    run_window,
    samples_of,
    timed_window,
    trainer_of,
)
from packlora.adapters.attach import attach
from packlora.base.model import Base, load_base
from packlora.base.weight_files import WeightFiles
from packlora.engine.memory import free_memory, synchronize
from packlora.parallel.alone import ALONE, Alone, OneProcess
from packlora.parallel.layout import Layout, place, planned
from packlora.parallel.replicas import Replicas
from packlora.parallel.sharded import load_sharded
from packlora.pipeline.estimate import planning_cost, stage_layers, staged
from packlora.pipeline.flow import StageFlow
from packlora.pipeline.links import Links
from packlora.pipeline.passes import StageDevice
from packlora.pipeline.stages import Stage, load_stage
from packlora.pipeline.timeline import end_times
from packlora.runtime import estimate
from packlora.runtime.choose import Work
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
from packlora.schedule.worker import WINDOW
from packlora.tune.head import measure_head

WARMUP, UNITS = 2, 3
"""Units that are not counted: in the first sizes of microbatches come for the first time, in the second the last of them are
recorded as CUDA graphs; and counted units."""
SAMPLES, LENGTH = 4, 2048
"""Microbatch of a process in part fsdp2."""
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as deterministic() has it: read at the first product


@dataclass(frozen=True, slots=True)
class Sizes:
    """budget: tokens of a microbatch. longest: tokens of a sample. step_tokens: of a job's optimizer step. rounds: optimizer
    steps of each job in a unit. shrink: what lengths are divided by."""

    budget: int = 8192
    longest: int = 2048
    step_tokens: int = 8192
    rounds: int = 8
    shrink: int = 1

    @staticmethod
    def of(options: Options) -> Sizes:
        return Sizes(128, 32, 64, 1, 20) if options.tiny else Sizes(rounds=4 if options.quick else 8)


class Even(Lengths):
    """Quantiles of the same distribution in random order: jobs whose mean lengths are what they are expected to be."""

    def draw(self, number: int, longest: int, seed: int) -> np.ndarray:
        normal = statistics.NormalDist(self.mu, self.sigma)
        lengths = [math.exp(normal.inv_cdf((at + 0.5) / number)) for at in range(number)]
        return np.random.default_rng(seed).permutation(np.clip(np.round(lengths), 8, longest).astype(int))


def short_jobs(sizes: Sizes, vocabulary: int, lengths: str = "short") -> list[ShortJob]:
    """Four jobs with about as many tokens in a step of each, and samples for one unit.

    Args:
        lengths: short, as JOBS have them, or one of planning.SETS.
    """
    out = []
    for number, (name, (fit, rank)) in enumerate(JOBS.items()):
        if lengths == "short":
            even = Even(fit.mu - math.log(sizes.shrink), fit.sigma, fit.source)
            batch = max(1, round(sizes.step_tokens / even.draw(1000, sizes.longest, 0).mean()))
            samples = make_samples(even, batch * sizes.rounds, sizes.longest, vocabulary, number)
        else:
            drawn = np.sort(draw_lengths(SETS[lengths][number], 1000, number)) // sizes.shrink
            drawn = np.clip(drawn, 8, sizes.longest)
            batch = max(1, round(sizes.step_tokens / drawn.mean()))
            at = (np.arange(batch * sizes.rounds) + 0.5) / (batch * sizes.rounds)
            found = np.random.default_rng(number).permutation(np.quantile(drawn, at, method="nearest"))
            samples = samples_of(found, vocabulary, number)
        out.append(ShortJob(name, rank, batch, samples, shuffle=False))
    return out


def in_turn(ways: Mapping[str, Callable[[], Row]], number: int) -> Row:
    """A unit of each way, another one first each time."""
    order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
    found = {name: ways[name]() for name in order}
    return {**{name: found[name] for name in ways}, "failed": {}}


# --- replicas ----------------------------------------------------------------------------------------------------------


class Way:
    """Jobs in training on some processes, a unit each time.

    Args:
        trainer: of this process's jobs; None: it has none.
        group: the processes that train the same jobs.
    """

    def __init__(self, trainer: Trainer | None, rounds: int, mesh: OneProcess, group: Alone = ALONE) -> None:
        self.trainer, self.rounds, self.mesh, self.group, self.done = trainer, rounds, mesh, group, 0
        if trainer is not None:
            orders = [job.data.planned for job in trainer.jobs]
            capacity = planned(trainer.budget.tokens, group.size)
            self.planner = Planner(orders, capacity, method="greedy", window_rounds=rounds)

    def unit(self) -> Row:
        """The next unit: seconds and tokens by process; tokens of shared microbatches are counted once, by the first."""
        alarm()
        self.mesh.barrier()
        seconds, tokens = self.train()
        found = self.mesh.gather([seconds, tokens if self.group.rank == 0 else 0])
        return {"s": [own[0] for own in found], "tokens": [own[1] for own in found]}

    def train(self) -> tuple[float, int]:
        """A unit on this process alone, or on those of its group together: seconds and tokens."""
        number, self.done = self.done, self.done + 1
        if self.trainer is None:
            return 0.0, 0
        before = self.trainer.tally.tokens
        window = None
        if self.group.rank == 0:
            window = WINDOW.dump_python(self.planner.window(number * self.rounds), mode="json")
        seconds = timed_window(self.trainer, WINDOW.validate_python(self.group.told(window)))
        return seconds, self.trainer.tally.tokens - before

    def digests(self) -> dict[str, str]:
        """The bits of this process's adapters, hashed, by job."""
        jobs = [] if self.trainer is None else self.trainer.jobs
        return {job.name: hashlib.sha256(job.adapter.flat.cpu().numpy().tobytes()).hexdigest() for job in jobs}


class Divided:
    """Part jobs: the same jobs by one process, divided over the processes, and with every microbatch divided, over the same
    frozen weights."""

    def __init__(self, options: Options) -> None:
        self.sizes, self.mesh, self.device = Sizes.of(options), options.mesh, options.device
        self.folder = tempfile.TemporaryDirectory()
        config = config_of("Qwen3-0.6B", options.tiny, options.layers)
        self.layers, self.frozen = config.num_hidden_layers, build(config, self.device)
        self.jobs = short_jobs(self.sizes, config.vocab_size)
        names = [job.name for job in self.jobs]
        self.groups = place(Work(self.prepared()[0]).jobs(), self.mesh.size)
        group = Replicas(self.mesh, Layout((tuple(JOBS),), split=self.mesh.size))  # type: ignore[arg-type]
        self.ways = {
            "one": self.way(names if self.mesh.is_first else []),
            "jobs": self.way(self.groups[self.mesh.rank]),
            "samples": self.way(names, group),
        }
        for number in range(WARMUP):
            in_turn({name: way.unit for name, way in self.ways.items()}, number)
        self.bits_equal = self.compare_bits()

    def prepared(self) -> tuple[PreparedRun, Base]:
        steps = self.sizes.rounds * (WARMUP + UNITS)
        model = shared_copy(self.frozen)
        return prepared_run(model, self.device, self.sizes.budget, steps, Path(self.folder.name), self.jobs)

    def way(self, names: Sequence[str], group: Alone = ALONE) -> Way:
        """The way in which this process, or those of a group together, train these jobs."""
        if not names:
            return Way(None, self.sizes.rounds, self.mesh)
        alarm()
        prepared, base = self.prepared()
        own = replace(prepared, jobs=[job for job in prepared.jobs if job.config.name in names])
        return Way(trainer_of(own, base, Path(self.folder.name), group), self.sizes.rounds, self.mesh, group)

    def compare_bits(self) -> dict[str, bool]:
        """Tell for each job whether the first process gives its adapter the same bits, training the jobs of its group."""
        everywhere = {name: bits for own in self.mesh.gather(self.ways["jobs"].digests()) for name, bits in own.items()}
        alone: dict[str, str] = {}
        for names in self.groups:
            alarm()
            found: dict[str, str] | None = None
            if self.mesh.is_first:
                again = self.way(names)
                for _ in range(WARMUP):
                    again.train()
                found = again.digests()
                del again
                free_memory(self.device)
            alone |= self.mesh.gather(found)[0]
        return {name: alone[name] == everywhere[name] for name in alone}

    def unit(self, number: int) -> Row:
        row = in_turn({name: way.unit for name, way in self.ways.items()}, number)
        return {"layers": self.layers, **row, "bits_equal": self.bits_equal}


class Sharded:
    """Part fsdp2: one job by a replica on each process, and on a base that is sharded over them."""

    def __init__(self, options: Options) -> None:
        self.sizes, mesh = Sizes.of(options), options.mesh
        self.folder = tempfile.TemporaryDirectory()
        length, self.layers = 16 if options.tiny else LENGTH, options.layers or (2 if options.tiny else 8)
        # the vocabulary is cut as the layers are, so that layers have the share of the weights that they have
        vocabulary = {} if options.tiny else {"vocab_size": 128256 * self.layers // 32}
        config = config_of("Llama-3.1-8B", options.tiny, self.layers, **vocabulary)
        folder = Path(self.folder.name)
        alarm()
        if mesh.is_first:
            build(config, options.device).save_pretrained(folder / "model")
            free_memory(options.device)
        path, capacity = mesh.gather(str(folder / "model"))[0], SAMPLES * length * 9 // 8
        count = SAMPLES * mesh.size * self.sizes.rounds
        job = ShortJob("job", 16, SAMPLES * mesh.size, samples_of(np.full(count, length), config.vocab_size, 0), False)
        group = Replicas(mesh, Layout((tuple(JOBS),), split=mesh.size))  # type: ignore[arg-type]
        self.ways, shape = {}, None
        loads: dict[str, Callable[..., Base]] = {"replica": load_base, "sharded": load_sharded}
        for name, load in loads.items():
            alarm()
            keys = {"base_model": path, "parallel": {"shard_base": name == "sharded"}}
            run = run_of([job.tree(10**6)], options.device, capacity, folder, **keys)
            base = load(run, None, {"job": length})
            shape = shape or ModelShape.of(base.model)
            prepared = prepared_on(run, base, capacity, shape, [job.samples])
            self.ways[name] = Way(trainer_of(prepared, base, folder, group), self.sizes.rounds, mesh, group)
        mesh.barrier()
        for number in range(WARMUP):
            in_turn({name: way.unit for name, way in self.ways.items()}, number)

    def unit(self, number: int) -> Row:
        return {"layers": self.layers, **in_turn({name: way.unit for name, way in self.ways.items()}, number)}


def replicas_cases(options: Options) -> list[Case]:
    size = options.mesh.size
    return [
        case(f"{part} x{size} unit {number}", part=part, processes=size, unit=number)
        for part in ("jobs", "fsdp2")
        for number in range(WARMUP, WARMUP + (1 if options.quick else UNITS))
    ]


def measure_replicas(one: Case, names: list[str], options: Options) -> Row:
    kinds: dict[str, Any] = {"jobs": Divided, "fsdp2": Sharded}
    row: Row = options.shared(one.part, lambda: kinds[one.part](options)).unit(one.unit)
    return row


def replicas_summary(rows: list[Row]) -> Row:
    """Efficiency: tokens per second over those of one process and the number of processes."""
    out: Row = {}
    for size in sorted({row["processes"] for row in rows}):
        jobs = [row for row in rows if row["processes"] == size and row["part"] == "jobs"]
        sharded = [row for row in rows if row["processes"] == size and "sharded" in row]
        if jobs:
            one, tokens = (sum(row["one"][key][0] for row in jobs) for key in ("s", "tokens"))
            seconds = [sum(row["jobs"]["s"][rank] for row in jobs) for rank in range(size)]
            own = [sum(row["jobs"]["tokens"][rank] for row in jobs) for rank in range(size)]
            samples = sum(max(row["samples"]["s"]) for row in jobs)
            assert sum(own) == tokens == sum(row["samples"]["tokens"][0] for row in jobs), "the ways trained on others"
            out |= {
                f"efficiency_jobs_{size}": one / max(seconds) / size, f"efficiency_samples_{size}": one / samples / size,
                f"busy_efficiency_jobs_{size}": sum(map(lambda a, s: a / s, own, seconds)) / (tokens / one) / size,
                f"one_of_{size}_tokens_per_s": tokens / one, f"jobs_{size}_tokens_per_s": tokens / max(seconds),
                f"samples_{size}_tokens_per_s": tokens / samples,
            }  # fmt: skip
        if sharded:
            ratios = [max(row["sharded"]["s"]) / max(row["replica"]["s"]) for row in sharded]
            out[f"fsdp2_over_replica_{size}"] = statistics.median(ratios)
    if ratios := [value for key, value in out.items() if key.startswith("fsdp2")]:
        out["fsdp2_over_replica"] = max(ratios)
    if bits := [equal for row in rows for equal in row.get("bits_equal", {}).values()]:
        out["bits_equal_jobs"] = all(bits)
    return out


_JOBS = (
    f"four LoRA jobs (ranks {', '.join(str(rank) for _, rank in JOBS.values())}) on all linear layers, dropout "
    f"{DROPOUT}, AdamW, clipping, about 8192 tokens a job and optimizer step, loss on all tokens. The training "
    "loop's own classes, microbatches of at most 8192 tokens a process; planning is not counted"
)
REPLICAS = Benchmark(
    replicas_cases, measure_replicas, replicas_summary,
    f"Part jobs: Qwen3-0.6B's shape, random bfloat16 weights; {_JOBS}, greedy. Lengths of samples: evenly spread "
    "quantiles of log-normal fits, at most 2048 tokens. one: the first process trains all jobs while the others "
    "wait; jobs: each job whole on one process, placed by predicted time; samples: every microbatch divided over "
    "all processes, gradients added up once a step. A unit is 8 optimizer steps of every job on the same samples, "
    f"the three ways in turn, {WARMUP} units to warm up (sizes of microbatches are recorded as CUDA graphs) and "
    f"{UNITS} counted. Efficiency is tokens/s over that of one and the number of processes: for jobs until the last "
    "process is done with all units, since no process waits for another in training (busy: the processes' own rates "
    "added up); for samples of each unit's slowest process. bits_equal: after the units to warm up the adapters by "
    "jobs beside those of the first process training the same jobs together. Part fsdp2: 8 layers of Llama-3.1-8B's "
    f"shape, the vocabulary cut as the layers are; one LoRA job, r 16, {SAMPLES} samples of {LENGTH} tokens a "
    "process and step, AdamW; replica: the model on each process; sharded: parallel.shard_base. Units in turn, the "
    "slowest process's time, ratio: median over units.",
    ["one"], by_case=True, where="processes",
)  # fmt: skip


# --- a pipeline ----------------------------------------------------------------------------------------------------------

FLOWING, BASELINE, UNBALANCED, SHARDED = "no_flush", "eager_one_job_fixed", "fixed_samples", "fsdp2"
WAYS = [FLOWING, "one_job", UNBALANCED, BASELINE, SHARDED]
BREAKDOWN = ["one_job_fixed", "eager_no_flush", "eager_fixed_samples"]
"""Ways to train a unit: in microbatches of all jobs or of one after the other, planned or of a fixed number of samples, with
packlora's operators or (eager_) plain ones; and one job after the other on a base that is sharded by rows."""


class RandomWeights(WeightFiles):
    """Weights in no file: they are made on the device as they are asked for. Writing and reading those of 8 layers of a 70B
    model takes longer than measuring them."""

    def __init__(self, path: str, skeleton: torch.nn.Module, device: torch.device) -> None:
        self.path, self.device, self.bytes_read = path, device, 0
        self.shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}

    def read(self, key: str, *part: slice) -> torch.Tensor:
        rows = [len(range(size)[own]) for size, own in zip(self.shapes[key], part, strict=False)]
        shape = (*rows, *self.shapes[key][len(rows) :])
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self.device)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device).mul_(0.02)


class UntimedFlow(StageFlow):
    """The flow of a pipeline whose clock the benchmark reads."""

    def begin(self) -> None:
        pass

    def ran(self, jobs: Mapping[str, Job]) -> None:
        return None


class Piped:
    """Four jobs in training on the stages, and, where that is among the ways, on a sharded base."""

    def __init__(self, options: Options, shape: str, lengths: str, ways: Sequence[str]) -> None:
        sizes = Sizes.of(options)  # a window as training plans it; fewer rounds are mostly filling and draining
        sizes = replace(sizes, rounds=3 if options.tiny else 4 if options.quick else 2 * sizes.rounds)
        if lengths != "short" and not options.tiny:
            sizes = replace(sizes, longest=LENGTHS_OF_SETS["cap_tokens"])
        self.sizes, self.mesh, self.names, mesh = sizes, options.mesh, ways, options.mesh
        self.links = Links(mesh, Layout(((),), pipeline=mesh.size), options.device)  # type: ignore[arg-type]
        whole, self.layers = SHAPES[SHORT[shape]], options.layers or (1 if options.tiny else 4) * mesh.size
        vocabulary = whole["vocab_size"] * self.layers // whole["num_hidden_layers"] // 64 * 64  # GPUs need multiples
        cut = {} if options.tiny else {"vocab_size": vocabulary}
        config = config_of(SHORT[shape], options.tiny, self.layers, **cut)
        self.folder = tempfile.TemporaryDirectory()
        path = self.folder.name
        alarm(600)
        config.save_pretrained(path)
        with torch.device("meta"):
            skeleton: Any = AutoModelForCausalLM.from_config(config)
        jobs = short_jobs(sizes, config.vocab_size, lengths)
        self.prepared = self._prepared(skeleton, jobs, options, {"pipeline": mesh.size})
        head = measure_head(self.prepared.run, self.prepared.shape, self.links.device)
        self.prepared.head_in_layers = mesh.gather(head.in_layers)[0]
        free_memory(self.links.device)
        self.cost = planning_cost(self.prepared.run, self.prepared, mesh.size)
        counts = stage_layers(self.prepared.run, self.prepared, mesh.size)
        longest = {job.name: sizes.longest for job in jobs}
        weights = RandomWeights(path, skeleton, self.links.device)
        base = load_stage(self.prepared.run, None, longest, mesh, self.links, counts, weights)
        assert isinstance(base.storage, Stage)
        specs = {job.config.name: job.spec for job in self.prepared.jobs}
        attached, adapters = attach(base.model, specs, 0, None, base.storage)
        made = [Job(one.config, one.data, [], own) for one, own in zip(self.prepared.jobs, adapters, strict=True)]
        self.device, events = StageDevice(base, attached, base.storage), Emitter()
        run, prepared = self.prepared.run, self.prepared
        known = staged(estimate.estimate(run, prepared), run, prepared, mesh.size)
        flow = UntimedFlow(run, prepared.shape, self.links, self.device.clock, known.cost, self.cost)
        self.trainer = Trainer(
            self.prepared.run, self.prepared, base, self.device, made, known,
            OutputFolder(Path(path), "benchmark", None, events), events, group=self.links, flow=flow,
        )  # fmt: skip
        self.sharded: Trainer | None = None
        self.trained = [0, 0]
        """Units on the stages, and on the sharded base: their jobs have steps of their own."""
        if SHARDED in ways:
            alarm(600)
            prepared = self._prepared(skeleton, jobs, options, {"shard_base": True})
            base = load_sharded(prepared.run, None, longest, weights=weights)
            group = Replicas(mesh, Layout((tuple(JOBS),), split=mesh.size))  # type: ignore[arg-type]
            self.sharded = trainer_of(prepared, base, Path(path), group)
        print(f"{self.layers} layers on {mesh.size} stages: {counts}", flush=True) if mesh.is_first else None
        for way in ways:
            self.unit_of(way)

    def _prepared(self, skeleton: Any, jobs: Sequence[ShortJob], options: Options, parallel: Row) -> PreparedRun:
        path, budget = Path(self.folder.name), self.sizes.budget
        run = run_of(
            [job.tree(10**6) for job in jobs], options.device, budget, path, base_model=str(path), parallel=parallel
        )
        whole = SimpleNamespace(model=skeleton)
        return prepared_on(run, whole, budget, ModelShape.of(skeleton), [job.samples for job in jobs])

    def windows(self, way: str, number: int) -> list[Window]:
        """The windows of a way in unit `number`; the pipeline is empty between them."""
        way, size, sizes = way.removeprefix("eager_"), self.mesh.size, self.sizes
        orders, first = [job.data.planned for job in self.prepared.jobs], number * sizes.rounds
        each = [orders] if way in (FLOWING, UNBALANCED) else [[order] for order in orders]
        if way in (UNBALANCED, "one_job_fixed"):
            return [fixed_samples(own, first, sizes.rounds, sizes.budget, size) for own in each]
        settings: Row = {"method": "greedy", "window_rounds": sizes.rounds}
        if way == SHARDED:
            return [Planner(own, planned(sizes.budget, size), **settings).window(first) for own in each]
        return [
            Planner(own, sizes.budget, lag=size, cost=self.cost, **settings).window(first) for own in each
        ]  # fmt: skip

    def unit_of(self, way: str) -> Row:
        """Figures of a way's next unit, the same on all processes."""
        alarm(600)
        windows = self.windows(way, self.trained[way == SHARDED])
        self.trained[way == SHARDED] += 1
        slots = [one for window in windows for one in window.microbatches]
        counts = {
            "tokens": sum(one.num_tokens for one in slots),
            "slots": len(slots),
            "noops": sum(one.is_noop for one in slots),
        }
        self.mesh.barrier()
        if way == SHARDED:
            assert self.sharded is not None
            seconds = sum(timed_window(self.sharded, window) for window in windows)
            return {"s": max(self.mesh.gather(seconds)), **counts}
        with eager(self.trainer.base.model) if way.startswith("eager_") else nullcontext(), deterministic():
            return counts | self._through_stages(windows)

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


def _unusual(shape: str, lengths: str) -> list[str]:
    """Words of a figure's key, of which the usual ones are left out."""
    return [word for word, usual in ((shape, "70B"), (lengths, "short")) if word != usual]


def pipeline_cases(options: Options) -> list[Case]:
    """The usual shape and lengths, 70B and short; others, whose labels name both, take part where `--only` has words."""
    size = options.mesh.size
    pairs = [(shape, lengths) for shape in ("70B", "32B") for lengths in ("short", *SETS)]
    return [
        case(
            f"x{size}{'' if pair == pairs[0] else f' {pair[0]} {pair[1]}'} unit {number}", processes=size, shape=pair[0],
            lengths=pair[1], unit=number,
        )
        for pair in (pairs if options.chosen else pairs[:1])
        for number in range(1, 2 if options.quick else 1 + UNITS)
    ]  # fmt: skip


def measure_pipeline(one: Case, names: list[str], options: Options) -> Row:
    made: Piped = options.shared(
        (one.shape, one.lengths, *names), lambda: Piped(options, one.shape, one.lengths, names)
    )
    return {"layers": made.layers} | in_turn({way: lambda way=way: made.unit_of(way) for way in names}, one.unit)  # type: ignore[misc]


def pipeline_summary(rows: list[Row]) -> Row:
    """Medians over units; of makespan_error the largest of all. Keys of other shapes and lengths end in their words."""
    out: Row = {}
    errors: list[float] = []
    of = {(row.get("shape", "70B"), row.get("lengths", "short"), row["processes"]) for row in rows}
    for shape, lengths, size in sorted(of, key=lambda one: (one[:2] != ("70B", "short"), one)):
        own = [
            row
            for row in rows
            if (row.get("shape", "70B"), row.get("lengths", "short"), row["processes"]) == (shape, lengths, size)
        ]

        def over(way: str, base: str, own: list[Row] = own) -> float | None:
            return _median([row[base]["s"] / row[way]["s"] for row in own if way in row and base in row])

        end = "".join(f"_{word.lower()}" for word in _unusual(shape, lengths))
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
        whole = SHAPES[SHORT[shape]]["num_hidden_layers"]
        rate = _median(
            [row[FLOWING]["tokens"] / row[FLOWING]["s"] * row["layers"] / whole / size for row in own if FLOWING in row]
        )
        key = "_".join(["tokens_per_s_per_gpu", shape.lower(), *_unusual("70B", lengths)])
        out[key] = out[f"{key}_{size}gpu"] = rate
    return out | {"makespan_error": max(errors, default=None)}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


PIPELINE = Benchmark(
    pipeline_cases, measure_pipeline, pipeline_summary,
    "4 layers a stage of the model's shape, cut by a layer's time and that of the output layer; the vocabulary is "
    f"cut as the layers are; random bfloat16 weights made on the devices; {_JOBS}. Lengths of samples: short, as in "
    "the benchmark replicas, or evenly spread quantiles of the sets of the benchmark schedule, of at most 4096 "
    "(xsum, cnn_dailymail and wikisum are estimates). A unit is 16 optimizer steps of every job on the same "
    f"samples, the ways in turn, one unit to warm up and {UNITS} counted. no_flush: as training runs it, "
    "microbatches planned for the pipeline. one_job: 1F1B of one job after the other, the pipeline empty at every "
    "step of a job. fixed_samples: all jobs without a flush, jobs in turn, as many samples of a job to a microbatch "
    "as fit if all were as long as its longest. one_job_fixed: such microbatches of one job after the other. "
    "eager_: the same with LoRA in plain PyTorch operations, as PEFT's forward has them, A and B cast to bfloat16, "
    "each job's tokens by themselves; eager_no_flush, eager_fixed_samples and one_job_fixed take part where they are named. "
    "fsdp2: the base sharded by rows over the processes (parallel.shard_base), one "
    "job after the other, samples divided. WAY_over_1f1b: the time of eager_one_job_fixed over a way's. s: until "
    "the first stage is done with the last backward. bubble: share of the stages' time in which they run neither "
    "forward nor backward, both timed on the device; busy_s: seconds in which each stage does. makespan_error: the "
    "simulator's end of the order that ran, from these times, beside the measured one, relative. "
    "tokens_per_s_per_gpu_70b, _32b: scaled from these layers to the model's 80, 64. Keys that end in _32b, or in a "
    "set of lengths, are of these; the others are of 70B and short.",
    WAYS, BREAKDOWN, by_case=True, where="processes",
)  # fmt: skip
