"""`layer`, `multi` and `dora`: one linear layer with LoRA, with four adapters in one batch, and with DoRA.

The frozen layer is forward and input gradient of the nn.Linear alone; all contenders run over the same weight, input, adapter
values and upstream gradient. `dora` also has the row norm, Scaling-DoRA's composition and its model benchmark.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import (
    SCALING,
    Call,
    Inputs,
    One,
    causal_lm,
    check_close,
    layer_work,
    operator,
    peft_layer,
    stepped,
    under_autocast,
    work,
)
from benchmarks.harness import Benchmark, Case, Options, Row, case, device_slug, timed
from benchmarks.peers.compose import compose
from benchmarks.peers.dora import dense_norm, factored_norm, identity_norm
from benchmarks.shapes import build, config_of, stored_bytes
from packlora.ops.row_norm.row_norm import row_norm, squared_row_norm
from packlora.tune.timing import Contender, Work, geomean

SHAPES = [(4096, 4096), (5120, 5120), (8192, 8192), (4096, 14336), (14336, 4096)]
"""K x N: square ones of LoRAFusion's kernel benchmark, and gate/up and down of Llama-3.1-8B."""
SWEEP_T = (4096, 6144, 12288, 16384)
TIMING = (
    "Contenders run in turn inside one loop, random order each round; L2 flushed before each run (256 MB written); "
    "CUDA events, no synchronisation inside the loop; ms are medians, ratios medians of the ratios within a round. "
    "ahead_: 15 more rounds in which the GPU waits before each run until the host has launched all of it: the GPU "
    "alone, as in a step of a large model. wall_: 15 more rounds in which each run is waited for. peak_mib: of one "
    "run beyond what was allocated before it. host_us: until the host had launched everything."
)


# --- one layer, LoRA ---------------------------------------------------------------------------------------------------


def layer_case(K: int, N: int, T: int, r: int = 16, dropout: float = 0.1, sweep: bool = False) -> Case:
    """sweep: for the curve over T alone, not for a table."""
    main = r == 16 and dropout == 0.1 and not sweep
    label = f"{K}x{N} T{T} r{r} p{dropout:g}"
    return case(label, K=K, N=N, T=T, r=r, dropout=dropout, main=main, sweep=sweep)


def layer_cases(options: Options) -> list[Case]:
    if options.tiny:
        return [layer_case(64, 96, 32), layer_case(64, 96, 64, dropout=0.0)]
    if options.quick:
        return [layer_case(4096, 4096, T, dropout=p) for T in (2048, 8192) for p in (0.1, 0.0)]
    out = [layer_case(K, N, T, dropout=p) for K, N in SHAPES for T in (2048, 8192) for p in (0.1, 0.0)]
    out += [layer_case(K, K, 8192, r) for K in (4096, 8192) for r in (64, 128, 384)]
    return out + [layer_case(K, K, T, sweep=True) for K in (4096, 5120, 8192) for T in SWEEP_T]


def inputs_of(one: Case, options: Options, dora: bool = False) -> Inputs:
    return Inputs.random(one.K, one.N, one.T, one.r, one.dropout, options.device, dora)


def layer_contenders(names: Iterable[str], inputs: Inputs) -> list[Contender]:
    return [Contender(name, partial(layer_work, name, inputs)) for name in names]


def measure_layer(one: Case, names: list[str], options: Options) -> Row:
    more = ["peft_compiled"] if one.main and options.whole else []
    contenders = layer_contenders([*names, *more], inputs_of(one, options))
    return timed(contenders, options, seconds=0.6, ahead=True)


