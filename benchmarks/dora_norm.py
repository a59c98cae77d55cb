"""Part norm of `python -m benchmarks dora`: the row norm of W + s B A, its time, memory and error, one layer and a whole model.

Shapes: K inputs, N outputs, r rank; W [N, K].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.model import LLAMA_8B
from benchmarks.options import Options, choose
from benchmarks.peers.dora import dense_norm, factored_norm, identity_norm
from packlora.ops.row_norm.row_norm import row_norm, row_norms, squared_row_norm
from packlora.ops.row_norm.types import NormProblem
from packlora.plans.timing import Contender, Timings, Work, paired
from packlora.runtime.memory import free_memory

SHAPES = [(4096, 4096), (28672, 8192)]
"""K x N."""
RANKS = (16, 64, 128, 384, 512, 768)
SCALING = 2.0
CONTENDERS = ["packlora", "packlora_fp32", "packlora_first", "peft_identity", "dense", "factored_fp32"]
PEERS = {"peft_identity": identity_norm, "dense": dense_norm, "factored_fp32": factored_norm}
MODEL_RANK = 384
CHECKED_ROWS = 256
"""Compared with float64."""
PROTOCOL = (
    "norm: row norms of W + s B A, bfloat16 W, A and B random and dense, s = 2; packlora: ops.row_norm with the row norms of W "
    "ready, which is a refresh after an optimizer step (_fp32: A and B in float32; _first: with the pass over W for its own "
    "norms); peft_identity: PEFT's functions; dense: W + s B @ A; factored_fp32: the paper's formula, own code. error: largest "
    "relative difference to float64 over 256 rows. ahead_ms as in the layer benchmark. The row of a whole model has all seven "
    "layers of every block of Llama-3.1-8B's shape, r 384: packlora by one call for all, the others layer after layer."
)


@dataclass(frozen=True, slots=True)
class Case:
    """layers: of Llama-3.1-8B's shape, 0 where it is one matrix."""

    K: int
    N: int
    rank: int
    layers: int = 0

    @property
    def label(self) -> str:
        return f"model Llama-3.1-8B r{self.rank}" if self.layers else f"norm {self.K}x{self.N} r{self.rank}"


def cases(options: Options) -> list[Case]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""
    if options.tiny:
        return [Case(96, 64, 8), Case(0, 0, 8, layers=1)]
    out = [Case(K, N, rank) for K, N in SHAPES for rank in RANKS]
    if options.quick:
        out = [case for case in out if case.K == case.N and case.rank in (16, 384)]
    return [*out, Case(0, 0, MODEL_RANK, options.layers or (2 if options.quick else LLAMA_8B["num_hidden_layers"]))]


def draw(K: int, N: int, rank: int, device: torch.device) -> tuple[torch.Tensor, nn.Parameter, nn.Parameter]:
    """W, A and B in bfloat16; A and B train."""
    weight = (torch.randn(N, K, device=device) * K**-0.5).bfloat16()
    A = nn.Parameter((torch.randn(rank, K, device=device) * K**-0.5).bfloat16())
    return weight, A, nn.Parameter((torch.randn(N, rank, device=device) * 0.02).bfloat16())


