"""`benchmarks workloads`: LoRAFusion's five workloads, four jobs each, by packlora, by PEFT, and by PEFT on its kernels.

    python -m benchmarks workloads --out workloads-h200.json --parts xsum          # one to three minutes a workload
    python -m benchmarks workloads --out workloads-8-layers.json --layers 8        # all five in as many minutes

The shape of Llama-3.1-8B, samples as long as those of the workloads (lengths.json; estimates). What merging tails of global
batches saves is measured beside it, and what integer programs save is counted. LoRAFusion's kernels are fetched when they are
first measured (peers/sources.py).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.model import shared_copy, use_liger
from benchmarks.modes import forget
from benchmarks.options import PARTS, Options, Outcome, choose
from benchmarks.peers.kernels import use_lorafusion
from benchmarks.peers.sources import SOURCES, fetched
from benchmarks.results import text_table
from benchmarks.schedule_cases import LENGTHS, SETS, are_estimates, draw_lengths
from benchmarks.small_train import Way, frozen_model, row_of, run_units
from benchmarks.studies.short_jobs import (
    DROPOUT,
    Peft,
    ShortJob,
    prepared_run,
    samples_of,
    timed_window,
    trainer_of,
)
from packlora.data.dataset import JobData
from packlora.plans.timing import geomean
from packlora.runtime.trainer import Trainer
from packlora.schedule.planner import WINDOW_ROUNDS, Planner

OWN, APART = "packlora", "packlora_apart"
CONTENDERS = [OWN, APART, "peft_packed", "peft_rows", "lorafusion_packed", "lorafusion_rows"]
NAMES = list(PARTS["workloads"])
RANK, BATCH, BUDGET = 16, 8, 6144
ROUNDS, WARMUP, UNITS = 2, 1, 3
"""Optimizer steps of each job in a unit, on average in packlora's; units that are not counted, and those that are: their median
leaves out one that compiles kernels."""
METHODS = ("greedy", "auto")
SHRUNK = 128
"""Lengths and budget of a toy are this part of the true ones."""
PROTOCOL = (
    "{layers} layers of Llama-3.1-8B's shape, random bfloat16 weights. Four LoRA jobs, r {rank} on all linear layers, alpha"
    " 2 r, dropout {dropout}, {batch} samples an optimizer step, loss on all tokens, AdamW, clipping; lengths of each "
    "workload as in `bench schedule`, at most {cap} (rows with estimates: true are of ESTIMATED distributions). At most "
    "{budget} tokens a microbatch. packlora: the training loop, float32 adapters, {window} rounds planned together "
    "as in training, of whose microbatches a unit is {rounds} {window}ths; packlora_apart: each round planned alone, so that "
    "no global batch's tail shares a microbatch with the next. peft: "
    "bfloat16 adapters, one job after the other; packed: first fit in rows with position_ids; rows: all tokens of a global "
    "batch cut into rows of 1024, samples see each other, the easiest for it. lorafusion: the same two with LoRAFusion's "
    "kernels ({commit}, TMA forward) in PEFT's layers; its scheduler and several adapters in a batch are not run. {liger}. "
    "A unit is {rounds} optimizer steps of every job, {warmup} not counted, {units} counted; packlora's two ways in turn, then "
    "peft's, then lorafusion's. tokens_per_s: "
    "real tokens, median, optimizer steps included, planning beside training not. microbatches: of {window} rounds, by method "
    "(auto is what training uses; an integer program runs where a lower bound is not met), and apart."
)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    layers: int | None

    @property
    def key(self) -> str:
        return self.name

    @property
    def part(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        return f"workload {self.name}"


def cases(options: Options) -> list[Case]:
    layers = options.layers or (1 if options.tiny else None)
    return [Case(name, layers) for name in (NAMES[3:4] if options.quick else NAMES) if options.wants(name)]


def part_of(row: dict[str, Any]) -> str:
    part: str = row["part"]
    return part


# --- the ways ----------------------------------------------------------------------------------------------------------


def jobs_of(name: str, vocabulary: int, tiny: bool) -> list[ShortJob]:
    """Four jobs with samples as long as those of the workload, for the rounds of a window and one more."""
    jobs = []
    for number, kind in enumerate(SETS[name]):
        lengths = draw_lengths(kind, BATCH * (WINDOW_ROUNDS + 1), number)
        lengths = (lengths // SHRUNK).clip(min=2) if tiny else lengths
        jobs.append(ShortJob(f"{number}-{kind}", RANK, BATCH, samples_of(lengths, vocabulary, number)))
    return jobs


def packlora_way(name: str, trainer: Trainer) -> Way:
    """The training loop: of OWN a unit is a part of a window as training has it, of APART some rounds, each a window."""
    planned, budget = [job.data.planned for job in trainer.jobs], trainer.budget.tokens
    if name == APART:
        alone = Planner(planned, budget, window_rounds=1)
        units = [[alone.window(start + round) for round in range(ROUNDS)] for start in range(0, WINDOW_ROUNDS, ROUNDS)]
    else:
        whole = Planner(planned, budget).window(0)
        each = max(1, len(whole.microbatches) * ROUNDS // WINDOW_ROUNDS)
        starts = range(0, len(whole.microbatches), each)
        units = [[replace(whole, microbatches=whole.microbatches[start : start + each])] for start in starts]

    def unit(steps: range) -> tuple[float, int]:
        windows = units[steps.start // ROUNDS]
        tokens = sum(microbatch.num_tokens for window in windows for microbatch in window.microbatches)
        return sum(timed_window(trainer, window) for window in windows), tokens

    return Way(unit, WARMUP, every=_every())


def peft_ways(model: Any, data: dict[str, JobData], budget: int, names: Sequence[str], peer: str) -> dict[str, Way]:
    """PEFT's loop, packed and in rows; with LoRAFusion's kernels where that is the peer."""
    if not any(name.startswith(peer) for name in names):
        return {}
    peft = Peft(model, data, budget, dict.fromkeys(data, RANK))
    if peer == "lorafusion":
        use_lorafusion(peft.model, tma=True)

    def way(batches: Callable[..., Any]) -> Way:
        def unit(steps: range) -> tuple[float, int]:
            numbers = ((own, number) for own in data.values() for step in steps for number in own.global_batch(step))
            return peft.unit(steps, batches), sum(own.samples[number].num_tokens for own, number in numbers)

        return Way(unit, WARMUP, every=_every())

    made = {f"{peer}_packed": way(peft.packed), f"{peer}_rows": way(peft.rows)}
    return {name: own for name, own in made.items() if name in names}


def _every() -> list[range]:
    return [range(number * ROUNDS, (number + 1) * ROUNDS) for number in range(WARMUP + UNITS)]


def microbatches(trainer: Trainer) -> dict[str, int]:
    """How many there are in the rounds of a window, by method, and with each round planned alone."""
    out = {}
    for name, method, window in [*((method, method, WINDOW_ROUNDS) for method in METHODS), ("apart", "auto", 1)]:
        planner = Planner(
            [job.data.planned for job in trainer.jobs], trainer.budget.tokens, method=method, window_rounds=window
        )
        out[name] = sum(len(planner.window(start).microbatches) for start in range(0, WINDOW_ROUNDS, window))
    return out


def measured_row(case: Case, names: Sequence[str], options: Options) -> dict[str, Any]:
    """packlora's ways, then the peers', on the same frozen weights: side by side they would need more than 80 GB."""
    config, frozen = frozen_model("8B", case.layers, options)
    budget = BUDGET // SHRUNK if options.tiny else BUDGET
    jobs = jobs_of(case.name, config.vocab_size, options.tiny)
    ways, data, counts = packlora_measured(case, frozen, jobs, budget, names, options)
    for peer in ("peft", "lorafusion"):
        ways |= measured(case, peft_ways(shared_copy(frozen), data, budget, names, peer), options)
    return row_of(case, ways) | {  # type: ignore[arg-type]
        "layers": config.num_hidden_layers, "estimates": are_estimates(SETS[case.name]), "rounds": WINDOW_ROUNDS,
        "microbatches": counts,
    }  # fmt: skip


def packlora_measured(
    case: Case, frozen: Any, jobs: Sequence[ShortJob], budget: int, names: Sequence[str], options: Options
) -> tuple[dict[str, Way], dict[str, JobData], dict[str, int]]:
    """packlora's ways, the jobs' data for the others, and the numbers of microbatches."""
    with contextlib.ExitStack() as scratch:

        def trainer(model: Any) -> Trainer:
            folder = Path(scratch.enter_context(tempfile.TemporaryDirectory()))
            return trainer_of(*prepared_run(model, options.device, budget, WINDOW_ROUNDS, folder, jobs), folder)

        trainers = {name: trainer(shared_copy(frozen)) for name in (OWN, APART) if name in names}
        counts = microbatches(trainers[OWN])
        data = {job.name: job.data for job in trainers[OWN].jobs}
        ways = measured(case, {name: packlora_way(name, own) for name, own in trainers.items()}, options)
    del trainers
    forget(options.device)
    return ways, data, counts


def measured(case: Case, ways: dict[str, Way], options: Options) -> dict[str, Way]:
    """Run in turn; what is returned holds no model."""
    run_units(case.label, ways)
    done = {name: replace(way, unit=_over) for name, way in ways.items()}
    ways.clear()
    forget(options.device)
    return done


def _over(steps: range) -> tuple[float, int]:
    raise RuntimeError(f"steps {steps}: all units were run")


def run(options: Options) -> Outcome:
    """Measure; prints a line per unit of each way.

    Raises:
        InputError: LoRAFusion's sources are not here and cannot be fetched.
    """
    names, chosen = choose(options.only, CONTENDERS, [], cases(options), OWN)
    if options.tiny:
        names = [name for name in names if not name.startswith("lorafusion")]  # its kernels need a GPU
    if any(name.startswith("lorafusion") for name in names):
        fetched("lorafusion")
    rows, liger = list(options.kept), use_liger(options.device)
    for case in options.each(chosen, rows):
        rows.append(measured_row(case, names, options))
    rows.sort(key=lambda row: NAMES.index(part_of(row)))
    protocol = PROTOCOL.format(
        layers=rows[0]["layers"], rank=RANK, dropout=DROPOUT, batch=BATCH, cap=LENGTHS["cap_tokens"], budget=BUDGET,
        rounds=ROUNDS, window=WINDOW_ROUNDS, commit=SOURCES["lorafusion"].commit[:7], liger=liger, warmup=WARMUP, units=UNITS,
    )  # fmt: skip
    return Outcome(protocol, rows, options.keys(summary(rows), by_case=True), table(rows))


# --- figures -----------------------------------------------------------------------------------------------------------


def best(row: dict[str, Any], peer: str) -> float | None:
    """Tokens per second of a peer's faster way."""
    return max((rate for name, rate in row["tokens_per_s"].items() if name.startswith(peer)), default=None)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted, by workload and over all five; None where one could not be measured."""
    out: dict[str, Any] = {}
    ratios: dict[str, list[float | None]] = {"vs_peft_best": [], "vs_lorafusion_best": [], "merging": []}
    by_name = {row["key"]: row for row in rows}
    for name in NAMES:
        row = by_name.get(name, {"tokens_per_s": {}})
        own = row["tokens_per_s"].get(OWN)
        out[f"{name}_tokens_per_s"] = own
        others = best(row, "peft"), best(row, "lorafusion"), row["tokens_per_s"].get(APART)
        for (key, known), other in zip(ratios.items(), others, strict=True):
            known.append(own / other if own and other else None)
            out[f"{name}_{key}"] = known[-1]
    out |= {f"workloads_{key}": geomean(known) for key, known in ratios.items()}
    counts = [row["microbatches"] for row in rows] if by_name.keys() == set(NAMES) else []
    for key, with_it, without in (("milp", "auto", "greedy"), ("merging", "auto", "apart")):
        whole = sum(own[with_it] for own in counts)
        out[f"microbatches_without_{key}"] = sum(own[without] for own in counts) / whole if whole else None
    return out


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Workload, tokens/s of each way, microbatches by method."""
    cells = [
        [
            row["case"], *(f"{row['tokens_per_s'][name]:.0f}" if name in row["tokens_per_s"] else "-" for name in CONTENDERS),
            " / ".join(f"{name} {count}" for name, count in row["microbatches"].items()),
        ]
        for row in rows
    ]  # fmt: skip
    return text_table(["tokens/s", *CONTENDERS, "microbatches"], cells)