def layer_summary(rows: list[Row]) -> Row:
    """Geometric means over the main cases by T and contender; a mean or a minimum is None where a case is missing."""
    out: Row = {}
    main = [row for row in rows if row["main"]]
    for T in sorted({row["T"] for row in main}):
        at = [row for row in main if row["T"] == T]
        for name in dict.fromkeys(name for row in at for name in [*row["over_frozen"], *row["failed"]]):
            key = f"over_frozen_T{T}_geomean" + ("" if name == "packlora" else f"_{name}")
            out[key] = geomean(row["over_frozen"].get(name) for row in at)
            if all("ahead_over_frozen" in row for row in at):
                out[f"ahead_{key}"] = geomean(row["ahead_over_frozen"].get(name) for row in at)
    best = {row["case"]: least(row["vs_peft"].get("packlora", {}).values()) for row in rows}
    known = {label: value for label, value in best.items() if value is not None}
    out["worst_vs_peft"] = least(best.values())
    out["worst_vs_peft_case"] = min(known, key=known.__getitem__) if known else None
    out["worst_fp32_vs_peft_fp32"] = least(
        row["vs_peft"].get("packlora_fp32", {}).get("peft_fp32_autocast") for row in rows
    )
    return out


def least(values: Iterable[float | None]) -> float | None:
    """The minimum; None where there is none or one of them is missing."""
    known = list(values)
    return None if None in known else min((value for value in known if value is not None), default=None)


def plot_throughput(rows: list[Row], out: Path) -> None:
    """Million tokens per second over T, by width and contender: the picture of docs/benchmarks.md."""
    from matplotlib.figure import Figure

    titles = {
        "frozen": ("frozen layer", "#8a8a8a"), "packlora": ("packlora", "#0b6e99"),
        "packlora_fp32": ("packlora, float32 adapters", "#53b3d1"), "peft_bf16": ("PEFT, bfloat16", "#d9822b"),
        "peft_fp32_autocast": ("PEFT, float32 adapters", "#b5483a"), "peft_compiled": ("PEFT, torch.compile", "#e8b96a"),
    }  # fmt: skip
    square = sorted(
        (row for row in rows if row["K"] == row["N"] and (row["main"] or row["sweep"])), key=lambda row: row["T"]
    )
    widths = sorted({row["K"] for row in square})
    figure = Figure(figsize=(4.2 * len(widths), 3.6))
    panels = figure.subplots(1, max(1, len(widths)), squeeze=False)[0]
    for panel, width in zip(panels, widths, strict=False):
        for name, (title, colour) in titles.items():
            points = [
                (row["T"], row["T"] / row["ms"][name] / 1e3)
                for row in square
                if row["K"] == width and name in row["ms"]
            ]
            panel.plot(
                *zip(*points, strict=True), "--" if name == "frozen" else "-", color=colour, label=title, marker="."
            )
        panel.set(title=f"{width} x {width}", xlabel="tokens T", ylim=(0, None))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("million tokens/s, forward + backward")
    panels[-1].legend(fontsize=7, frameon=False, loc="lower right")
    figure.savefig(out.with_name(f"{out.stem}-throughput.svg"), bbox_inches="tight")


LAYER = Benchmark(
    layer_cases, measure_layer, layer_summary,
    "Forward and backward of one linear layer in bfloat16, LoRA alpha = 2 r. packlora: packlora.accelerate on a "
    "real PEFT layer with bfloat16 adapters; _stepped: the adapters are written to before each run, as by an "
    "optimizer step; _fp32: with PEFT's default float32 adapters. peft_bf16, peft_fp32_autocast: PEFT's layer as it "
    "is, the second under torch.autocast; peft_compiled: torch.compile of the first, at r 16 and dropout 0.1. "
    f"{TIMING}",
    ["frozen", "packlora", "packlora_stepped", "packlora_fp32", "peft_bf16", "peft_fp32_autocast"], ["peft_compiled"],
    plot=plot_throughput,
)  # fmt: skip


# --- four adapters in one batch ----------------------------------------------------------------------------------------

ADAPTERS = [(8, 0.0), (16, 0.05), (32, 0.1), (64, 0.1)]
"""Rank and dropout of each."""
SHARES = (0.31, 0.12, 0.38, 0.19)
"""Shares of the tokens, before the boundaries are made odd."""


def boundaries(T: int) -> list[tuple[int, int]]:
    """Start and stop of each adapter's tokens: they cover [0, T), and no inner boundary is even."""
    stops = [int(sum(SHARES[: index + 1]) * T) | 1 for index in range(len(SHARES) - 1)] + [T]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def multi_cases(options: Options) -> list[Case]:
    sizes = [(K, N, T) for K, N in SHAPES for T in (2048, 8192)]
    sizes = [(64, 96, 96)] if options.tiny else sizes[:2] if options.quick else sizes
    return [case(f"{K}x{N} T{T}", K=K, N=N, T=T, main=True, sweep=False) for K, N, T in sizes]


