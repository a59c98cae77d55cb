"""Part train of `benchmarks small`: four jobs of short samples in the training loop, beside PEFT in all ways that it has.

Jobs, samples and PEFT's eager ways are those of studies/short_jobs.py. One way is added, what is fastest for a compiler: the
tokens of a job as one stream, cut into batches of one shape.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.model import TARGETS, TINY, build, shared_copy, use_liger
from benchmarks.modes import begin_step, forget, in_mode, modes
from benchmarks.options import Options
from benchmarks.studies.short_jobs import (
    CLIP,
    DROPOUT,
    LR,
    ROW,
    SHAPES,
    Peft,
    make_trainer,
    timed_window,
)
from packlora.data.dataset import JobData
from packlora.runtime.memory import synchronize
from packlora.runtime.trainer import Trainer
from packlora.schedule.planner import WINDOW_ROUNDS, Planner

BUDGET, BATCH = 8192, 32
ROUNDS, LEAD, WARMUP, UNITS = 2, 1, 1, 3
"""Optimizer steps of each job in a unit of PEFT's; the training loop's are whole windows. Units that the training loop runs
ahead of all others, for it meets new shapes of microbatches for as long; units of every way that count for its start alone; and
those that are counted."""
COMPILED_RANK, COMPILED_TOKENS = 16, 4096
"""Of PEFT's compiled job, and of its batches."""


@dataclass(frozen=True, slots=True)
class TrainCase:
    """key: in the summary. layers: None for all."""

    shape: str
    layers: int | None
    key: str
    part: str = "train"

    @property
    def label(self) -> str:
        return f"train {'' if self.layers is None else f'{self.layers}x'}{self.shape}"


def cases(options: Options) -> list[TrainCase]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""
    if options.tiny:
        return [TrainCase("0.6B", 1, "tiny")]
    both = [TrainCase("0.6B", None, "06b"), TrainCase("8B", 8, "8b")]
    return both[:1] if options.quick else both


# --- PEFT, compiled ----------------------------------------------------------------------------------------------------


