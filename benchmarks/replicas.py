"""`python -m benchmarks replicas`: four jobs of short samples on several replicas, and a sharded base beside replicas.

    torchrun --nproc-per-node 2 -m benchmarks replicas --out replicas-h200.json

Part jobs: the same jobs by one process alone, by jobs divided over the processes and by samples divided, in turn in one run.
Part fsdp2: one job by a replica on each process and by a base that is sharded over them. A run with another number of
processes adds its rows to the file.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.model import LLAMA_8B, TARGETS, TINY, build, shared_copy
from benchmarks.options import Options, Outcome
from benchmarks.processes import alarm
from benchmarks.results import text_table
from benchmarks.studies.short_jobs import (
    CLIP,
    DROPOUT,
    JOBS,
    LR,
    SHAPES,
    Lengths,
    ShortJob,
    make_samples,
    prepared_on,
    prepared_run,
    timed_window,
    trainer_of,
)
from packlora.base.model import Base, load_base
from packlora.config import Run
from packlora.data.encode import Sample
from packlora.errors import InputError
from packlora.parallel.agreement import together
from packlora.parallel.layout import Layout, place, planned
from packlora.parallel.mesh import Mesh
from packlora.parallel.replicas import ALONE, Alone, Replicas
from packlora.parallel.sharded import load_sharded
from packlora.runtime.memory import free_memory
from packlora.runtime.prepared_job import ModelShape
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.trainer import Trainer
from packlora.runtime.work import Work
from packlora.schedule.planner import Planner
from packlora.schedule.wire import window_from_json, window_to_json

FSDP2_LAYERS = 8
SAMPLES, LENGTH = 4, 2048
"""Of a process's microbatch in part fsdp2."""
LONGEST = 2048
"""Tokens of a sample of the jobs, at most."""
WARMUP = 2
"""Units: in the first one sizes of microbatches come for the first time, in the second one the last of them are recorded."""
PROTOCOL = (
    "Part jobs: {shape}'s shape ({layers} layers), random bfloat16 weights; four LoRA jobs (ranks {ranks}) on all linear "
    "layers, dropout {dropout}, AdamW, clipping; lengths of samples as in short-jobs, evenly spread quantiles of at most "
    "{longest} tokens, as many samples per optimizer step as make about {step_tokens} tokens for each job, loss on all "
    "tokens. The training loop's own classes, greedy microbatches of at most {budget} tokens a process. one: the first "
    "process trains all jobs while the others wait; jobs: each job whole on one process, placed by predicted time; samples: "
    "every microbatch divided over all processes, gradients added up once a step. A unit is {rounds} optimizer steps of every "
    "job on the same samples, the three ways in turn from a common start, {warmup} units to warm up (sizes of microbatches "
    "are recorded as CUDA graphs) and {units} counted, planning not counted. "
    "Efficiency is tokens/s over that of one and the number of processes: for jobs until the last process is done with all "
    "units, since no process waits for another in training (busy: the processes' own rates added up); for samples of each "
    "unit's slowest process. bits_equal: after those to warm up the adapters by jobs beside those of the first process "
    "training the same jobs together. Part fsdp2: {fsdp2_layers} layers of Llama-3.1-8B's shape, the vocabulary cut as the "
    "layers are; one LoRA job, r 16, {samples} samples of {length} tokens a process and step, AdamW; replica: the model on "
    "each process; sharded: parallel.shard_base. Units of {rounds} steps in turn, the slowest process's time, ratio: median "
    "over units."
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """rounds: optimizer steps of each job in a unit; units: counted ones; step_tokens: of a job's optimizer step; length: of
    samples in part fsdp2."""

    budget: int
    longest: int
    mu_shift: float
    step_tokens: int
    rounds: int
    units: int
    length: int
    tiny: bool = False

    @staticmethod
    def of(options: Options) -> Sizes:
        if options.tiny:
            return Sizes(128, 32, -3.0, 64, 1, 1, 16, True)
        rounds, units = (4, 2) if options.quick else (8, 3)
        return Sizes(8192, LONGEST, 0.0, 8192, rounds, units, LENGTH)

    @property
    def steps(self) -> int:
        """With the units to warm up."""
        return self.rounds * (self.units + WARMUP)


# --- ways to train -----------------------------------------------------------------------------------------------------


class Way:
    """Jobs in training on some processes, in units.

    Args:
        trainer: of this process's jobs; None: it has none.
        group: the processes that train the same jobs.
    """

    def __init__(self, trainer: Trainer | None, rounds: int, mesh: Mesh, group: Alone = ALONE) -> None:
        self.trainer, self.rounds, self.mesh, self.group = trainer, rounds, mesh, group
        if trainer is not None:
            capacity = planned(trainer.budget.tokens, group.size)
            orders = [job.data.planned for job in trainer.jobs]
            self.planner = Planner(orders, capacity, method="greedy", window_rounds=rounds)

    def unit(self, number: int) -> dict[str, Any]:
        """Train on unit `number`: seconds, tokens and microbatches by process; the tokens of shared microbatches are counted
        once, by the first."""
        alarm()
        self.mesh.barrier()
        seconds, tokens, microbatches = self.train(number)
        found = self.mesh.gather([seconds, tokens if self.group.rank == 0 else 0, microbatches])
        seconds_of, tokens_of, microbatches_of = map(list, zip(*found, strict=True))
        return {"s": seconds_of, "tokens": tokens_of, "microbatches": microbatches_of}

    def train(self, number: int) -> tuple[float, int, int]:
        """On this process alone, or on those of its group together: seconds, tokens and microbatches."""
        if self.trainer is None:
            return 0.0, 0, 0
        runner = self.trainer.runner
        before = runner.tokens, runner.logged
        window = window_to_json(self.planner.window(number * self.rounds)) if self.group.rank == 0 else None
        seconds = timed_window(self.trainer, window_from_json(self.group.told(window)))
        return seconds, runner.tokens - before[0], runner.logged - before[1]

    def digests(self) -> dict[str, str]:
        """By job of this process, of its adapter's bits."""
        jobs = [] if self.trainer is None else self.trainer.jobs
        return {job.name: hashlib.sha256(job.adapter.flat.cpu().numpy().tobytes()).hexdigest() for job in jobs}


class Even(Lengths):
    """Quantiles of the same distribution in random order: jobs whose mean lengths are what they are expected to be."""

    def draw(self, number: int, longest: int, seed: int) -> np.ndarray:
        normal = statistics.NormalDist(self.mu, self.sigma)
        lengths = [math.exp(normal.inv_cdf((at + 0.5) / number)) for at in range(number)]
        return np.random.default_rng(seed).permutation(np.clip(np.round(lengths), 8, longest).astype(int))


def short_jobs(sizes: Sizes, vocabulary: int) -> list[ShortJob]:
    """JOBS of short_jobs, with about as many tokens in a step of each, and samples for one unit: all units are alike."""
    out = []
    for number, (name, (lengths, rank)) in enumerate(JOBS.items()):
        even = Even(lengths.mu + sizes.mu_shift, lengths.sigma, lengths.source)
        batch = max(1, round(sizes.step_tokens / even.draw(1000, sizes.longest, 0).mean()))
        samples = make_samples(even, batch * sizes.rounds, sizes.longest, vocabulary, number)
        out.append(ShortJob(name, rank, batch, samples, shuffle=False))
    return out


# --- part jobs ---------------------------------------------------------------------------------------------------------


class Jobs:
    """The short jobs on replicas of one model, whose frozen weights all ways on a process share."""

    def __init__(self, options: Options, sizes: Sizes, mesh: Mesh, group: Replicas, scratch: Path) -> None:
        self.sizes, self.mesh, self.group, self.scratch, self.device = sizes, mesh, group, scratch, options.device
        _, kind, make, values = SHAPES[options.shape]
        values = {**values, **TINY} if sizes.tiny else values
        if options.layers:
            values = values | {"num_hidden_layers": options.layers}
        self.config = kind(**values, attn_implementation="sdpa", use_cache=False)
        self.frozen = build(self.config, self.device, make)
        self.jobs = short_jobs(sizes, self.config.vocab_size)
        self.groups = place(Work(self.prepared()[0]).jobs(), mesh.size)

    def prepared(self) -> tuple[PreparedRun, Base]:
        """All jobs on a model of their own, over the frozen weights."""
        model, sizes = shared_copy(self.frozen), self.sizes
        return prepared_run(model, self.device, sizes.budget, sizes.steps, self.scratch, self.jobs)

    def way(self, names: Sequence[str], group: Alone = ALONE) -> Way:
        """In which this process, or those of a group together, train these jobs."""
        if not names:
            return Way(None, self.sizes.rounds, self.mesh)
        alarm()
        prepared, base = self.prepared()
        own = replace(prepared, jobs=[job for job in prepared.jobs if job.config.name in names])
        return Way(trainer_of(own, base, self.scratch, group), self.sizes.rounds, self.mesh, group)

    def rows(self) -> list[dict[str, Any]]:
        names = [job.name for job in self.jobs]
        ways = {
            "one": self.way(names if self.mesh.is_first else []),
            "jobs": self.way(self.groups[self.mesh.rank]),
            "samples": self.way(names, self.group),
        }
        for number in range(WARMUP):
            in_turn(ways, number)
        bits, rows = self.bits_equal(ways["jobs"]), []
        for number in range(WARMUP, WARMUP + self.sizes.units):
            row = {"case": f"jobs x{self.mesh.size} unit {number}", "part": "jobs", "processes": self.mesh.size}
            rows.append(row | {"layers": self.config.num_hidden_layers} | in_turn(ways, number) | {"bits_equal": bits})
            told(self.mesh, rows[-1])
        return rows

    def bits_equal(self, way: Way) -> dict[str, bool]:
        """By job, after the units to warm up: whether the first process gives its adapter the same bits, training the jobs of
        its group."""
        everywhere: dict[str, str] = {}
        for own in self.mesh.gather(way.digests()):
            everywhere |= own
        alone: dict[str, str] = {}
        for names in self.groups:
            alarm()
            alone |= self.mesh.gather(self.trained_here(names) if self.mesh.is_first else None)[0]
        return {name: alone[name] == everywhere[name] for name in alone}

    def trained_here(self, names: Sequence[str]) -> dict[str, str]:
        """Digests of these jobs, trained by this process for the units to warm up."""
        again = self.way(names)
        for number in range(WARMUP):
            again.train(number)
        found = again.digests()
        del again
        free_memory(self.device)
        return found


def in_turn(ways: dict[str, Way], number: int) -> dict[str, Any]:
    """A unit of each way, another one first each time."""
    order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
    found = {name: ways[name].unit(number) for name in order}
    return {"unit": number, **{name: found[name] for name in ways}, "failed": {}}


def told(mesh: Mesh, row: dict[str, Any]) -> None:
    """Print a row, on the first process."""
    if mesh.is_first:
        seconds = {
            name: [round(s, 3) for s in way["s"]] for name, way in row.items() if isinstance(way, dict) and way.get("s")
        }
        print(f"{row['case']}: {seconds}", flush=True)


# --- part fsdp2 --------------------------------------------------------------------------------------------------------


def fsdp2_config(options: Options) -> Any:
    """8B's shape with fewer layers; the vocabulary is cut too, so that layers have the share of the weights that they have."""
    layers = options.layers or FSDP2_LAYERS
    vocabulary = LLAMA_8B["vocab_size"] * layers // LLAMA_8B["num_hidden_layers"]
    values = {**LLAMA_8B, "vocab_size": vocabulary, "num_hidden_layers": layers} | (TINY if options.tiny else {})
    return LlamaConfig(**values, tie_word_embeddings=False, use_cache=False)


def fsdp2_rows(options: Options, sizes: Sizes, mesh: Mesh, group: Replicas, scratch: Path) -> list[dict[str, Any]]:
    alarm()
    config, folder = fsdp2_config(options), scratch / "model"
    if mesh.is_first:
        build(config, options.device, LlamaForCausalLM).save_pretrained(folder)  # type: ignore[operator]
        free_memory(options.device)
    (path, *_) = mesh.gather(str(folder))
    loads: dict[str, Callable[..., Base]] = {"replica": load_base, "sharded": load_sharded}
    ways, shape = {}, None
    for name, load in loads.items():
        alarm()
        run = fsdp2_run(path, options, sizes, mesh.size, scratch, name == "sharded")
        base = together(mesh, partial(load, run, None, {"job": sizes.length}))
        shape = shape or ModelShape.of(base.model)
        prepared = prepared_on(run, base, _capacity(sizes), shape, [fsdp2_samples(sizes, mesh.size, config.vocab_size)])
        ways[name] = Way(trainer_of(prepared, base, scratch, group), sizes.rounds, mesh, group)
    rows = []
    for number in range(WARMUP):
        in_turn(ways, number)
    for number in range(WARMUP, WARMUP + sizes.units):
        rows.append(fsdp2_row(options, mesh, f"unit {number}") | in_turn(ways, number))
        told(mesh, rows[-1])
    return rows


def fsdp2_row(options: Options, mesh: Mesh, what: str) -> dict[str, Any]:
    layers = fsdp2_config(options).num_hidden_layers
    return {"case": f"fsdp2 x{mesh.size} {what}", "part": "fsdp2", "processes": mesh.size, "layers": layers}


def _capacity(sizes: Sizes) -> int:
    """Room for SAMPLES samples where microbatches are planned less than full."""
    return SAMPLES * sizes.length * 9 // 8


def fsdp2_run(path: str, options: Options, sizes: Sizes, size: int, scratch: Path, sharded: bool) -> Run:
    adapter = {"r": 16, "lora_alpha": 32, "lora_dropout": DROPOUT, "target_modules": TARGETS}
    train = {
        "global_batch_size": SAMPLES * size, "max_steps": sizes.steps + 1, "learning_rate": LR, "max_grad_norm": CLIP,
    }  # fmt: skip
    tree = {
        "base_model": path, "output_dir": str(scratch), "dtype": "bfloat16", "device": options.device.type,
        "save_every": 0, "max_tokens_per_microbatch": _capacity(sizes), "parallel": {"shard_base": sharded},
        "jobs": [{"name": "job", "data": {"path": "random"}, "adapter": adapter, "train": train}],
    }  # fmt: skip
    return Run.model_validate(tree)


def fsdp2_samples(sizes: Sizes, size: int, vocabulary: int) -> list[Sample]:
    generator = np.random.default_rng(0)
    is_label = np.arange(sizes.length) > 0
    return [
        Sample(generator.integers(0, vocabulary, sizes.length).astype(np.int32), is_label)
        for _ in range(SAMPLES * size * sizes.rounds)
    ]


# --- results -----------------------------------------------------------------------------------------------------------


def run(options: Options, mesh: Mesh) -> Outcome:
    """Measure; the first process prints a line per unit."""
    if mesh.size > len(JOBS):
        raise InputError(f"bench replicas divides {len(JOBS)} jobs; start at most as many processes, not {mesh.size}")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as deterministic() has it: read at the first product
    sizes, rows = Sizes.of(options), list(options.kept)
    with ExitStack() as held:
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory()))
        group = Replicas(mesh, Layout((tuple(JOBS),), split=mesh.size))
        if options.wants("jobs"):
            rows += Jobs(options, sizes, mesh, group, scratch).rows()
            free_memory(options.device)
        if options.wants("fsdp2"):
            try:
                rows += fsdp2_rows(options, sizes, mesh, group, scratch)
            except InputError as error:  # found by all of them together: the other part's figures are kept
                rows.append(fsdp2_row(options, mesh, "load") | {"failed": {"fsdp2": str(error)}})
        mesh.barrier()  # nobody reads the first one's folder any more
    layers = {part: next((row["layers"] for row in rows if row["part"] == part), "no") for part in ("jobs", "fsdp2")}
    protocol = PROTOCOL.format(
        shape=SHAPES[options.shape][0], layers=layers["jobs"], ranks=", ".join(str(rank) for _, rank in JOBS.values()),
        dropout=DROPOUT, longest=sizes.longest, step_tokens=sizes.step_tokens, budget=sizes.budget, rounds=sizes.rounds,
        units=sizes.units, warmup=WARMUP, fsdp2_layers=layers["fsdp2"], samples=SAMPLES, length=sizes.length,
    )  # fmt: skip
    return Outcome(protocol, rows, options.keys(summary(rows)), table(rows))