def measure_multi(one: Case, names: list[str], options: Options) -> Row:
    torch.manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=options.device) * scale

    K, N, T = one.K, one.N, one.T
    weight = nn.Parameter(draw(N, K, scale=K**-0.5).bfloat16(), requires_grad=False)
    x, dy = draw(T, K).bfloat16().requires_grad_(), draw(T, N).bfloat16()
    factors = [(draw(r, K, scale=K**-0.5), draw(N, r, scale=0.02)) for r, _ in ADAPTERS]
    runs = boundaries(T)

    def make(name: str) -> Work:
        if name == "frozen":
            return work(One(weight), x, dy, [])
        if name.startswith("packlora"):
            spans = [(*run, dropout) for run, (_, dropout) in zip(runs, ADAPTERS, strict=True)]
            dtype = torch.bfloat16 if name == "packlora_bf16" else torch.float32
            call, own, note = operator(weight, factors, spans, x, dtype=dtype, name=name)
            _, peft, theirs = peft_layer(weight, factors[0], 0.0, wide=False)  # the first adapter has no dropout
            check_close(call, own[:2], peft, theirs, x, dy, slice(*runs[0]))
            made = work(call, x, dy, own, note)
            return stepped(made, own) if name == "packlora_stepped" else made
        wide = name == "peft_fp32_autocast"
        each = [peft_layer(weight, own, p, wide)[1:] for own, (_, p) in zip(factors, ADAPTERS, strict=True)]

        def in_turn(x_TK: torch.Tensor) -> torch.Tensor:
            return torch.cat([layer(x_TK[a:b]) for (layer, _), (a, b) in zip(each, runs, strict=True)])

        call = under_autocast(in_turn, x.device) if wide else in_turn
        return work(call, x, dy, [parameter for _, own in each for parameter in own])

    return timed([Contender(name, partial(make, name)) for name in names], options, seconds=0.6, ahead=True)


MULTI = Benchmark(
    multi_cases, measure_multi, layer_summary,
    "Forward and backward of one linear layer in bfloat16 with four LoRA adapters in one batch: ranks 8, 16, 32, "
    "64, dropouts 0, 0.05, 0.1, 0.1, shares of the tokens 0.31, 0.12, 0.38, 0.19 with odd boundaries. packlora: its "
    "operator with float32 adapters (_bf16: bfloat16; _stepped: written to before each run, as by an optimizer "
    "step). peft_bf16, peft_fp32_autocast: four PEFT layers one after the other on their rows, outputs "
    f"concatenated. {TIMING}",
    ["frozen", "packlora", "packlora_stepped", "packlora_bf16", "peft_bf16", "peft_fp32_autocast"],
)  # fmt: skip


# --- DoRA --------------------------------------------------------------------------------------------------------------

DORA_SHAPES = [(4096, 4096), (4096, 14336), (8192, 8192)]
COMPOSED = [(2048, 28672), (8192, 28672), (16384, 8192), (32768, 8192), (8192, 8192)]
"""M x N of Scaling-DoRA's own benchmark that are large enough to be bound by memory; the means are over all but the last."""
NORMS: dict[str, Callable[..., torch.Tensor]] = {
    "peft_identity": identity_norm,
    "dense": dense_norm,
    "factored_fp32": factored_norm,
}
DORA_NAMES = {
    "layer": [
        "frozen", "packlora", "packlora_stepped", "packlora_accelerate", "norm_refresh", "peft_bf16", "peft_fp32_autocast",
        "paper",
    ],
    "norm": ["packlora", "packlora_fp32", *NORMS],
    "compose": ["copy", "kernel", "kernel_both", "eager"],
    "paper-model": ["frozen", "packlora", "packlora_fp32", "packlora_stepped", "peft_bf16", "peft_fp32_autocast"],
}  # fmt: skip
"""Contenders by part."""
OPERATOR = {"packlora": "operator", "packlora_stepped": "operator_stepped", "packlora_low_rank": "operator_low_rank",
            "packlora_accelerate": "packlora"}  # fmt: skip