class OneShape:
    """One job under PEFT whose batches all have one shape, so that the model is compiled once.

    The tokens of its samples are one stream, cut into rows; what is left over at the end of a unit is not run. There is no
    padding, and samples see each other: the easiest that training can be.
    """

    def __init__(self, model: Any, data: JobData, width: int, rows: int, mode: str, rank: int = COMPILED_RANK) -> None:
        self.data, self.width, self.rows, self.mode = data, width, rows, mode
        self.device = next(model.parameters()).device
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, lora_dropout=DROPOUT, target_modules=TARGETS, task_type="CAUSAL_LM"
        )
        adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=False).train()
        self.parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(
                parameter
            )  # gradients are added here: a graph's own memory is written over
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, weight_decay=0.0)
        self.call = in_mode(adapted.get_base_model(), mode, self.device)

    def batches(self, steps: range) -> list[torch.Tensor]:
        samples = [self.data.samples[number] for step in steps for number in self.data.global_batch(step)]
        stream = torch.cat([torch.from_numpy(sample.ids).long() for sample in samples])
        tokens = self.rows * self.width
        return list(stream[: len(stream) // tokens * tokens].view(-1, self.rows, self.width))

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
        return time.perf_counter() - start, len(batches) * self.rows * self.width


# --- timing ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Way:
    """unit: seconds of the optimizer steps of a unit, and tokens that were run. warmup: units that count for the start alone.
    seconds, tokens: of every unit so far. every: the steps of each unit that is to be run."""

    unit: Callable[[range], tuple[float, int]]
    warmup: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    every: Sequence[range] = ()

    def run(self, steps: range) -> None:
        if self.error is None:
            try:
                seconds, tokens = self.unit(steps)
            except Exception as error:  # a peer may fail in any way; the row says how
                self.error = f"{type(error).__name__}: {error}"[:400]
                return
            self.seconds.append(seconds)
            self.tokens.append(tokens)

    @property
    def done(self) -> int:
        """Units that were run."""
        return len(self.seconds)

    def rate(self) -> float:
        """Tokens per second, median over the counted units."""
        pairs = zip(self.tokens[self.warmup :], self.seconds[self.warmup :], strict=True)
        return statistics.median(tokens / seconds for tokens, seconds in pairs)

    def start(self) -> float:
        """Seconds of all units beyond what their tokens take at that rate: compiling, recording, choosing plans."""
        return max(0.0, sum(self.seconds) - sum(self.tokens) / self.rate())


@dataclass(frozen=True, slots=True)
class Sizes:
    """budget: tokens of a microbatch. longest: of a sample. mu_shift: of the logarithms of lengths. batch: samples of a job's
    optimizer step. rounds, window: steps of each job in a unit of PEFT's and of the training loop. lead, warmup, units: see
    UNITS. width, rows: of PEFT's compiled batches."""

    budget: int = BUDGET
    longest: int = 2048
    mu_shift: float = 0.0
    batch: int = BATCH
    rounds: int = ROUNDS
    window: int = WINDOW_ROUNDS
    lead: int = LEAD
    warmup: int = WARMUP
    units: int = UNITS
    width: int = ROW
    rows: int = COMPILED_TOKENS // ROW

    def every(self, rounds: int) -> list[range]:
        """The steps of each unit of so many rounds; the first `lead` are the training loop's alone."""
        number_of = self.lead + self.warmup + self.units
        return [range(number * rounds, (number + 1) * rounds) for number in range(number_of)]


TOY = Sizes(512, 128, -2.5, batch=2, rounds=1, window=2, lead=1, warmup=1, units=2, width=32, rows=1)


def frozen_model(shape: str, layers: int | None, options: Options) -> tuple[Any, Any]:
    """A model of one of SHAPES, and its configuration; of a toy's sizes on a CPU. layers: None for all."""
    _, kind, make, values = SHAPES[shape]
    values = {**values, **TINY, "head_dim": 16} if options.tiny else values
    values = values if layers is None else {**values, "num_hidden_layers": layers}
    config = kind(**values, attn_implementation="sdpa", use_cache=False)
    return config, build(config, options.device, make)


def packlora_way(trainer: Trainer, sizes: Sizes, predicted: list[float]) -> Way:
    """The training loop on shared microbatches. predicted: gets the seconds that the profiler predicts for each unit's."""
    data = {job.name: job.data for job in trainer.jobs}
    planner = Planner([own.planned for own in data.values()], trainer.budget.tokens, window_rounds=sizes.window)

    def unit(steps: range) -> tuple[float, int]:
        window = planner.window(steps.start)
        microbatches = [microbatch for microbatch in window.microbatches if not microbatch.is_noop]
        predicted.append(sum(trainer.profile.seconds(microbatch) for microbatch in microbatches))
        return timed_window(trainer, window), sum(microbatch.num_tokens for microbatch in microbatches)

    return Way(unit, sizes.lead + sizes.warmup, every=sizes.every(sizes.window))


def peft_ways(model: Any, data: dict[str, JobData], sizes: Sizes, tail: str = "") -> dict[str, Way]:
    """All jobs one after the other, in the eager ways that do not pad. tail: of their names."""
    peft = Peft(model, data, sizes.budget)

    def way(batches: Callable[..., Any]) -> Way:
        def unit(steps: range) -> tuple[float, int]:
            numbers = ((own, number) for own in data.values() for step in steps for number in own.global_batch(step))
            return peft.unit(steps, batches), sum(own.samples[number].num_tokens for own, number in numbers)

        return Way(unit, sizes.warmup, every=sizes.every(sizes.rounds)[sizes.lead :])

    return {f"peft_packed{tail}": way(peft.packed), f"peft_rows{tail}": way(peft.rows)}


def run_units(label: str, ways: dict[str, Way], lead: int = 0, keep: int = 0) -> None:
    """In turn, each way first equally often. lead: units of the first way, ahead of all others. keep: units of each that are
    left for another time."""
    names = [*ways]
    for _ in range(lead):
        run_unit(label, names[0], ways[names[0]])
    for number in range(max((len(way.every) - way.done for way in ways.values()), default=0) - keep):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            run_unit(label, name, ways[name])


def run_unit(label: str, name: str, way: Way) -> None:
    """The way's next one."""
    number = way.done
    way.run(way.every[number])
    said = way.error or f"{way.seconds[-1]:.2f} s, {way.tokens[-1]} tokens"
    print(f"{label} unit {number} {name}: {said}", flush=True)


def measured_row(case: TrainCase, options: Options) -> dict[str, Any]:
    """All ways in turn. Then PEFT's eager ways again with liger-kernel, which changes transformers for good."""
    sizes, device = TOY if options.tiny else Sizes(), options.device
    config, frozen = frozen_model(case.shape, case.layers, options)
    predicted: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(
            shared_copy(frozen), device, sizes.budget, sizes.longest, sizes.every(sizes.window)[-1].stop,
            Path(scratch), sizes.mu_shift, sizes.batch,
        )  # fmt: skip
        data = {job.name: job.data for job in trainer.jobs}
        ways = {"packlora": packlora_way(trainer, sizes, predicted)}
        ways |= peft_ways(shared_copy(frozen), data, sizes)
        most = max(data.values(), key=lambda own: int(own.planned.lengths.sum()))
        mode = modes(device)[-1]
        compiled = OneShape(shared_copy(frozen), most, sizes.width, sizes.rows, mode)
        ways["peft_compiled"] = Way(compiled.unit, sizes.warmup, every=sizes.every(sizes.rounds)[sizes.lead :])
        run_units(case.label, ways, sizes.lead)
    if device.type == "cuda":
        print(use_liger(device), flush=True)
        again = peft_ways(frozen_model(case.shape, case.layers, options)[1], data, sizes, "_liger")
        run_units(case.label, again)
        ways |= again
    row = row_of(case, ways)
    row |= {"layers": config.num_hidden_layers, "profile": trainer.profile.origin}
    if row["tokens_per_s"].get("packlora"):
        row["predicted_tokens_per_s"] = sum(ways["packlora"].tokens) / sum(predicted)
    del frozen, trainer, ways
    forget(device)
    return row


def row_of(case: TrainCase, ways: dict[str, Way]) -> dict[str, Any]:
    """tokens_per_s: after the start. start_s: what the start takes beyond its tokens. with_start_tokens_per_s: of all units of
    the four jobs and one start."""
    done = {name: way for name, way in ways.items() if way.error is None}
    rates = {name: way.rate() for name, way in done.items()}
    starts = {name: way.start() for name, way in done.items()}
    tokens = max((sum(way.tokens) for way in done.values()), default=0)
    return {
        "part": case.part, "case": case.label, "key": case.key, "tokens": tokens,
        "warmup": {name: way.warmup for name, way in ways.items()},
        "seconds": {name: way.seconds for name, way in ways.items()},
        "unit_tokens": {name: way.tokens for name, way in ways.items()},
        "tokens_per_s": rates, "start_s": starts,
        "with_start_tokens_per_s": {name: tokens / (starts[name] + tokens / rates[name]) for name in done},
        "failed": {name: way.error for name, way in ways.items() if way.error is not None},
    }  # fmt: skip


def best_peft(rates: dict[str, float]) -> tuple[str, float] | None:
    """PEFT's fastest way and its rate."""
    peers = {name: rate for name, rate in rates.items() if name.startswith("peft")}
    return max(peers.items(), key=lambda item: item[1]) if peers else None


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted; None where one could not be measured."""
    out: dict[str, Any] = {}
    for row in rows:
        key = f"train_{row['key']}"
        out[f"{key}_predicted_tokens_per_s"] = row.get("predicted_tokens_per_s")
        for start in ("", "with_start_"):
            rates = row[f"{start}tokens_per_s"]
            own, best = rates.get("packlora"), best_peft(rates)
            out[f"{key}_{start}tokens_per_s"] = own
            out[f"{key}_{start}vs_peft_best"] = own / best[1] if own and best else None
            out[f"{key}_{start}peft_best"] = best and best[0]
    return out


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Lines of case, way, tokens per second, the same with the start, seconds of the start."""
    return [
        [
            row["case"], name, f"{rate:.0f}", f"{row['with_start_tokens_per_s'][name]:.0f}", f"{row['start_s'][name]:.1f}",
        ]
        for row in rows
        for name, rate in row["tokens_per_s"].items()
    ]  # fmt: skip
