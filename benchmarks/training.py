"""`workloads` and `speed`: jobs of short samples by packlora's own loop, beside PEFT, which trains one after the other.

A *way* trains the same jobs in units of some optimizer steps; the ways run in turn. packlora's way is the training loop
(`runtime.Trainer` over the planner's windows); PEFT's are those that its users have: packed rows, rows that are cut without
regard to samples, and one compiled shape.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.contenders import begin_step, compiling, forget
from benchmarks.harness import Benchmark, Case, Options, Row, case
from benchmarks.peers.kernels import use_lorafusion
from benchmarks.peers.sources import SOURCES, fetched
from benchmarks.planning import LENGTHS, SETS, are_estimates, draw_lengths
from benchmarks.shapes import TARGETS, build, config_of, shared_copy, use_liger
from packlora.adapters.attach import attach
from packlora.adapters.spec import resolve
from packlora.base import liger
from packlora.base.demo_model import demo_model_folder
from packlora.base.model import Base, load_base
from packlora.base.packing import prepare_model
from packlora.base.shape import plain_head
from packlora.config import Run
from packlora.config.peft import peft_config
from packlora.data.dataset import JobData
from packlora.data.encode import Encoded, Sample
from packlora.engine.memory import synchronize
from packlora.engine.passes import SingleDevice
from packlora.parallel.alone import ALONE, Alone
from packlora.runtime.cuda_graphs import graphed
from packlora.runtime.events import Emitter
from packlora.runtime.folder import OutputFolder
from packlora.runtime.job import Job
from packlora.runtime.prepare import prepare
from packlora.runtime.prepared_job import ModelShape, PreparedJob, products_kept, trainable_parameters
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiler import profile
from packlora.runtime.run import deterministic
from packlora.runtime.stream import Stream
from packlora.runtime.trainer import Trainer
from packlora.runtime.windows import Plan
from packlora.schedule.planner import WINDOW_ROUNDS, Planner
from packlora.schedule.types import Window
from packlora.tune.timing import geomean

LR, CLIP, DROPOUT = 1e-4, 1.0, 0.1
ROW = 1024
"""Tokens of a row that is cut without regard to samples."""


# --- jobs of short samples -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths of samples in tokens. mu, sigma: of their logarithm."""

    mu: float
    sigma: float
    source: str

    def draw(self, number: int, longest: int, seed: int) -> np.ndarray:
        lengths = np.random.default_rng(seed).lognormal(self.mu, self.sigma, number)
        return np.clip(np.round(lengths), 16, longest).astype(int)


JOBS: dict[str, tuple[Lengths, int]] = {
    "synopsis": (Lengths(4.9797, 0.3452, "fit to Debian package descriptions, measured"), 8),
    "plots": (Lengths(5.1084, 0.4690, "fit to film plots (rt_plots), measured"), 16),
    "docstrings": (Lengths(6.0453, 0.7328, "fit to Python docstrings, measured"), 32),
    "xsum": (Lengths(6.0544, 0.6315, "estimate for XSum from its published size, spread assumed"), 64),
}
"""Lengths and rank by name."""


def samples_of(lengths: np.ndarray, vocabulary: int, seed: int) -> list[Sample]:
    """Random tokens, all but the first of a sample with loss."""
    generator = np.random.default_rng(seed)
    return [
        Sample(generator.integers(0, vocabulary, length).astype(np.int32), np.arange(length) > 0) for length in lengths
    ]


def make_samples(lengths: Lengths, number: int, longest: int, vocabulary: int, seed: int) -> list[Sample]:
    return samples_of(lengths.draw(number, longest, seed), vocabulary, seed)


@dataclass(frozen=True, slots=True)
class ShortJob:
    """batch: samples of an optimizer step. shuffle: in every epoch; else they are taken in order. lr: learning rate."""

    name: str
    rank: int
    batch: int
    samples: list[Sample]
    shuffle: bool = True
    lr: float = LR

    def tree(self, steps: int) -> Row:
        """The job of a run file."""
        train = {"global_batch_size": self.batch, "max_steps": steps, "learning_rate": self.lr, "max_grad_norm": CLIP,
                 "shuffle": self.shuffle}  # fmt: skip
        adapter = {"r": self.rank, "lora_alpha": 2 * self.rank, "lora_dropout": DROPOUT, "target_modules": TARGETS}
        return {"name": self.name, "data": {"path": "random"}, "adapter": adapter, "train": train}


