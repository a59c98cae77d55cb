"""`small`: where the host decides. Small models, single layers and training of short samples, in every mode of torch.compile.

Each side is compared in its best mode: as it is, under torch.compile, or with CUDA graphs that torch.compile records. Compiling
takes most of the time, so it is run in pieces that add to one file: `--only train`, `--only lora,dora`, `--only model`, each of
which goes on with `--resume`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import (
    MODES,
    Inputs,
    adapted_copy,
    compiling,
    forget,
    in_mode,
    layer_work,
    modes,
    started,
    work,
)
from benchmarks.harness import Benchmark, Case, Options, Row, case, timed
from benchmarks.layers import dora_layer_cases, layer_cases
from benchmarks.shapes import SHORT, build, config_of, shared_copy, use_liger
from benchmarks.training import (
    JOBS,
    Lengths,
    OneShape,
    Peft,
    ShortJob,
    Way,
    best,
    in_turn,
    lora,
    make_samples,
    peft_ways,
    prepared_run,
    row_of,
    timed_window,
    trainer_of,
    units,
)
from packlora.schedule.planner import WINDOW_ROUNDS, Planner
from packlora.tune.timing import Work

OWN, PEER, RANK = "packlora", "peft_bf16", 16
MODELS = [
    ("8x0.6B", 1, False), ("8x0.6B", 1, True), ("8x0.6B", 4, False), ("4x8B", 1, False), ("4x8B", 1, True),
    ("0.6B", 1, False), ("1.7B", 1, False), ("0.6B", 4, False),
]  # fmt: skip
"""Layers and shape, samples of 2048 tokens, DoRA; the cheapest first. The first is compiled as one graph; of the others the
decoder layers are compiled, which share a graph: as one, 28 layers take minutes in each mode and for each contender."""
BUDGET, BATCH = 8192, 32
ROUNDS, LEAD, WARMUP, UNITS = 2, 1, 1, 3
"""Optimizer steps of each job in a unit of PEFT's; units that the training loop runs ahead of all others, for it meets new
shapes of microbatches for as long; units of every way that count for its start alone; counted units."""


def small_cases(options: Options) -> list[Case]:
    known, out = modes(options.device), []
    for name, samples, dora in MODELS[:1] if options.quick else MODELS:
        of = f"model {name} {samples}x2048 {'dora' if dora else 'lora'}_r{RANK}"
        out += [
            case(f"{of} {mode}", part="models", of=of, mode=mode, dora=dora, name=name, samples=samples)
            for mode in known
        ]
    layers = [*(("lora", one) for one in layer_cases(options)), *(("dora", one) for one in dora_layer_cases(options))]
    for kind, one in layers[-1:] if options.tiny else layers:
        of, values = (
            f"{kind} {one.label.removeprefix('layer ')}",
            {key: one.values[key] for key in ("K", "N", "T", "r", "dropout")},
        )
        out += [case(f"{of} {mode}", part="layers", of=of, mode=mode, dora=kind == "dora", **values) for mode in known]
    trained = {"0.6B": "06b", "8x8B": "8b"}
    chosen = list(trained.items())[:1] if options.quick else trained.items()
    return [*out, *(case(f"train {name}", part="train", name=name, key=key) for name, key in chosen)]


def shape_of(name: str, tiny: bool, **changes: Any) -> Any:
    """The configuration of `8x0.6B`, so many layers of a shape, or `0.6B`, all of them; one layer of a toy."""
    layers, _, shape = name.rpartition("x")
    return config_of(SHORT[shape], tiny, 1 if tiny else int(layers) if layers else None, **changes)


def measure_small(one: Case, names: list[str], options: Options) -> Row:
    if one.part == "train":
        return measure_train(one, names, options)
    seconds: dict[str, float] = {}
    device = options.device
    if one.part == "models":
        config = shape_of(one.name, options.tiny, vocab_size=512)  # no head and no loss take part
        base = options.shared(("small", one.name), lambda: build(config, device))
        length = 16 if options.tiny else 2048

        def make(name: str, checks: Any) -> Work:
            return model_work(name, one, base, length)

        settings: dict[str, Any] = {"seconds": 1.5, "rounds": (5, 30), "flush": False}
    else:
        inputs = Inputs.random(one.K, one.N, one.T, one.r, one.dropout, device, one.dora)

        def make(name: str, checks: Any) -> Work:
            return layer_work(name, inputs, partial(in_mode, mode=one.mode, device=device), checks)

        names = [name for name in names if name != "frozen"]
        settings = {"seconds": 0.1, "rounds": (5, 15)}
    contenders = [started(name, partial(make, name), one.mode, device, seconds) for name in names]
    row = timed(contenders, options, wall=True, **settings)
    del contenders, make
    forget(device)
    return row | {"compile_s": seconds}


def model_work(name: str, one: Case, base: Any, length: int) -> Work:
    """The decoder's layers from embeddings to hidden states, and back from an upstream gradient."""
    device = next(base.parameters()).device
    model, note = adapted_copy(name, base, RANK, 0.0, dora=one.dora)
    inner = (model if name == "frozen" else model.get_base_model()).model
    whole = (one.name, one.samples, one.dora) == MODELS[0]
    for layer in inner.layers if one.mode != "eager" and not whole else ():
        layer.compile(**compiling(one.mode, device))
    call = in_mode(inner, one.mode, device) if whole else inner
    torch.manual_seed(0)
    shape = (one.samples, length, model.get_input_embeddings().embedding_dim)
    x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    positions = torch.arange(length, device=device).expand(one.samples, -1).contiguous()

    def forward(x: torch.Tensor) -> torch.Tensor:
        out: Any = call(inputs_embeds=x, position_ids=positions, attention_mask=None, use_cache=False)
        return out.last_hidden_state  # type: ignore[no-any-return]

    return work(forward, x.requires_grad_(), dy, [p for p in model.parameters() if p.requires_grad], note)