def part_of(row: dict[str, Any]) -> str:
    return f"{row['part']} {row['processes']}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted."""
    out: dict[str, Any] = {}
    for size in sorted({row["processes"] for row in rows}):
        own = [row for row in rows if row["processes"] == size]
        jobs = [row for row in own if row["part"] == "jobs"]
        fsdp2 = [max(row["sharded"]["s"]) / max(row["replica"]["s"]) for row in own if "sharded" in row]
        if jobs:
            out |= _rates(jobs, size)
        if fsdp2:
            out[f"fsdp2_over_replica_{size}"] = statistics.median(fsdp2)
    if ratios := [value for key, value in out.items() if key.startswith("fsdp2")]:
        out["fsdp2_over_replica"] = max(ratios)
    if bits := [equal for row in rows if row["part"] == "jobs" for equal in row["bits_equal"].values()]:
        out["bits_equal_jobs"] = all(bits)
    return out


def _rates(rows: list[dict[str, Any]], size: int) -> dict[str, float]:
    """Of part jobs on so many processes."""
    one = sum(row["one"]["s"][0] for row in rows)
    tokens = sum(row["one"]["tokens"][0] for row in rows)
    by_process = [sum(row["jobs"]["s"][rank] for row in rows) for rank in range(size)]
    of_process = [sum(row["jobs"]["tokens"][rank] for row in rows) for rank in range(size)]
    samples = sum(max(row["samples"]["s"]) for row in rows)
    assert sum(of_process) == tokens == sum(row["samples"]["tokens"][0] for row in rows), "the ways trained on others"
    busy = sum(own / seconds for own, seconds in zip(of_process, by_process, strict=True))
    return {
        f"efficiency_jobs_{size}": one / max(by_process) / size,
        f"efficiency_samples_{size}": one / samples / size,
        f"busy_efficiency_jobs_{size}": busy / (tokens / one) / size,
        f"one_of_{size}_tokens_per_s": tokens / one,
        f"jobs_{size}_tokens_per_s": tokens / max(by_process),
        f"samples_{size}_tokens_per_s": tokens / samples,
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    return text_table(
        ["figure", "value"],
        [
            [key, str(value) if isinstance(value, bool) else f"{value:.3f}" if value < 100 else f"{value:.0f}"]
            for key, value in summary(rows).items()
        ],
    )