def run_of(jobs: Sequence[Row], device: torch.device, budget: int, folder: Path, **keys: Any) -> Run:
    """A run file of these jobs; nothing is saved on the way. keys: others of the run file."""
    tree = {
        "base_model": "random", "output_dir": str(folder), "dtype": "bfloat16", "device": device.type, "save_every": 0,
        "max_tokens_per_microbatch": budget, "jobs": jobs, **keys,
    }  # fmt: skip
    return Run.model_validate(tree)


def prepared_on(run: Run, base: Any, budget: int, shape: ModelShape, samples: Sequence[list[Sample]]) -> PreparedRun:
    """The run with these samples of each job, as train() prepares it. base: has the model."""
    prepared = PreparedRun(run, None, budget, shape, [])
    for job, own in zip(run.jobs, samples, strict=True):
        spec = resolve(peft_config(job.adapter, "random", None), base.model, job.name)
        trainable, products = trainable_parameters(spec, base.model), products_kept(spec, base.model)
        data = JobData(job.name, own, job.train, run.seed)
        prepared.jobs.append(
            PreparedJob(job, data, Encoded(own), Encoded([]), spec, trainable, trainable, products=products)
        )
    return prepared


def prepared_run(
    model: Any, device: torch.device, budget: int, steps: int, folder: Path, jobs: Sequence[ShortJob]
) -> tuple[PreparedRun, Base]:
    """A run of these jobs on the model as train() prepares it, without its files of model and data.

    Args:
        steps: optimizer steps of each job that may be taken; none of them is its last one.
    """
    run = run_of([job.tree(steps + 1) for job in jobs], device, budget, folder)
    prepare_model(model, gradient_checkpointing=False)
    liger.use_liger(model, "auto")
    base = Base(model, None, device, "random", [], fused_loss=plain_head(model) is not None)
    return prepared_on(run, base, budget, ModelShape.of(model), [job.samples for job in jobs]), base


def trainer_of(prepared: PreparedRun, base: Base, folder: Path, group: Alone = ALONE) -> Trainer:
    """Attach the jobs' adapters and make the loop that trains them. group: the processes that train these jobs."""
    specs = {job.config.name: job.spec for job in prepared.jobs}
    attached, adapters = attach(base.model, specs, prepared.run.seed, None, base.storage)
    made = [Job(item.config, item.data, [], adapter) for item, adapter in zip(prepared.jobs, adapters, strict=True)]
    known, events = profile(prepared.run, prepared), Emitter()
    executor = graphed(prepared.run, base, SingleDevice(base, attached), made, prepared.budget, print)
    output = OutputFolder(folder, "benchmark", None, events)
    return Trainer(prepared.run, prepared, base, executor, made, known, output, events, group=group)


def run_window(trainer: Trainer, window: Window) -> None:
    """A window of the training loop.

    Raises:
        MemoryError: out of memory.
    """
    capacity = trainer.budget.tokens
    parts = (trainer.by_name, trainer.team, capacity, trainer.evaluator, trainer.tally)
    stream = Stream(Plan(iter([window]), None), *parts)
    while not stream.plan.has_ended:
        trainer.run_slots(stream)
        if trainer.budget.tokens < capacity:
            raise MemoryError("out of memory")


def timed_window(trainer: Trainer, window: Window) -> float:
    """Seconds of a window of the training loop; planning is not counted, for training has it done beside."""
    with deterministic():  # as train() has it
        synchronize(trainer.base.device)
        start = time.perf_counter()
        run_window(trainer, window)
        synchronize(trainer.base.device)
        return time.perf_counter() - start


# --- PEFT --------------------------------------------------------------------------------------------------------------