def measure_train(one: Case, names: list[str], options: Options) -> Row:
    """All ways in turn; then PEFT's eager ways again with liger-kernel, which changes transformers for good."""
    tiny, device = options.tiny, options.device
    budget, longest, batch, rounds, window, counted = (512, 128, 2, 1, 1, 1) if tiny else (
        BUDGET, 2048, BATCH, ROUNDS, WINDOW_ROUNDS, UNITS
    )  # fmt: skip
    config = shape_of(one.name, tiny)
    frozen, number = build(config, device), LEAD + WARMUP + counted
    own_units, peer_units = units(window, number), units(rounds, number - LEAD, LEAD)
    jobs = []
    for at, (name, (lengths, rank)) in enumerate(JOBS.items()):
        shifted = Lengths(lengths.mu - (2.5 if tiny else 0.0), lengths.sigma, lengths.source)
        samples = make_samples(shifted, batch * (own_units[-1].stop + 1), longest, config.vocab_size, at)
        jobs.append(ShortJob(name, rank, batch, samples))
    predicted: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        made = prepared_run(shared_copy(frozen), device, budget, own_units[-1].stop, Path(folder), jobs)
        trainer = trainer_of(*made, Path(folder))
        data = {job.name: job.data for job in trainer.jobs}
        configs = {name: lora(rank) for name, (_, rank) in JOBS.items()}
        planner = Planner([own.planned for own in data.values()], trainer.budget.tokens, window_rounds=window)

        def unit(steps: range) -> tuple[float, int]:
            own = planner.window(steps.start)
            microbatches = [microbatch for microbatch in own.microbatches if not microbatch.is_noop]
            predicted.append(sum(trainer.profile.seconds(microbatch) for microbatch in microbatches))
            return timed_window(trainer, own), sum(microbatch.num_tokens for microbatch in microbatches)

        ways = {OWN: Way(unit, own_units, LEAD + WARMUP)}
        ways |= peft_ways(Peft(shared_copy(frozen), data, configs, budget), peer_units, WARMUP)
        most = max(data.values(), key=lambda own: int(own.planned.lengths.sum()))
        width, rows = (32, 1) if tiny else (1024, 4)
        compiled = OneShape(shared_copy(frozen), most, width, rows, modes(device)[-1])
        ways["peft_compiled"] = Way(compiled.unit, peer_units, WARMUP)
        in_turn(one.label, ways, LEAD)
    if device.type == "cuda":
        print(use_liger(device), flush=True)
        again = peft_ways(Peft(build(config, device), data, configs, budget), peer_units, WARMUP, tail="_liger")
        in_turn(one.label, again)
        ways |= again
    row = row_of(ways) | {"layers": config.num_hidden_layers, "profile": trainer.profile.origin}
    if OWN in row["tokens_per_s"]:
        row["predicted_tokens_per_s"] = sum(ways[OWN].tokens) / sum(predicted)
    del frozen, made, ways, compiled
    forget(device)
    return row


# --- figures -----------------------------------------------------------------------------------------------------------


def wall(row: Row) -> dict[str, float]:
    """Milliseconds on the wall by contender; on a CPU all are."""
    times: dict[str, float] = row["wall_ms" if "wall_ms" in row else "ms"]
    return times


def best_mode(rows: Sequence[Row], of: str, name: str, among: Sequence[str] = MODES) -> tuple[str, float] | None:
    """The mode in which a contender takes least time in a case, and the milliseconds; None where it failed in all."""
    found = [(row["mode"], wall(row)[name]) for row in rows if row.get("of") == of and name in wall(row)]
    return min((one for one in found if one[0] in among), key=lambda one: one[1], default=None)


