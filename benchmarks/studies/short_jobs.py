"""What do shared microbatches bring to jobs of short samples, against PEFT as its users run it?

    python -m benchmarks short-jobs --out benchmarks/results/short-jobs-h200.json   # one GPU, under four minutes
    python -m benchmarks short-jobs --shape 0.6B --out benchmarks/results/short-jobs-06b-h200.json
    python -m benchmarks short-jobs --tiny --out short-jobs.json   # a CPU, seconds; measures nothing

Four LoRA jobs of different ranks and lengths on the shape of a model with random bfloat16 weights. packlora runs the training
loop's own windows (train.Trainer over schedule.Planner); PEFT trains one job after the other, on padded batches, on packed ones
and on rows that are cut without regard to samples, with the same token budget, the same samples in the same global batches and
the same optimizer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.model import LLAMA_8B, TARGETS, TINY, build, shared_copy, use_liger
from benchmarks.peers.batches import packed, padded
from benchmarks.results import check_writable, write_results
from packlora.adapters.attach import attach
from packlora.adapters.spec import peft_config, resolve
from packlora.base import liger
from packlora.base.model import Base
from packlora.base.packing import prepare_model
from packlora.base.shape import plain_head
from packlora.config import Run
from packlora.data.dataset import JobData
from packlora.data.encode import Encoded, Sample
from packlora.parallel.replicas import ALONE, Alone
from packlora.runtime.events import Emitter
from packlora.runtime.folder import OutputFolder
from packlora.runtime.graphs import graphed
from packlora.runtime.job import Job
from packlora.runtime.memory import synchronize
from packlora.runtime.microbatch import SingleDevice
from packlora.runtime.prepared_job import ModelShape, PreparedJob, products_kept, trainable_parameters
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiler import profile
from packlora.runtime.run import deterministic
from packlora.runtime.trainer import Trainer
from packlora.schedule.planner import Planner
from packlora.schedule.types import Window

LR, CLIP, DROPOUT = 1e-4, 1.0, 0.1
ROW = 1024
"""Tokens of a row that is cut without regard to samples."""
QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "8B": ("Llama-3.1-8B", LlamaConfig, LlamaForCausalLM, LLAMA_8B | {"tie_word_embeddings": False}),
    "0.6B": ("Qwen3-0.6B", Qwen3Config, Qwen3ForCausalLM, QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072}),
    "1.7B": ("Qwen3-1.7B", Qwen3Config, Qwen3ForCausalLM, QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144}),
}
"""Name of the model, and how one of its shape is made."""


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
"""By name: lengths and rank."""
PROTOCOL = (
    "{model}'s shape with {layers} layers, width {width}, random bfloat16 weights; {jobs}; samples of at most {longest} "
    "tokens, {batch} samples per optimizer step of a job, loss on all tokens; "
    "LoRA on all linear layers, alpha 2 r, dropout {dropout}, "
    "AdamW, clipping. A timed unit is {rounds} optimizer steps of each of the four jobs, whole (with clipping and AdamW), "
    "the ways in turn inside one loop, {warmup} unit(s) to warm up and {units} counted. tokens/s counts real tokens, never "
    "padding; a ratio is the median over units of the peer's time over packlora's. packlora: Trainer over the scheduler's "
    "microbatches of at most {budget} tokens, float32 adapters. PEFT: bfloat16 adapters, sdpa attention, one job after the "
    "other; padded: samples sorted by length within a global batch, as many to a batch as fit in {budget} tokens with padding; "
    "packed: first fit in rows of at most {budget} tokens with position_ids; rows: all tokens of a global batch one after the "
    "other, cut into rows of {row} (the last filled up), as many to a batch as {budget} tokens make; samples see each other. "
    "{liger}."
)


# --- the jobs ----------------------------------------------------------------------------------------------------------


def make_samples(lengths: Lengths, number: int, longest: int, vocabulary: int, seed: int) -> list[Sample]:
    return samples_of(lengths.draw(number, longest, seed), vocabulary, seed)


def samples_of(lengths: np.ndarray, vocabulary: int, seed: int) -> list[Sample]:
    """Random tokens, all but the first of a sample with loss."""
    generator = np.random.default_rng(seed)
    out = []
    for length in lengths:
        is_label = np.ones(length, bool)
        is_label[0] = False
        out.append(Sample(generator.integers(0, vocabulary, length).astype(np.int32), is_label))
    return out


@dataclass(frozen=True, slots=True)
class ShortJob:
    """batch: samples of an optimizer step. shuffle: in every epoch; else they are taken in their order. lr: learning rate.
    adapter: what differs of it from LoRA on all linear layers."""

    name: str
    rank: int
    batch: int
    samples: list[Sample]
    shuffle: bool = True
    lr: float = LR
    adapter: Mapping[str, Any] = field(default_factory=dict)


def prepared_run(
    model: Any, device: torch.device, budget: int, steps: int, scratch: Path, jobs: Sequence[ShortJob],
    **keys: Any,
) -> tuple[PreparedRun, Base]:  # fmt: skip
    """A run of these jobs on the model as train() prepares it, without its files of model and data.

    Args:
        steps: optimizer steps of each job that may be taken; none of them is its last one.
        keys: others of the run file.
    """
    jobs_tree = [
        {
            "name": job.name, "data": {"path": "random"},
            "adapter": {"r": job.rank, "lora_alpha": 2 * job.rank, "lora_dropout": DROPOUT, "target_modules": TARGETS}
            | dict(job.adapter),
            "train": {
                "global_batch_size": job.batch, "max_steps": steps + 1, "learning_rate": job.lr, "max_grad_norm": CLIP,
                "shuffle": job.shuffle,
            },
        }
        for job in jobs
    ]  # fmt: skip
    tree = {
        "base_model": "random", "output_dir": str(scratch), "dtype": "bfloat16", "device": device.type, "save_every": 0,
        "max_tokens_per_microbatch": budget, "jobs": jobs_tree, **keys,
    }  # fmt: skip
    run = Run.model_validate(tree)
    prepare_model(model, gradient_checkpointing=run.gradient_checkpointing)
    liger.use_liger(model, "auto")
    base = Base(model, None, device, "random", [], fused_loss=plain_head(model) is not None)
    return prepared_on(run, base, budget, ModelShape.of(model), [job.samples for job in jobs]), base


def prepared_on(
    run: Run, base: Base, budget: int, shape: ModelShape, samples: Sequence[list[Sample]]
) -> PreparedRun:  # fmt: skip
    """The run with these samples of each job."""
    prepared = PreparedRun(run, None, budget, shape, [])
    for job, own in zip(run.jobs, samples, strict=True):
        spec = resolve(peft_config(job.adapter, "random", None), base.model, job.name)
        data = JobData(job.name, own, job.train, run.seed)
        trainable = trainable_parameters(spec, base.model)
        products = products_kept(spec, base.model)
        prepared.jobs.append(
            PreparedJob(job, data, Encoded(own), Encoded([]), spec, trainable, trainable, products=products)
        )
    return prepared


def make_trainer(
    model: Any, device: torch.device, budget: int, longest: int, steps: int, scratch: Path, mu_shift: float, batch: int
) -> Trainer:
    """The training loop over the model and JOBS."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    jobs = []
    for number, (name, (lengths, rank)) in enumerate(JOBS.items()):
        shifted = Lengths(lengths.mu + mu_shift, lengths.sigma, lengths.source)
        samples = make_samples(shifted, batch * (steps + 1), longest, vocabulary, number)
        jobs.append(ShortJob(name, rank, batch, samples))
    return trainer_of(*prepared_run(model, device, budget, steps, scratch, jobs), scratch)