"""Names of `layer_work` by those of the part layer."""
MOVED = {"copy": 3, "kernel": 3, "kernel_both": 8, "eager": 3}
"""Tensors [M, N] that must be read or written: forward 2 and 1; backward 3 (the gradient, base, lora) and 2."""
QUALITY = {
    "dora-fidelity": ("logit_cosine_min_float32", "logit_cosine_16bit_minus_peft"),
    "dora-convergence": ("convergence_mean_abs", "convergence_over_noise"),
}
"""Benchmarks whose figures are taken over, and the keys."""


def dora_layer_case(K: int, N: int, T: int, r: int, dropout: float = 0.0) -> Case:
    return case(f"layer {K}x{N} T{T} r{r} p{dropout:g}", part="layer", K=K, N=N, T=T, r=r, dropout=dropout)


def dora_layer_cases(options: Options) -> list[Case]:
    if options.tiny:
        return [dora_layer_case(64, 96, 32, 16)]
    if options.quick:
        return [dora_layer_case(4096, 4096, 8192, r) for r in (16, 384)]
    out = [dora_layer_case(K, N, 8192, r) for K, N in DORA_SHAPES for r in (16, 64, 384)]
    out += [dora_layer_case(K, N, 2048, r) for K, N in DORA_SHAPES for r in (16, 384)]
    out += [dora_layer_case(K, N, 8192, 16, 0.1) for K, N in DORA_SHAPES]
    return [*out, dora_layer_case(4096, 4096, 2048, 16, 0.1)]


def dora_cases(options: Options) -> list[Case]:
    K, r = (96, 8) if options.tiny else (4096, 384)
    shapes = [(12, 40)] if options.tiny else COMPOSED[-1:] if options.quick else COMPOSED
    ranks = (24,) if options.tiny else (384,) if options.quick else (384, 512, 768)
    return [
        case(f"norm {K}x{K} r{r}", part="norm", K=K, N=K, r=r),
        *(case(f"compose {M}x{N}", part="compose", M=M, N=N) for M, N in shapes),
        *dora_layer_cases(options),
        *(case(f"paper-model Qwen3-8B r{r}", part="paper-model", r=r) for r in ranks),
        *(case(name, part="quality", name=name) for name in QUALITY),
    ]


def measure_dora(one: Case, names: list[str], options: Options) -> Row:
    if one.part == "quality":
        return taken_over(one.name, options)
    own = DORA_NAMES[one.part]
    if options.named:
        own = [name for name in names if name in (*own, "packlora_low_rank", "peft_compiled")]
    measures = {"norm": norm_row, "compose": compose_row, "layer": dora_layer_row, "paper-model": paper_model_row}
    return measures[one.part](one, own, options)


def dora_layer_row(one: Case, names: list[str], options: Options) -> Row:
    inputs = inputs_of(one, options, dora=True)
    if options.whole:
        names = [*names, *(["packlora_low_rank"] if one.dropout else []), *(["peft_compiled"] if one.r == 384 else [])]
    contenders = []
    for name in names:
        if name == "norm_refresh":
            norm = norm_of("packlora_fp32", inputs.weight_NK, inputs.A_rK, inputs.B_Nr)
            contenders.append(Contender(name, partial(alone, norm)))
        elif not (name == "paper" and one.dropout):  # which has none
            contenders.append(Contender(name, partial(layer_work, OPERATOR.get(name, name), inputs)))
    return timed(contenders, options, seconds=0.5, rounds=(15, 25), warmup=2, ahead=True, wall=True)


def alone(call: Call) -> Work:
    """A call without gradients."""

    def step() -> None:
        call()

    return Work(step, lambda: None)