def norm_of(name: str, weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The way of a contender, ready to be called."""
    if name in PEERS:
        return partial(PEERS[name], weight, A, B, SCALING)
    if name == "packlora_fp32":
        A, B = A.detach().float(), B.detach().float()
    base = None if name == "packlora_first" else squared_row_norm(weight)
    return partial(row_norm, weight, A.detach(), B.detach(), SCALING, base)


def error(norm: Callable[[], torch.Tensor], weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> float:
    """Largest relative difference to float64 over the first rows."""
    some = slice(0, CHECKED_ROWS)
    exact = (weight[some].double() + SCALING * (B.detach()[some].double() @ A.detach().double())).norm(dim=1)
    return float(((norm()[some].double() - exact) / exact).abs().max())


def work(call: Callable[[], Any]) -> Work:
    def step() -> None:
        call()

    return Work(step, lambda: None)


def one_layer(case: Case, names: list[str], device: torch.device) -> tuple[Timings, dict[str, float]]:
    weight, A, B = draw(case.K, case.N, case.rank, device)
    made = {name: norm_of(name, weight, A, B) for name in names}
    errors = {name: error(call, weight, A, B) for name, call in made.items()}
    contenders = [Contender(name, partial(work, call)) for name, call in made.items()]
    return paired(contenders, device, seconds=0.4, rounds=(15, 40), warmup=2, ahead=True), errors


def in_turn(calls: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    return [call() for call in calls]


def module_sizes(tiny: bool) -> list[tuple[int, int]]:
    """K and N of the layers of a block: q, k, v, o, gate, up, down."""
    width, inner = (64, 96) if tiny else (LLAMA_8B["hidden_size"], LLAMA_8B["intermediate_size"])
    narrow = width * LLAMA_8B["num_key_value_heads"] // LLAMA_8B["num_attention_heads"]
    square = (width, width)
    return [square, (width, narrow), (width, narrow), square, (width, inner), (width, inner), (inner, width)]


def whole_model(case: Case, names: list[str], device: torch.device) -> tuple[Timings, int]:
    """Timings, and the bytes of all W."""
    modules = [
        draw(*size, case.rank, device) for _ in range(case.layers) for size in module_sizes(device.type == "cpu")
    ]
    contenders = []
    for name in names:
        if name in PEERS:
            each = [norm_of(name, *module) for module in modules]
            contenders.append(Contender(name, partial(work, partial(in_turn, each))))
        else:
            problems = [NormProblem(W, A.detach(), B.detach(), SCALING, squared_row_norm(W)) for W, A, B in modules]
            if name == "packlora_fp32":
                problems = [replace(problem, A=problem.A.float(), B=problem.B.float()) for problem in problems]
            contenders.append(Contender(name, partial(work, partial(row_norms, problems))))
    weights = sum(W.numel() * W.element_size() for W, _, _ in modules)
    return paired(contenders, device, seconds=2.0, rounds=(4, 10), warmup=1), weights


def run(options: Options) -> list[dict[str, Any]]:
    """Measure; prints a line per case."""
    torch.manual_seed(0)
    names, chosen = choose(options.only, CONTENDERS, [], cases(options), always="packlora")
    rows: list[dict[str, Any]] = []
    for case in options.each(chosen, rows):
        row: dict[str, Any] = {"part": "norm", "case": case.label, "K": case.K, "N": case.N, "r": case.rank}
        if case.layers:
            timings, weights = whole_model(case, [name for name in names if name != "packlora_first"], options.device)
            row |= {"layers": case.layers, "weight_gib": weights / 2**30}
        else:
            timings, row["error"] = one_layer(case, names, options.device)
        row |= timings.row()
        del row["over_frozen"]  # there is no frozen layer in this loop
        row["over_packlora"] = {name: timings.ratio(name, "packlora") for name in row["ms"]}
        rows.append(row)
        print(f"{case.label}: " + ", ".join(f"{name} {1e3 * ms:.0f} us" for name, ms in row["ms"].items()), flush=True)
        del timings
        free_memory(options.device)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Microseconds of a refresh at 4096 x 4096, r 384, and of the peers there; milliseconds for the whole model."""
    out: dict[str, Any] = {}
    suffixes = {"packlora": "", "packlora_fp32": "_fp32", **{name: f"_{name}" for name in PEERS}}
    for row in rows:
        for name, suffix in suffixes.items():
            ms = row["ms"].get(name)
            if row.get("layers"):
                out[f"norm_8b_refresh{suffix}_ms"] = ms
            elif (row["K"], row["N"], row["r"]) == (4096, 4096, 384):
                out[f"norm_refresh{suffix}_us"] = None if ms is None else 1e3 * ms
                if name in row.get("ahead_ms", {}):
                    out[f"ahead_norm_refresh{suffix}_us"] = 1e3 * row["ahead_ms"][name]
    return out


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Lines of case, contender, us, over packlora, peak MiB."""
    return [
        [
            row["case"], name, f"{1e3 * row['ms'][name]:.1f}", f"{row['over_packlora'].get(name) or float('nan'):.2f}",
            f"{row['peak_mib'][name]:.1f}" if name in row["peak_mib"] else "-",
        ]
        for row in rows
        for name in row["ms"]
    ]  # fmt: skip