def trainer_of(prepared: PreparedRun, base: Base, scratch: Path, group: Alone = ALONE) -> Trainer:
    """Attach the jobs' adapters and make the loop that trains them.

    Args:
        group: the processes that train these jobs.
    """
    specs = {job.config.name: job.spec for job in prepared.jobs}
    attached, adapters = attach(base.model, specs, prepared.run.seed, None, base.storage)
    made = [Job(item.config, item.data, [], adapter) for item, adapter in zip(prepared.jobs, adapters, strict=True)]
    known = profile(prepared.run, prepared)
    events = Emitter()
    folder = OutputFolder(scratch, "benchmark", None, events)
    executor = graphed(prepared.run, base, SingleDevice(base, attached), made, prepared.budget, print)
    return Trainer(prepared.run, prepared, base, executor, made, known, folder, events, group=group)


# --- PEFT --------------------------------------------------------------------------------------------------------------


class Peft:
    """All jobs as adapters of one PEFT model over the same frozen weights, trained one after the other. ranks: by job."""

    def __init__(
        self, model: Any, data: dict[str, JobData], budget: int, ranks: Mapping[str, int] | None = None
    ) -> None:
        self.data, self.budget = data, budget
        self.device = next(model.parameters()).device
        configs = {
            name: LoraConfig(
                r=rank, lora_alpha=2 * rank, lora_dropout=DROPOUT, target_modules=TARGETS, task_type="CAUSAL_LM"
            )
            for name, rank in (ranks or {name: rank for name, (_, rank) in JOBS.items()}).items()
        }
        first = next(iter(configs))
        self.model: Any = get_peft_model(model, configs[first], adapter_name=first, autocast_adapter_dtype=False)
        for name in list(configs)[1:]:
            self.model.add_adapter(name, configs[name], autocast_adapter_dtype=False)
        self.model.train()
        self.parameters, self.optimizers = {}, {}
        for name in configs:
            self.model.set_adapter(name)
            self.parameters[name] = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizers[name] = torch.optim.AdamW(self.parameters[name], lr=LR, weight_decay=0.0)
        self.padding = 0
        """Tokens of padding that were run."""

    def unit(self, steps: range, batches: Callable[[list[Sample]], Iterator[dict[str, torch.Tensor]]]) -> float:
        """Seconds of the optimizer steps of every job; switching adapters is not counted."""
        seconds = 0.0
        for name, data in self.data.items():
            self.model.set_adapter(name)
            synchronize(self.device)
            start = time.perf_counter()
            for step in steps:
                samples = [data.samples[number] for number in data.global_batch(step)]
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
        return seconds

    def padded(self, samples: list[Sample]) -> Iterator[dict[str, torch.Tensor]]:
        """Longest first, so that a batch holds samples of like length."""
        rest = sorted(samples, key=lambda sample: -sample.num_tokens)
        while rest:
            longest = rest[0].num_tokens
            taken, rest = rest[: max(1, self.budget // longest)], rest[max(1, self.budget // longest) :]
            made = padded(taken)
            self.padding += made["input_ids"].numel() - int(made["attention_mask"].sum())
            yield made

    def packed(self, samples: list[Sample]) -> Iterator[dict[str, torch.Tensor]]:
        rows: list[list[Sample]] = []
        for sample in sorted(samples, key=lambda sample: -sample.num_tokens):
            fits = (row for row in rows if sum(s.num_tokens for s in row) + sample.num_tokens <= self.budget)
            row = next(fits, None)
            if row is None:
                rows.append(row := [])
            row.append(sample)
        yield from map(packed, rows)

    def rows(self, samples: list[Sample]) -> Iterator[dict[str, torch.Tensor]]:
        """The same shapes every time, of equal rows: what is easiest for the host and for attention."""
        tokens, width = torch.cat([torch.from_numpy(sample.ids).long() for sample in samples]), min(ROW, self.budget)
        rows = torch.nn.functional.pad(tokens, (0, -len(tokens) % width)).view(-1, width)
        for ids in rows.split(max(1, self.budget // width)):
            yield {"input_ids": ids, "labels": ids}


# --- timing ------------------------------------------------------------------------------------------------------------


def timed_window(trainer: Trainer, window: Window) -> float:
    """Seconds of a window of the training loop; planning is not counted, for training has it done beside."""
    with deterministic():  # as train() has it
        synchronize(trainer.base.device)
        start = time.perf_counter()
        if not trainer._train_window(window):
            raise MemoryError("out of memory; lower --budget")
        synchronize(trainer.base.device)
        return time.perf_counter() - start


def measure(trainer: Trainer, peft: Peft, rounds: int, warmup: int, units: int) -> list[dict[str, Any]]:
    """Rows: seconds of every unit by way."""
    data = {job.name: job.data for job in trainer.jobs}
    planner = Planner([job.data.planned for job in trainer.jobs], trainer.budget.tokens, window_rounds=rounds)
    ways: dict[str, Callable[[range], float]] = {
        "packlora": lambda steps: timed_window(trainer, planner.window(steps.start)),
        "peft_padded": lambda steps: peft.unit(steps, peft.padded),
        "peft_packed": lambda steps: peft.unit(steps, peft.packed),
        "peft_rows": lambda steps: peft.unit(steps, peft.rows),
    }
    rows = []
    for number in range(warmup + units):
        steps = range(number * rounds, (number + 1) * rounds)
        row: dict[str, Any] = {"unit": number - warmup}
        row["tokens"] = sum(
            d.samples[n].num_tokens for d in data.values() for step in steps for n in d.global_batch(step)
        )
        padding, run = peft.padding, trainer.runner.logged
        for name in (
            list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        ):  # each way comes first equally often
            row[f"{name}_s"] = ways[name](steps)
        row["padding"], row["microbatches"] = peft.padding - padding, trainer.runner.logged - run
        print(row, flush=True)
        if number >= warmup:
            rows.append(row)
    return rows


def summary(rows: list[dict[str, Any]], rounds: int) -> dict[str, float]:
    """The figures that are quoted."""
    out = {}
    for peer in ("padded", "packed", "rows"):
        out[f"throughput_vs_peft_{peer}"] = statistics.median(row[f"peft_{peer}_s"] / row["packlora_s"] for row in rows)
    for way in ("packlora", "peft_padded", "peft_packed", "peft_rows"):
        out[f"{way}_tokens_per_s"] = statistics.median(row["tokens"] / row[f"{way}_s"] for row in rows)
    out["microbatches_per_round"] = statistics.mean(row["microbatches"] for row in rows) / rounds
    out["peft_padded_padding"] = sum(r["padding"] for r in rows) / sum(r["padding"] + r["tokens"] for r in rows)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/short-jobs-h200.json"))
    parser.add_argument("--budget", type=int, default=8192, help="most tokens of a microbatch")
    parser.add_argument("--shape", choices=list(SHAPES), default="8B")
    parser.add_argument("--batch", type=int, default=8, help="samples of an optimizer step of a job")
    parser.add_argument("--layers", type=int, help="of the model; by default all")
    parser.add_argument("--rounds", type=int, default=4, help="optimizer steps of each job in a timed unit")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--units", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args()
    check_writable(args.out)
    if not args.tiny and not torch.cuda.is_available():
        parser.error("this needs a GPU; --tiny tests the benchmark on a CPU")
    device = torch.device("cpu" if args.tiny else "cuda")
    model, kind, make, shape = SHAPES[args.shape]
    shape = {**shape, **TINY} if args.tiny else shape
    if args.layers:
        shape = shape | {"num_hidden_layers": args.layers}
    budget, longest, mu_shift = (512, 128, -2.5) if args.tiny else (args.budget, min(2048, args.budget), 0.0)
    with_liger = use_liger(device)
    config = kind(**shape, attn_implementation="sdpa", use_cache=False)
    frozen = build(config, device, make)
    steps = (args.warmup + args.units) * args.rounds
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(shared_copy(frozen), device, budget, longest, steps, Path(scratch), mu_shift, args.batch)
        peft = Peft(shared_copy(frozen), {job.name: job.data for job in trainer.jobs}, budget)
        rows = measure(trainer, peft, args.rounds, args.warmup, args.units)
    figures = summary(rows, args.rounds)
    if args.tiny or args.layers:
        figures = {f"part_{key}": value for key, value in figures.items()}
    jobs = "; ".join(f"{name}: rank {rank}, lengths {lengths.source}" for name, (lengths, rank) in JOBS.items())
    protocol = PROTOCOL.format(
        model=model, layers=config.num_hidden_layers, width=config.hidden_size, jobs=jobs, longest=longest, batch=args.batch,
        row=ROW, dropout=DROPOUT, rounds=args.rounds, warmup=args.warmup, units=args.units, budget=budget,
        liger=with_liger,
    )  # fmt: skip
    write_results(args.out, "short-jobs", protocol, rows, figures, str(device))
    print(figures)


if __name__ == "__main__":
    main()
