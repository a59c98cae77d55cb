"""`python -m benchmarks sweep`: sixteen candidates of a sweep trained together, beside PEFT, which trains one after the other.

    python -m benchmarks sweep --out sweep-h200.json               # 8 decoder layers, a minute or two
    python -m benchmarks sweep --out sweep-8b.json --layers 32     # the whole model; compiling it under PEFT takes minutes

Samples and the loop are those of `benchmarks small` (small_train.py, studies/short_jobs.py). All candidates of PEFT are
alike, so one of them is timed.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.model import shared_copy
from benchmarks.modes import forget, modes
from benchmarks.options import Options, Outcome, choose
from benchmarks.results import text_table
from benchmarks.small_train import (
    COMPILED_RANK,
    OneShape,
    Sizes,
    TrainCase,
    Way,
    frozen_model,
    packlora_way,
    row_of,
    run_units,
)
from benchmarks.studies.short_jobs import DROPOUT, JOBS, ShortJob, make_samples, prepared_run, trainer_of
from packlora.data.dataset import JobData
from packlora.runtime.memory import free_memory

OWN, PEER = "packlora", "peft_compiled"
CONTENDERS = [OWN, PEER]
SHAPE, LAYERS = "8B", 8
RANKS = (8, 16, 32, 64)
RATES = (5e-5, 1e-4, 2e-4, 5e-4)
ROWS = 2
"""Of a compiled batch, whose tokens are those of one optimizer step."""
PEER_STEPS = 8
"""Steps of PEFT's candidate for each step of all candidates: enough to be timed."""
SIZES = Sizes(longest=1024, batch=16, rounds=2, lead=1, warmup=1, units=3, rows=ROWS)
TOY = Sizes(512, 64, -2.5, batch=4, rounds=1, window=1, lead=1, warmup=1, units=2, rows=ROWS)
PROTOCOL = (
    "{layers} layers of Llama-3.1-8B's shape, random bfloat16 weights. {candidates} LoRA candidates (ranks "
    "{ranks}, learning rates {rates}) on all linear layers, alpha 2 r, dropout {dropout}, AdamW, clipping, all on"
    " the same samples: random tokens, lengths {lengths}, at most {longest}, {batch} samples an optimizer step, "
    "loss on all tokens. packlora: the training loop's own windows, all candidates together, at most {budget} "
    "tokens a microbatch, float32 adapters. peft_compiled: one candidate alone, r {rank}, bfloat16 adapters, "
    "torch.compile (reduce-overhead), a step's tokens as one batch of one shape without padding, samples see each"
    " other; candidates are trained one after the other and are alike, so its rate stands for all, and its start "
    "counts once, though each rank and each process compiles anew. A unit is a window of {window} steps of every "
    "candidate, and {peer_rounds} steps of PEFT's; {lead} units of packlora's count for its start alone, for it "
    "meets new shapes of microbatches, and {warmup} of each; {units} are counted, in turn. tokens_per_s: real "
    "tokens, median of the units, optimizer steps included, planning beside training not. start_s: what all units"
    " took beyond that. gib: frozen weights and the most that each way has allocated beyond them, and the most "
    "that torch held for it, recorded graphs included; made and run alone up to its counted units."
)


@dataclass(frozen=True, slots=True)
class Case(TrainCase):
    """layers: those that are run, of a toy on a CPU."""

    @property
    def label(self) -> str:
        return f"sweep {self.layers}x{self.shape}"


def cases(options: Options) -> list[Case]:
    return [Case(SHAPE, options.layers or (1 if options.tiny else LAYERS), "sweep", "sweep")]


def candidates(sizes: Sizes, steps: int, vocabulary: int, quick: bool) -> list[ShortJob]:
    """Each rank with each learning rate, on the same samples. steps: of each candidate."""
    lengths = JOBS["synopsis"][0]
    shifted = type(lengths)(lengths.mu + sizes.mu_shift, lengths.sigma, lengths.source)
    samples = make_samples(shifted, sizes.batch * (steps + 1), sizes.longest, vocabulary, 0)
    pairs = [*itertools.product(RANKS, RATES)][:: 4 if quick else 1]
    return [ShortJob(f"r{rank}-lr{rate:g}", rank, sizes.batch, samples, lr=rate) for rank, rate in pairs]


def peer_steps(steps: range) -> range:
    return range(steps.start * PEER_STEPS, steps.stop * PEER_STEPS)