def padded(samples: Sequence[Sample], pad: int = 0) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask and labels [samples, longest]; labels -100 on padding and where a token is none."""
    ids_BS = torch.full((len(samples), max(sample.num_tokens for sample in samples)), pad)
    labels_BS, mask_BS = torch.full_like(ids_BS, -100), torch.zeros_like(ids_BS)
    for row, sample in enumerate(samples):
        own = torch.from_numpy(sample.ids).long()
        ids_BS[row, : len(own)], mask_BS[row, : len(own)] = own, 1
        labels_BS[row, : len(own)] = torch.where(torch.from_numpy(sample.is_label), own, -100)
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS}


def packed(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """input_ids, position_ids and labels [1, tokens]; positions begin at 0 in every sample."""
    ids_T = torch.cat([torch.from_numpy(sample.ids).long() for sample in samples])
    is_label_T = torch.cat([torch.from_numpy(sample.is_label) for sample in samples])
    positions_T = torch.cat([torch.arange(sample.num_tokens) for sample in samples])
    labels_T = torch.where(is_label_T, ids_T, -100)
    return {"input_ids": ids_T[None], "position_ids": positions_T[None], "labels": labels_T[None]}


def lora(rank: int, **more: Any) -> LoraConfig:
    keys: Row = {"lora_alpha": 2 * rank, "lora_dropout": DROPOUT, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    return LoraConfig(r=rank, **keys | more)


Batches = Callable[[list[Sample]], Iterator[dict[str, torch.Tensor]]]


class Peft:
    """All jobs as adapters of one PEFT model over the same frozen weights, trained one after the other.

    Args:
        data: samples by job.
        configs: adapters by job.
        budget: tokens of a batch at most.
    """

    def __init__(self, model: Any, data: Mapping[str, JobData], configs: Mapping[str, LoraConfig], budget: int) -> None:
        self.data, self.budget, self.device = data, budget, next(model.parameters()).device
        first, *others = configs
        self.model: Any = get_peft_model(model, configs[first], adapter_name=first, autocast_adapter_dtype=False)
        for name in others:
            self.model.add_adapter(name, configs[name], autocast_adapter_dtype=False)
        self.model.train()
        self.parameters: dict[str, list[torch.Tensor]] = {}
        for name in configs:
            self.model.set_adapter(name)
            self.parameters[name] = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizers = {
            name: torch.optim.AdamW(own, lr=LR, weight_decay=0.0) for name, own in self.parameters.items()
        }

    def unit(self, steps: range, batches: Batches) -> tuple[float, int]:
        """Seconds of the optimizer steps of every job, and tokens; switching adapters is not counted."""
        seconds, tokens = 0.0, 0
        for name, data in self.data.items():
            self.model.set_adapter(name)
            synchronize(self.device)
            start = time.perf_counter()
            for step in steps:
                samples = [data.samples[number] for number in data.global_batch(step)]
                tokens += sum(sample.num_tokens for sample in samples)
                labels = sum(sample.num_labels for sample in samples)
                for batch in batches(samples):
                    own = int((batch["labels"] != -100).sum())
                    out = self.model(**{key: value.to(self.device) for key, value in batch.items()}, use_cache=False)
                    (out.loss * (own / labels)).backward()
                torch.nn.utils.clip_grad_norm_(self.parameters[name], CLIP)
                self.optimizers[name].step()
                self.optimizers[name].zero_grad()
            synchronize(self.device)
            seconds += time.perf_counter() - start
        return seconds, tokens

    def packed(self, samples: list[Sample]) -> Iterator[dict[str, torch.Tensor]]:
        """First fit in rows of at most `budget` tokens, samples apart."""
        rows: list[list[Sample]] = []
        for sample in sorted(samples, key=lambda sample: -sample.num_tokens):
            fits = (row for row in rows if sum(s.num_tokens for s in row) + sample.num_tokens <= self.budget)
            row = next(fits, None)
            if row is None:
                rows.append(row := [])
            row.append(sample)
        yield from map(packed, rows)

    def rows(self, samples: list[Sample]) -> Iterator[dict[str, torch.Tensor]]:
        """Equal rows, cut without regard to samples: the easiest for the host and for attention."""
        tokens, width = torch.cat([torch.from_numpy(sample.ids).long() for sample in samples]), min(ROW, self.budget)
        rows = torch.nn.functional.pad(tokens, (0, -len(tokens) % width)).view(-1, width)
        for ids in rows.split(max(1, self.budget // width)):
            yield {"input_ids": ids, "labels": ids}


class OneShape:
    """One job under PEFT whose batches all have one shape, so that the model is compiled once.

    The tokens of its samples are one stream, cut into rows; what is left over at the end of a unit is not run. There is no
    padding, and samples see each other: the easiest that training can be.
    """

    def __init__(self, model: Any, data: JobData, width: int, rows: int, mode: str, rank: int = 16) -> None:
        self.data, self.shape, self.mode, self.device = data, (rows, width), mode, next(model.parameters()).device
        adapted: Any = get_peft_model(model, lora(rank), autocast_adapter_dtype=False).train()
        self.parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        for parameter in self.parameters:  # gradients are added here: a graph's own memory is written over
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, weight_decay=0.0)
        self.call = torch.compile(adapted.get_base_model(), **compiling(mode, self.device))

    def batches(self, steps: range) -> list[torch.Tensor]:
        samples = [self.data.samples[number] for step in steps for number in self.data.global_batch(step)]
        stream = torch.cat([torch.from_numpy(sample.ids).long() for sample in samples])
        tokens = self.shape[0] * self.shape[1]
        return list(stream[: len(stream) // tokens * tokens].view(-1, *self.shape))

    def unit(self, steps: range) -> tuple[float, int]:
        """Seconds of the optimizer steps, and tokens that were run."""
        batches = self.batches(steps)
        synchronize(self.device)
        start = time.perf_counter()
        for own in np.array_split(np.arange(len(batches)), len(steps)):
            for number in own:
                ids = batches[number].to(self.device)
                begin_step(self.mode)
                (self.call(input_ids=ids, labels=ids, use_cache=False).loss / len(own)).backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
        synchronize(self.device)
        return time.perf_counter() - start, sum(batch.numel() for batch in batches)


# --- ways in turn ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Way:
    """unit: gives seconds and tokens of some optimizer steps of each job. every: the steps of each unit. warmup: units at the
    start that count for it alone. seconds, tokens: of each unit that was run."""

    unit: Callable[[range], tuple[float, int]]
    every: Sequence[range]
    warmup: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    error: str | None = None

    def run(self, label: str) -> None:
        """The next unit."""
        if self.error is not None or len(self.seconds) == len(self.every):
            return
        try:
            seconds, tokens = self.unit(self.every[len(self.seconds)])
        except Exception as error:  # a peer may fail in any way; the row says how
            self.error = f"{type(error).__name__}: {error}"[:400]
            return
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        print(f"{label} unit {len(self.seconds)}: {seconds:.2f} s, {tokens} tokens", flush=True)

    def rate(self) -> float:
        """Tokens per second, median over the counted units."""
        pairs = list(zip(self.tokens, self.seconds, strict=True))[self.warmup :]
        return statistics.median(tokens / seconds for tokens, seconds in pairs)

    def start(self) -> float:
        """Seconds of all units beyond what their tokens take at that rate: compiling, recording, choosing plans."""
        return max(0.0, sum(self.seconds) - sum(self.tokens) / self.rate())


def units(rounds: int, number: int, first: int = 0) -> list[range]:
    """Steps of so many units of `rounds` steps."""
    return [range(at * rounds, (at + 1) * rounds) for at in range(first, first + number)]


def in_turn(label: str, ways: Mapping[str, Way], lead: int = 0) -> None:
    """Run all units, another way first each time. lead: units of the first way, ahead of all others."""
    names = [*ways]
    for _ in range(lead):
        ways[names[0]].run(f"{label} {names[0]}")
    for number in range(max((len(way.every) for way in ways.values()), default=0)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            ways[name].run(f"{label} {name}")


def row_of(ways: Mapping[str, Way]) -> Row:
    """tokens_per_s: after the start. start_s: what the start takes beyond its tokens. with_start_tokens_per_s: of all units of
    the jobs and one start."""
    done = {name: way for name, way in ways.items() if way.error is None}
    rates, starts = {name: way.rate() for name, way in done.items()}, {name: way.start() for name, way in done.items()}
    tokens = max((sum(way.tokens) for way in done.values()), default=0)
    return {
        "tokens": tokens, "warmup": {name: way.warmup for name, way in ways.items()},
        "seconds": {name: way.seconds for name, way in ways.items()},
        "unit_tokens": {name: way.tokens for name, way in ways.items()}, "tokens_per_s": rates, "start_s": starts,
        "with_start_tokens_per_s": {name: tokens / (starts[name] + tokens / rates[name]) for name in done},
        "failed": {name: way.error for name, way in ways.items() if way.error is not None},
    }  # fmt: skip


def peft_ways(peft: Peft, every: Sequence[range], warmup: int, start: str = "peft", tail: str = "") -> dict[str, Way]:
    """PEFT's eager ways that do not pad."""

    def way(batches: Batches) -> Way:
        return Way(lambda steps: peft.unit(steps, batches), every, warmup)

    return {f"{start}_packed{tail}": way(peft.packed), f"{start}_rows{tail}": way(peft.rows)}