def norm_of(name: str, weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> Call:
    """The norm of W + s B A, by packlora with |W|^2 ready, as after an optimizer step, or by one of NORMS."""
    if name in NORMS:
        return partial(NORMS[name], weight, A, B, SCALING)
    if name == "packlora_fp32":
        A, B = A.float(), B.float()
    return partial(row_norm, weight, A.detach(), B.detach(), SCALING, squared_row_norm(weight))


def norm_row(one: Case, names: list[str], options: Options) -> Row:
    inputs = Inputs.random(one.K, one.N, 32, one.r, 0.0, options.device)
    weight, A, B = inputs.weight_NK, nn.Parameter(inputs.A_rK), nn.Parameter(inputs.B_Nr)
    calls = {name: norm_of(name, weight, A, B) for name in names}
    exact = dense_norm(weight.double(), A.double(), B.double(), SCALING)
    errors = {name: float(((call() - exact) / exact).abs().max()) for name, call in calls.items()}
    contenders = [Contender(name, partial(alone, call)) for name, call in calls.items()]
    return {"error": errors, **timed(contenders, options, seconds=0.4, rounds=(15, 40), warmup=2, ahead=True)}


def compose_row(one: Case, names: list[str], options: Options) -> Row:
    """Scaling-DoRA's composition; of_copy: the bandwidth over that of a copy of as many bytes as the forward moves."""
    torch.manual_seed(0)

    def make(name: str) -> Work:
        if name == "copy":  # half of the bytes are read, half written
            source = torch.randn(one.M * one.N * 3 // 2, device=options.device).bfloat16()
            return alone(partial(torch.empty_like(source).copy_, source))
        tier: Any = "eager" if name == "eager" or interpreter_is_missing(options) else "kernel"
        both = name.endswith("_both")
        base, lora, d = (torch.randn(one.M, one.N, device=options.device).bfloat16() for _ in range(3))
        g = torch.rand(one.N, device=options.device) + 0.5
        g = g.bfloat16() if tier == "eager" else g
        leaves = [tensor.requires_grad_(both) for tensor in (base, lora, g)]

        def step() -> None:
            delta = compose(leaves[0], leaves[1], leaves[2], 0.5, tier)
            if both:
                delta.backward(d)

        def clear() -> None:
            for leaf in leaves:
                leaf.grad = None

        return Work(step, clear)

    row = timed(
        [Contender(name, partial(make, name)) for name in names], options, seconds=0.2, rounds=(15, 40), warmup=2
    )
    copied = row["ms"].get("copy")
    row["of_copy"] = {name: copied / ms * MOVED[name] / MOVED["copy"] for name, ms in row["ms"].items() if copied}
    return row


def interpreter_is_missing(options: Options) -> bool:
    """Triton's kernels run on a CPU only where they were defined for its interpreter."""
    return options.tiny and os.environ.get("TRITON_INTERPRET") != "1"


def paper_model_row(one: Case, names: list[str], options: Options) -> Row:
    """Scaling-DoRA's own model benchmark on the shape of its smallest model."""
    layers = options.layers or (None if options.whole else 2 if options.tiny else 4)
    config = config_of("Qwen3-8B", options.tiny, layers)
    base = options.shared(("paper", layers), lambda: build(config, options.device))
    length, loss_tokens = (64, 16) if options.tiny else (4096, 1024)
    ids = torch.randint(0, config.vocab_size, (1, length), device=options.device)
    contenders = [causal_lm(name, base, ids, one.r, 0.0, True, dora=True, loss_tokens=loss_tokens) for name in names]
    row = timed(contenders, options, stored_bytes(base), seconds=4.0, rounds=(4, 20), warmup=1, flush=False)
    return {"layers": config.num_hidden_layers, "T": length, **row}


def taken_over(name: str, options: Options) -> Row:
    """Figures of another benchmark, from the file of this device that lies beside this one; none where there is no file."""
    path = options.out.with_name(f"{name}-{device_slug(options.device)}.json")
    if not path.exists():
        print(f"{path} is not there; python -m benchmarks {name} writes it", flush=True)
        return {"figures": {}}
    file = json.loads(path.read_text())
    origin = {key: file[key] for key in ("commit", "date", "device")}
    return {"from": path.name, "measured": origin, "figures": {key: file["summary"].get(key) for key in QUALITY[name]}}


def dora_summary(rows: list[Row]) -> Row:
    """Layers at 8192 tokens without dropout by what `accelerate` gives (accelerate_), by the operator (layer_) and by each
    peer (NAME_layer_), of the GPU alone (ahead_) and on the wall (_wall); the norm, the composition, models, quality."""
    out: Row = {}
    of = {part: [row for row in rows if row["part"] == part] for part in (*DORA_NAMES, "quality")}
    for row in of["layer"]:
        if row["T"] != 8192 or row["dropout"]:
            continue
        shape = f"{row['K']}" if row["K"] == row["N"] else f"{row['K']}x{row['N']}"
        for name in (*row["over_frozen"], *row["failed"]):
            start = {"packlora": "layer", "packlora_accelerate": "accelerate"}.get(name, f"{name}_layer")
            key = f"{start}_r{row['r']}_{shape}_over_frozen"
            if name != "norm_refresh":
                out[key] = row["over_frozen"].get(name)
                out[f"ahead_{key}"] = row.get("ahead_over_frozen", {}).get(name)
                out[f"{key}_wall"] = row.get("wall_over_frozen", {}).get(name)
    for row in of["norm"]:
        if (row["K"], row["r"]) == (4096, 384):
            for start, kind in (("", "ms"), ("ahead_", "ahead_ms")):
                for name, ms in row.get(kind, {}).items():
                    out[
                        f"{start}norm_refresh{name.removeprefix('packlora') if name not in NORMS else f'_{name}'}_us"
                    ] = 1e3 * ms
    large = [row["of_copy"] for row in of["compose"] if row.get("M", 0) * row.get("N", 0) >= 2048 * 28672]
    if of["compose"]:
        out["compose_of_copy_bandwidth"] = geomean(own.get("kernel") for own in large)
        out["compose_both_of_copy_bandwidth"] = geomean(own.get("kernel_both") for own in large)
        out["compose_eager_of_copy_bandwidth"] = geomean(own.get("eager") for own in large)
    for row in of["paper-model"]:
        for name in DORA_NAMES["paper-model"][1:]:
            key = f"paper_model_r{row['r']}" + ("" if name == "packlora" else f"_{name}")
            out[f"{key}_over_frozen"], out[f"{key}_gib"] = row["over_frozen"].get(name), row["gib"].get(name)
        for own, peer in (("packlora", "peft_bf16"), ("packlora_fp32", "peft_fp32_autocast")):
            over = row["over_frozen"]
            both = own in over and peer in over
            out[f"paper_model_r{row['r']}_{peer}_over_{own}"] = over[peer] / over[own] if both else None
    return out | {key: value for row in of["quality"] for key, value in row["figures"].items()}


DORA = Benchmark(
    dora_cases, measure_dora, dora_summary,
    "layer: forward and backward of one linear layer in bfloat16 with DoRA, alpha = 2 r, B not zero, magnitudes 2 % "
    "away from the norms. packlora: its operator with float32 adapters, norm ready; _stepped: adapters written to "
    "before each run, so that the norm is made in it; _accelerate: packlora.accelerate on the bfloat16 PEFT layer; "
    "_low_rank: with dropout on the low-rank branch alone, which is not PEFT's. norm_refresh: the norm alone. "
    "peft_bf16, peft_fp32_autocast: PEFT's layer with bfloat16 adapters, and with its default float32 ones under "
    "torch.autocast; peft_compiled: torch.compile of the first. paper: the formulas of Scaling-DoRA, own code. "
    "norm: row norms of W + s B A with |W|^2 ready; peft_identity: PEFT's functions; dense: W + s B @ A; "
    "factored_fp32: the paper's formula; error: largest relative difference to float64. compose: delta = (g - 1) "
    "base + g s lora on random bfloat16 (_both: with its backward); of_copy: bytes that must be moved per second "
    "over those of a copy in the same loop; means over the four largest shapes. paper-model: Qwen3-8B's shape, no "
    "liger-kernel, one sample of 4096 tokens, gradient checkpointing, loss on the last 1024 tokens, DoRA on all "
    "linear layers, forward and backward. quality: figures of dora-fidelity and dora-convergence, from their files. "
    f"Results of layers without dropout are compared with PEFT's first. {TIMING}",
    list(dict.fromkeys(name for part in ("layer", "paper-model", "norm", "compose") for name in DORA_NAMES[part])),
    ["packlora_low_rank", "peft_compiled"], by_case=True,
)  # fmt: skip
