"""`replicas`: four jobs of short samples on several processes, by the training loop's own classes.

    torchrun --nproc-per-node 2 -m benchmarks replicas --out replicas-h200.json

A unit is some optimizer steps of every job on the same samples, so that all units are alike; each unit is a case. The ways of
a benchmark run in turn within a unit. A run with another number of processes adds its rows to the file.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.planning import SETS, draw_lengths
from benchmarks.processes import alarm
from benchmarks.shapes import build, config_of, shared_copy
from benchmarks.training import (
    DROPOUT,
    JOBS,
    Lengths,
    ShortJob,
    make_samples,
    prepared_on,
    prepared_run,
    run_of,
    samples_of,
    timed_window,
    trainer_of,
)
from packlora.base.model import Base, load_base
from packlora.engine.memory import free_memory
from packlora.parallel.alone import ALONE, Alone, OneProcess
from packlora.parallel.layout import Layout, planned
from packlora.parallel.layouts import place
from packlora.parallel.replicas import Replicas
from packlora.parallel.sharded import load_sharded
from packlora.runtime.choose import Work
from packlora.runtime.prepared_job import ModelShape
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.trainer import Trainer
from packlora.runtime.windows import WINDOW
from packlora.schedule.planner import Planner

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


HOW = (
    f"four LoRA jobs (ranks {', '.join(str(rank) for _, rank in JOBS.values())}) on all linear layers, dropout "
    f"{DROPOUT}, AdamW, clipping, about 8192 tokens a job and optimizer step, loss on all tokens. The training "
    "loop's own classes, microbatches of at most 8192 tokens a process; planning is not counted"
)
REPLICAS = Benchmark(
    replicas_cases, measure_replicas, replicas_summary,
    f"Part jobs: Qwen3-0.6B's shape, random bfloat16 weights; {HOW}, greedy. Lengths of samples: evenly spread "
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