def best(rates: Mapping[str, float], start: str) -> tuple[str, float] | None:
    """A peer's fastest way and its rate."""
    return max(
        ((name, rate) for name, rate in rates.items() if name.startswith(start)), key=lambda one: one[1], default=None
    )


# --- LoRAFusion's workloads --------------------------------------------------------------------------------------------

OWN, APART = "packlora", "packlora_apart"
RANK, BATCH, BUDGET = 16, 8, 6144
ROUNDS, WARMUP, UNITS = 2, 1, 3
"""Optimizer steps of each job in a unit; units that are not counted, and counted ones."""
SHRUNK = 128
"""Lengths and budget of a toy are this part of the true ones."""


def workload_cases(options: Options) -> list[Case]:
    names = [name for name in SETS if name != "real"]
    return [case(f"workload {name}", key=name) for name in (["mix"] if options.quick else names)]


def loop_way(name: str, trainer: Trainer) -> Way:
    """The training loop: a unit of OWN is a part of a window as training has it; of APART some rounds, each a window."""
    orders, budget = [job.data.planned for job in trainer.jobs], trainer.budget.tokens
    if name == APART:
        alone = Planner(orders, budget, window_rounds=1)
        windows = [[alone.window(start + at) for at in range(ROUNDS)] for start in range(0, WINDOW_ROUNDS, ROUNDS)]
    else:
        whole = Planner(orders, budget).window(0)
        each = max(1, len(whole.microbatches) * ROUNDS // WINDOW_ROUNDS)
        starts = range(0, len(whole.microbatches), each)
        windows = [[replace(whole, microbatches=whole.microbatches[start : start + each])] for start in starts]

    def unit(steps: range) -> tuple[float, int]:
        own = windows[steps.start // ROUNDS]
        tokens = sum(microbatch.num_tokens for window in own for microbatch in window.microbatches)
        return sum(timed_window(trainer, window) for window in own), tokens

    return Way(unit, units(ROUNDS, WARMUP + UNITS), WARMUP)


def microbatches(trainer: Trainer) -> dict[str, int]:
    """Microbatches in the rounds of a window, and with each round planned alone."""
    out = {}
    for name, window in (("auto", WINDOW_ROUNDS), ("apart", 1)):
        orders = [job.data.planned for job in trainer.jobs]
        planner = Planner(orders, trainer.budget.tokens, window_rounds=window)
        out[name] = sum(len(planner.window(start).microbatches) for start in range(0, WINDOW_ROUNDS, window))
    return out


def measure_workload(one: Case, names: list[str], options: Options) -> Row:
    """packlora's ways, then the peers', on the same frozen weights: side by side they would need more than 80 GB."""
    if options.tiny:
        names = [name for name in names if not name.startswith("lorafusion")]  # its kernels need a GPU
    if any(name.startswith("lorafusion") for name in names):
        fetched("lorafusion")
    use_liger(options.device)
    config = config_of("Llama-3.1-8B", options.tiny, options.layers or (1 if options.tiny else None))
    frozen = options.shared(("8B", config.num_hidden_layers), lambda: build(config, options.device))
    jobs = []
    for number, kind in enumerate(SETS[one.key]):  # samples for the rounds of a window and one more
        lengths = draw_lengths(kind, BATCH * (WINDOW_ROUNDS + 1), number)
        lengths = (lengths // SHRUNK).clip(min=2) if options.tiny else lengths
        jobs.append(ShortJob(f"{number}-{kind}", RANK, BATCH, samples_of(lengths, config.vocab_size, number)))
    budget, done, counts = BUDGET // SHRUNK if options.tiny else BUDGET, dict[str, Way](), dict[str, int]()
    data: dict[str, JobData] = {}

    def run(ways: dict[str, Way]) -> None:
        """Run in turn; what is kept of a way holds no model."""
        in_turn(one.label, {name: way for name, way in ways.items() if name in names})
        done.update({name: replace(way, unit=_over) for name, way in ways.items() if name in names})

    with ExitStack() as held:
        trainers = {}
        for name in (OWN, APART):
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            prepared, base = prepared_run(shared_copy(frozen), options.device, budget, WINDOW_ROUNDS, folder, jobs)
            trainers[name] = trainer_of(prepared, base, folder)
        counts, data = microbatches(trainers[OWN]), {job.name: job.data for job in trainers[OWN].jobs}
        run({name: loop_way(name, trainer) for name, trainer in trainers.items()})
        del trainers, prepared, base
    for peer in ("peft", "lorafusion"):
        forget(options.device)
        if any(name.startswith(peer) for name in names):
            peft = Peft(shared_copy(frozen), data, dict.fromkeys(data, lora(RANK)), budget)
            if peer == "lorafusion":
                use_lorafusion(peft.model, tma=True)
            run(peft_ways(peft, units(ROUNDS, WARMUP + UNITS), WARMUP, peer))
            del peft
    return row_of(done) | {
        "layers": config.num_hidden_layers, "estimates": are_estimates(SETS[one.key]), "rounds": WINDOW_ROUNDS,
        "microbatches": counts,
    }  # fmt: skip


def _over(steps: range) -> tuple[float, int]:
    raise RuntimeError(f"steps {steps}: all units were run")


def workload_summary(rows: list[Row]) -> Row:
    """Figures by workload, and geometric means over all five, which are None where one is missing."""
    out: Row = {}
    names = [name for name in SETS if name != "real"]
    by_name = {row["key"]: row for row in rows}
    every: dict[str, list[float | None]] = {"vs_peft_best": [], "vs_lorafusion_best": [], "merging": []}
    for name in names:
        rates = by_name.get(name, {"tokens_per_s": {}})["tokens_per_s"]
        own = out[f"{name}_tokens_per_s"] = rates.get(OWN)
        for (key, known), start in zip(every.items(), ("peft", "lorafusion", APART), strict=True):
            peer = best(rates, start)
            known.append(own / peer[1] if own and peer else None)
            out[f"{name}_{key}"] = known[-1]
    out |= {f"workloads_{key}": geomean(known) for key, known in every.items()}
    counts = [row["microbatches"] for row in rows] if by_name.keys() == {*names} else []
    whole = sum(own["auto"] for own in counts)
    out["microbatches_without_merging"] = sum(own["apart"] for own in counts) / whole if whole else None
    return out


WORKLOADS = Benchmark(
    workload_cases, measure_workload, workload_summary,
    f"Llama-3.1-8B's shape, random bfloat16 weights. Four LoRA jobs, r {RANK} on all linear layers, alpha 2 r, "
    f"dropout {DROPOUT}, {BATCH} samples an optimizer step, loss on all tokens, AdamW, clipping; lengths of each "
    f"workload as in the benchmark schedule, at most {LENGTHS['cap_tokens']} (rows with estimates: true are of "
    f"ESTIMATED distributions). At most {BUDGET} tokens a microbatch. packlora: the training loop, float32 adapters, "
    f"{WINDOW_ROUNDS} rounds planned together as in training, of whose microbatches a unit is {ROUNDS} "
    f"{WINDOW_ROUNDS}ths; packlora_apart: each round planned alone. peft: bfloat16 adapters, one job after the "
    f"other; packed: first fit in rows with position_ids; rows: all tokens of a global batch cut into rows of {ROW}, "
    "samples see each other. lorafusion: the same two with LoRAFusion's kernels "
    f"({SOURCES['lorafusion'].commit[:7]}, TMA forward) in PEFT's layers. liger-kernel where it is installed. A unit "
    f"is {ROUNDS} optimizer steps of every job, {WARMUP} not counted, {UNITS} counted; packlora's two ways in turn, "
    "then peft's, then lorafusion's. tokens_per_s: real tokens, median, optimizer steps included, planning beside "
    "training not. microbatches: of the rounds of a window, by method, and apart.",
    [OWN, APART, "peft_packed", "peft_rows", "lorafusion_packed", "lorafusion_rows"], by_case=True,
)  # fmt: skip


# --- training on a CPU -------------------------------------------------------------------------------------------------

CPU_STEPS = 6
DATA = Path(__file__).parents[1] / "examples" / "data"
_ADAPTER = {"lora_alpha": 32, "lora_dropout": 0.0}
CPU_JOBS: list[tuple[str, str, int, Row]] = [
    ("synopsis-r8", "debian_synopsis", 8, _ADAPTER | {"r": 8, "lora_alpha": 16}),
    ("docstrings-r16", "py_docstrings", 2, _ADAPTER | {"r": 16, "lora_dropout": 0.05}),
    ("manpages-r32", "manpages", 1, _ADAPTER | {"r": 32, "use_rslora": True}),
    ("synopsis-r4", "debian_synopsis", 4, _ADAPTER | {"r": 4, "lora_alpha": 16}),
]
"""Name, data set, samples of an optimizer step and adapter."""


def speed_cases(options: Options) -> list[Case]:
    return [case("one", jobs=1), *([] if options.quick else [case("four", jobs=len(CPU_JOBS))])]


def short_prompts(path: Path, folder: Path, number: int) -> Path:
    """The first rows of a data set with their prompts cut: few tokens, for --quick."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:number]]
    out = folder / path.name
    out.write_text("".join(json.dumps(row | {"prompt": row["prompt"][-40:]}) + "\n" for row in rows))
    return out


def measure_speed(one: Case, names: list[str], options: Options) -> Row:
    """Optimizer steps of SmolLM2-135M, the ways in turn, a step each."""
    steps = 1 if options.quick else CPU_STEPS
    chosen = CPU_JOBS[: one.jobs]
    with tempfile.TemporaryDirectory() as name:
        jobs = []
        for job, folder, batch, adapter in chosen:
            path = DATA / folder / "train.jsonl"
            path = short_prompts(path, Path(name), 16) if options.quick else path
            train = {"global_batch_size": 2 if options.quick else batch, "learning_rate": 2e-4, "max_grad_norm": CLIP}
            jobs.append({"name": job, "data": {"path": str(path)}, "adapter": adapter, "train": train})
        run = run_of(jobs, options.device, 2048, Path(name) / "out", base_model="smollm2-135m", dtype="float32")
        prepared = prepare(run)
        Path(run.output_dir).mkdir(exist_ok=True)
        trainer = trainer_of(
            prepared, load_base(run, prepared.tokenizer, prepared.longest_by_job), Path(run.output_dir)
        )
        data, pad = {job.name: job.data for job in trainer.jobs}, trainer.base.tokenizer.pad_token_id
        planner = Planner([own.planned for own in data.values()], trainer.budget.tokens, window_rounds=1)
        model = AutoModelForCausalLM.from_pretrained(
            demo_model_folder(), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
        configs = {job: LoraConfig(**adapter, target_modules="all-linear") for job, _, _, adapter in chosen}
        peft = Peft(model, data, configs, 2048)

        def packlora(own: range) -> tuple[float, int]:
            window = planner.window(own.start)
            return timed_window(trainer, window), sum(microbatch.num_tokens for microbatch in window.microbatches)

        calls: dict[str, Callable[[range], tuple[float, int]]] = {
            "packlora": packlora,
            "peft_padded": lambda own: peft.unit(own, lambda samples: iter([padded(samples, pad)])),
            "peft_packed": lambda own: peft.unit(own, lambda samples: iter([packed(samples)])),
        }
        ways = {name: Way(calls[name], units(1, 1 + steps), 1) for name in names}
        in_turn(one.label, ways)
    return row_of(ways)


def speed_summary(rows: list[Row]) -> Row:
    """Tokens per second, and PEFT's time over packlora's, medians over steps."""
    out: Row = {}
    for row in rows:
        title = {"one": "one_job", "four": "four_jobs"}[row["case"]]
        out |= {f"{title}_{way}_tokens_per_s": rate for way, rate in row["tokens_per_s"].items()}
        seconds = {way: own[row["warmup"][way] :] for way, own in row["seconds"].items()}
        for way in (way for way in row["tokens_per_s"] if way != OWN):
            ratios = [theirs / ours for theirs, ours in zip(seconds[way], seconds[OWN], strict=True)]
            out[f"{title}_vs_{way}"] = statistics.median(ratios)
    return out


SPEED = Benchmark(
    speed_cases, measure_speed, speed_summary,
    "SmolLM2-135M-Instruct, float32, all linear layers, real demo data sets with the chat template. Each optimizer "
    "step is timed whole (forward, backward, clipping, AdamW; of all jobs), the ways in turn, 1 step of warm-up and "
    f"{CPU_STEPS} counted; tokens/s counts real tokens, never padding; a ratio is the median over steps of the "
    "peer's time over packlora's. PEFT: one model, sdpa attention; padded: the global batch as one padded batch "
    "with attention mask and labels; packed: the same samples in one row with position_ids. four: the jobs together "
    "in packlora (max_tokens_per_microbatch 2048), one after the other in PEFT.",
    ["packlora", "peft_padded", "peft_packed"], by_case=True, where="cpu",
)  # fmt: skip