def against_peft(rows: Sequence[Row], of: str, among: Sequence[str] = MODES) -> float | None:
    """Time of PEFT in its best mode over packlora's in its best of `among`."""
    own, peer = best_mode(rows, of, OWN, among), best_mode(rows, of, PEER)
    return peer[1] / own[1] if own and peer else None


def small_summary(rows: list[Row]) -> Row:
    """worst_wall_vs_peft is None, not a minimum over fewer cases, where a case of models or layers has no figure."""
    out: Row = {}
    for key, of in (("8x06b", "8x0.6B 1x2048 lora"), ("8x06b_dora", "8x0.6B 1x2048 dora"), ("17b", "1.7B 1x2048 lora")):
        out[f"compiled_{key}_2048_vs_peft_best"] = against_peft(rows, f"model {of}_r16", MODES[1:])
    ratios = {row["of"]: against_peft(rows, row["of"]) for row in rows if row["part"] != "train"}
    known = {of: value for of, value in ratios.items() if value is not None}
    whole = {one.of for one in small_cases(Options(torch.device("cuda"))) if one.part != "train"} <= known.keys()
    out["worst_wall_vs_peft"] = min(known.values()) if whole else None
    out["worst_wall_vs_peft_case"] = min(known, key=known.__getitem__) if whole else None
    out["wall_cases"] = len(known)
    out |= {f"train_{key}": None for key in ("06b_tokens_per_s", "06b_vs_peft_best", "8b_vs_peft_best")}
    for row in (row for row in rows if row["part"] == "train"):
        key = f"train_{row['key']}"
        out[f"{key}_predicted_tokens_per_s"] = row.get("predicted_tokens_per_s")
        for start in ("", "with_start_"):
            speeds = row[f"{start}tokens_per_s"]
            own, peer = speeds.get(OWN), best(speeds, "peft")
            out[f"{key}_{start}tokens_per_s"] = own
            out[f"{key}_{start}vs_peft_best"] = own / peer[1] if own and peer else None
            out[f"{key}_{start}peft_best"] = peer and peer[0]
    return out


SMALL = Benchmark(
    small_cases, measure_small, small_summary,
    "models: decoder layers of models (8x0.6B: 8 layers of Qwen3-0.6B's shape, 4x8B: 4 of Llama-3.1-8B's, 0.6B and "
    "1.7B: whole), random bfloat16 weights, from embeddings to hidden states and back from a random upstream "
    "gradient, samples of 2048 tokens. frozen: no adapter, forward and input gradient. peft_bf16: the PEFT model "
    "with bfloat16 adapters, LoRA or DoRA r 16, alpha 32, no dropout, B not zero. packlora: packlora.accelerate on "
    "it. Each in three modes: eager; compiled: torch.compile; reduce-overhead: "
    "torch.compile(mode='reduce-overhead'); of the model for 8x0.6B with LoRA and one sample, else of each decoder "
    "layer. Compiled, transformers gives attention a mask tensor, to all sides alike. layers: the cases of the "
    "benchmark layer and of the layers of dora, packlora by accelerate() and PEFT with bfloat16 adapters, in the "
    "same modes; without dropout packlora's results are compared with PEFT's eager layer first. The contenders of "
    "one mode run in turn inside one loop, in a new random order each round; wall_ms: 15 more rounds in which each "
    "run is waited for, medians. A side's best mode is that of its least wall_ms; a figure against PEFT's best is "
    "the ratio of these medians. For layers L2 is flushed before each run. compile_s: of the first three runs, "
    "in a process that may have compiled other cases. train: four jobs of short samples (ranks 8 to "
    f"64, dropout 0.1, {BATCH} samples a step of a job, at most {BUDGET} tokens a microbatch, log-normal lengths) in "
    f"the training loop's own windows of {WINDOW_ROUNDS} steps of each job; PEFT one job after the other with "
    "bfloat16 adapters: packed into rows that keep samples apart; in rows of 1024 tokens that do not; both again "
    "with liger-kernel; compiled: the job with the most tokens, r 16, its tokens as one stream in batches of 4 x "
    "1024, reduce-overhead, no padding; its rate stands for all four jobs and its start counts once. Optimizer "
    f"steps included, real tokens, planning beside training not counted. tokens_per_s: median over {UNITS} units, "
    f"windows or {ROUNDS} steps of each job, after {WARMUP}, and for packlora after {LEAD} more. with_start: over as "
    "many tokens as packlora trains on, and what compiling, recording graphs and choosing plans took. predicted: "
    "the profiler's, for the microbatches alone.",
    ["frozen", OWN, PEER], by_case=True,
)  # fmt: skip