def width_of(data: JobData, every: Sequence[range]) -> int:
    """The most tokens of a row with which each step of PEFT's has one batch in every unit."""
    tokens = [
        sum(data.samples[number].num_tokens for step in peer_steps(steps) for number in data.global_batch(step))
        // len(peer_steps(steps))
        for steps in every
    ]
    return max(8, min(tokens) // ROWS // 8 * 8)


def peft_way(model: Any, data: JobData, sizes: Sizes) -> Way:
    """One candidate, compiled."""
    device = next(model.parameters()).device
    every = sizes.every(sizes.rounds)[sizes.lead :]
    one = OneShape(model, data, width_of(data, every), ROWS, modes(device)[-1], COMPILED_RANK)
    return Way(lambda steps: one.unit(peer_steps(steps)), sizes.warmup, every=every)


class Memory:
    """What a way takes beyond what was there before it, with the bytes of the frozen weights."""

    def __init__(self, device: torch.device, weights: int) -> None:
        self.device, self.weights = device, weights
        free_memory(device)
        self.before = (0, 0)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    def peak_gib(self) -> list[float] | None:
        """Most that was allocated, and most that torch held for it. None on a CPU, where both are of the whole process."""
        if self.device.type != "cuda":
            return None
        most = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return [(self.weights + now - before) / 2**30 for now, before in zip(most, self.before, strict=True)]


def measured_row(case: Case, names: Sequence[str], options: Options) -> dict[str, Any]:
    """All ways in turn, after each one's start."""
    sizes, device = TOY if options.tiny else SIZES, options.device
    config, frozen = frozen_model(case.shape, case.layers, options)
    weights = sum(parameter.nbytes for parameter in frozen.parameters())
    if not options.tiny and options.layers is None:
        print(
            f"{case.layers} of the model's layers, so that it takes a minute or two; --layers 32 runs all", flush=True
        )
    steps = max(sizes.every(sizes.window)[-1].stop, sizes.every(sizes.rounds)[-1].stop * PEER_STEPS)
    jobs = candidates(sizes, steps, config.vocab_size, options.quick and options.tiny)
    gib: dict[str, list[float] | None] = {}
    predicted: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        memory = Memory(device, weights)
        made = prepared_run(shared_copy(frozen), device, sizes.budget, steps, Path(scratch), jobs)
        trainer = trainer_of(*made, Path(scratch))
        ways = {OWN: packlora_way(trainer, sizes, predicted)}
        run_units(case.label, ways, keep=sizes.units)
        gib[OWN] = memory.peak_gib()
        if PEER in names:
            memory = Memory(device, weights)
            ways[PEER] = peft_way(shared_copy(frozen), trainer.jobs[0].data, sizes)
            run_units(case.label, {PEER: ways[PEER]}, keep=sizes.units)
            gib[PEER] = memory.peak_gib()
        run_units(case.label, ways)
    row = row_of(case, ways)
    row |= {"layers": config.num_hidden_layers, "candidates": len(jobs), "gib": gib}
    row["round_tokens"] = sum(ways[OWN].tokens) / max(1, len(ways[OWN].tokens)) / sizes.window
    del frozen, trainer, made, ways
    forget(device)
    return row


def run(options: Options) -> Outcome:
    """Measure; prints a line per unit of each way."""
    names, chosen = choose(options.only, CONTENDERS, [], cases(options), OWN)
    rows = list(options.kept)
    for case in options.each(chosen, rows):
        rows.append(measured_row(case, names, options))
    sizes, row = TOY if options.tiny else SIZES, rows[0]
    protocol = PROTOCOL.format(
        layers=row["layers"], candidates=row["candidates"], ranks=", ".join(map(str, RANKS)), dropout=DROPOUT,
        rates=", ".join(f"{rate:g}" for rate in RATES), lengths=JOBS["synopsis"][0].source, longest=sizes.longest,
        batch=sizes.batch, budget=sizes.budget, rank=COMPILED_RANK, window=sizes.window,
        peer_rounds=sizes.rounds * PEER_STEPS, lead=sizes.lead, warmup=sizes.warmup, units=sizes.units,
    )  # fmt: skip
    return Outcome(protocol, rows, options.keys(summary(rows)), table(rows))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted; None where one could not be measured."""
    out: dict[str, Any] = {}
    for row in rows:
        rate, starts = row["tokens_per_s"], row["with_start_tokens_per_s"]
        gib = {name: both or [None, None] for name, both in row["gib"].items()}
        both = OWN in rate and PEER in rate
        out |= {
            "sweep_tokens_per_s": rate.get(OWN), "sweep_peft_tokens_per_s": rate.get(PEER),
            "sweep_vs_peft": rate[OWN] / rate[PEER] if both else None,
            "sweep_with_start_vs_peft": starts[OWN] / starts[PEER] if both else None,
            "sweep_candidates": row["candidates"], "sweep_layers": row["layers"],
        }  # fmt: skip
        for key, name in (("sweep", OWN), ("sweep_peft", PEER)):
            out[f"{key}_gib"], out[f"{key}_reserved_gib"] = gib.get(name, [None, None])
    return out


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        for name, rate in row["tokens_per_s"].items():
            own, gib = row["tokens_per_s"].get(OWN), row["gib"].get(name)
            cells = [f"{rate:.0f}", f"{row['with_start_tokens_per_s'][name]:.0f}", f"{row['start_s'][name]:.1f}"]
            cells += ["-" if gib is None else f"{gib[0]:.1f}", f"{own / rate:.2f}" if own else "-"]
            lines.append([row["case"], name, *cells])
    return text_table(["case", "way", "tokens/s", "with the start", "start s", "GiB", "packlora over it"], lines)
