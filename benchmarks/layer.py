"""`python -m benchmarks layer`: one linear layer with a LoRA adapter against the same frozen layer and against PEFT.

The frozen layer is forward and input gradient of the nn.Linear alone. Peers and packlora are real PEFT layers made by
get_peft_model around a module that holds one nn.Linear, all over the same weight, input, adapter values and upstream
gradient (random, dense; B is not zero). Without dropout packlora's results are compared with PEFT's before its time counts.

Shapes: T tokens as [4, T / 4], K inputs, N outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.options import Options, Outcome, choose, plan_from_name
from benchmarks.peers.peft import One, check_close, peft_model, under_autocast
from benchmarks.results import text_table
from packlora.live.accelerate import accelerate
from packlora.plans.timing import Contender, Work, geomean, paired, stepped
from packlora.runtime.memory import free_memory

SHAPES = [(4096, 4096), (5120, 5120), (8192, 8192), (4096, 14336), (14336, 4096)]
"""K x N: square ones of LoRAFusion's kernel benchmark, and gate/up and down of Llama-3.1-8B."""
SWEEP_T = (2048, 4096, 6144, 8192, 12288, 16384)
CONTENDERS = ["frozen", "packlora", "packlora_stepped", "packlora_fp32", "peft_bf16", "peft_fp32_autocast"]
OPTIONAL = ["peft_compiled"]
AHEAD = (
    "ahead_ms: 15 more rounds in which the GPU waits before each run until the host has launched all of it, so that the GPU's "
    "work alone is timed, as in a step of a large model."
)
PROTOCOL = (
    "Forward and backward of one linear layer in bfloat16, LoRA alpha = 2 r. frozen: forward and input gradient of the "
    "nn.Linear alone. packlora: packlora.accelerate on a real PEFT layer with bfloat16 adapters; _stepped: the adapters are "
    "written to before each run, as by an optimizer step, so that nothing derived from them is kept; _fp32: with PEFT's "
    "default float32 adapters. peft_bf16, peft_fp32_autocast: PEFT's layer as it is, the second under torch.autocast. "
    "peft_compiled: torch.compile of the bfloat16 one, at r 16 and dropout 0.1. Each contender runs in turn inside one loop in "
    "a new random order each round; L2 flushed before each (256 MB written); CUDA events, no synchronisation inside the loop; "
    "warm-up, then 15 to 100 rounds; ms are medians, ratios medians of the ratios within a round. Inputs, weights, B and the "
    "upstream gradient are random and dense. peak_mib: of one forward and backward beyond what was allocated before. host_us: "
    "until the host had launched everything. " + AHEAD
)


@dataclass(frozen=True, slots=True)
class Case:
    """sweep: measured for the curve over T alone, not for a table."""

    K: int
    N: int
    T: int
    rank: int = 16
    dropout: float = 0.1
    sweep: bool = False

    @property
    def label(self) -> str:
        return f"{self.K}x{self.N} T{self.T} r{self.rank} p{self.dropout:g}"

    @property
    def main(self) -> bool:
        """Part of the geometric means."""
        return self.rank == 16 and self.dropout == 0.1 and not self.sweep


def cases(options: Options) -> list[Case]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""
    if options.tiny:
        return [Case(64, 96, 32), Case(64, 64, 64), Case(64, 96, 64, dropout=0.0)]
    if options.quick:
        return [Case(4096, 4096, T, dropout=p) for T in (2048, 8192) for p in (0.1, 0.0)]
    out = [Case(K, N, T, dropout=p) for K, N in SHAPES for T in (2048, 8192) for p in (0.1, 0.0)]
    out += [Case(K, K, 8192, rank) for K in (4096, 8192) for rank in (64, 128, 384)]
    return out + [Case(K, K, T, sweep=True) for K in (4096, 5120, 8192) for T in SWEEP_T if T not in (2048, 8192)]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What all contenders of a case share. x: [4, T / 4, K], a leaf that wants a gradient; dy: [4, T / 4, N]."""

    case: Case
    x: torch.Tensor
    dy: torch.Tensor
    weight_NK: nn.Parameter
    A_rK: torch.Tensor
    B_Nr: torch.Tensor

    @staticmethod
    def random(case: Case, device: torch.device) -> Inputs:
        torch.manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device=device) * scale).to(torch.bfloat16)

        x = draw(4, case.T // 4, case.K).requires_grad_()
        weight = nn.Parameter(draw(case.N, case.K, scale=case.K**-0.5), requires_grad=False)
        A, B = draw(case.rank, case.K, scale=case.K**-0.5), draw(case.N, case.rank, scale=0.02)
        return Inputs(case, x, draw(4, case.T // 4, case.N), weight, A, B)


def work(
    call: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    dy: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    steps: bool = False,
    note: str = "",
) -> Work:
    """One forward, and the backward from dy.

    Args:
        steps: see timing.stepped.
    """

    def step() -> None:
        call(x).backward(dy)

    def clear() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    made = Work(step, clear, note)
    return stepped(made, parameters) if steps else made


def contender(name: str, inputs: Inputs) -> Contender:
    """By name: one of CONTENDERS, OPTIONAL, or packlora:PLAN."""

    def make() -> Work:
        if name == "frozen":
            return work(One(inputs.weight_NK), inputs.x, inputs.dy, [])
        wide = name in ("packlora_fp32", "peft_fp32_autocast")
        model, one, parameters = peft_model(inputs.weight_NK, inputs.A_rK, inputs.B_Nr, inputs.case.dropout, wide)
        call: Callable[[torch.Tensor], torch.Tensor] = one
        note = ""
        if name.startswith("packlora"):
            note = accelerated(name, model, {"x": inputs.x.detach()[:1, :2]})
            if not wide and inputs.case.dropout == 0.0:
                compare_with_peft(model, parameters, inputs)
        elif name == "peft_compiled":
            torch._dynamo.reset()  # else its limit of recompilations makes later cases run uncompiled
            call = torch.compile(one)
        elif name == "peft_fp32_autocast":
            call = under_autocast(one, inputs.x.device)
        return work(call, inputs.x, inputs.dy, parameters, name == "packlora_stepped", note)

    return Contender(name, make)


def accelerated(name: str, model: Any, example: dict[str, Any] | None = None) -> str:
    """Give the model to packlora.accelerate; what its report says in short.

    Args:
        name: of the contender; after a colon the plan, which is packlora's own choice otherwise.
        example: keyword arguments of a forward, for a model that is not a language model.

    Raises:
        AssertionError: a module was left to PEFT, so that the time would not be packlora's.
    """
    plan = plan_from_name(name.partition(":")[2]) if ":" in name else None
    little = name == "packlora_recompute"
    report = accelerate(model, plan=plan, example=example, recompute=little, keep_outputs=little)
    if report.accelerated < len(report.modules):
        raise AssertionError(f"not all modules were accelerated: {report}")
    plans = sorted({str(module.plan) for module in report.modules})
    together = sum(len(group) for group in report.groups)
    return "; ".join(
        [f"plan {', '.join(plans)}, {together} of {len(report.modules)} modules in sibling groups", *report.notes]
    )


def compare_with_peft(model: Any, parameters: list[nn.Parameter], inputs: Inputs) -> None:
    """Results of an accelerated layer against the untouched PEFT layer. Raises AssertionError where they differ."""
    _, one, own = peft_model(inputs.weight_NK, inputs.A_rK, inputs.B_Nr, 0.0, wide=False)
    results = []
    for call, adapter in ((model.base_model.model, parameters), (one, own)):
        y = call(inputs.x)
        results.append([y.detach(), *torch.autograd.grad(y, [inputs.x, *adapter], inputs.dy)])
    check_close(*results)


def run(options: Options) -> Outcome:
    """Measure; prints a line per case."""
    names, chosen = choose(options.only, CONTENDERS, OPTIONAL, cases(options))
    rows: list[dict[str, Any]] = []
    for case in options.each(chosen, rows):
        inputs = Inputs.random(case, options.device)
        taking_part = list(names)
        if case.main and not options.quick and not options.only:
            taking_part += OPTIONAL
        timings = paired([contender(name, inputs) for name in taking_part], options.device, seconds=0.6, ahead=True)
        row = {
            "case": case.label, "K": case.K, "N": case.N, "T": case.T, "r": case.rank, "dropout": case.dropout,
            "main": case.main, "sweep": case.sweep, **timings.row(),
        }  # fmt: skip
        peers = [name for name in taking_part if name.startswith("peft")]
        row["vs_peft"] = {
            own: {peer: timings.ratio(peer, own) for peer in peers} for own in taking_part if own.startswith("packlora")
        }
        rows.append(row)
        show(row, options.device)
    return Outcome(PROTOCOL, rows, options.keys(summary(rows)), table(rows))


def _given(name: str, *ratios: dict[str, float | None]) -> list[float]:
    return [ratio for by_name in ratios if (ratio := by_name.get(name)) is not None]


def show(row: dict[str, Any], device: torch.device) -> None:
    """Print a case's line and give back the memory that it took."""
    print(progress_line(row), flush=True)
    free_memory(device)


def progress_line(row: dict[str, Any]) -> str:
    """One case: ms and the ratio to frozen of every contender, behind it the one with the host ahead, and what failed."""
    ratios, ahead = row["over_frozen"], row.get("ahead_over_frozen", {})
    parts = [
        f"{name} {ms:.3f} ms"
        + (f" ({', '.join(f'{ratio:.3f}' for ratio in found)})" if (found := _given(name, ratios, ahead)) else "")
        for name, ms in row["ms"].items()
    ]
    parts += [f"{name} FAILED: {error}" for name, error in row["failed"].items()]
    return f"{row['case']}: " + " | ".join(parts)


def best_peft(row: dict[str, Any]) -> float | None:
    """Time of the fastest PEFT contender over packlora's; None where packlora or every peer failed."""
    ratios = [value for value in row["vs_peft"].get("packlora", {}).values() if value is not None]
    return min(ratios) if ratios else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are quoted. worst_vs_peft is None, not a minimum over fewer cases, where a case has no figure."""
    out: dict[str, Any] = {}
    main = [row for row in rows if row["main"]]
    for T in sorted({row["T"] for row in main}):
        at = [row for row in main if row["T"] == T]
        for name in dict.fromkeys(name for row in at for name in [*row["over_frozen"], *row["failed"]]):
            suffix = "" if name == "packlora" else f"_{name}"
            out[f"over_frozen_T{T}_geomean{suffix}"] = geomean(row["over_frozen"].get(name) for row in at)
            if all("ahead_over_frozen" in row for row in at):
                key = f"ahead_over_frozen_T{T}_geomean{suffix}"
                out[key] = geomean(row["ahead_over_frozen"].get(name) for row in at)
    best = {row["case"]: best_peft(row) for row in rows}
    measured = {case: value for case, value in best.items() if value is not None}
    out["worst_vs_peft"] = min(measured.values()) if len(measured) == len(rows) else None
    out["worst_vs_peft_case"] = min(measured, key=measured.__getitem__) if measured else None
    wide = [row["vs_peft"].get("packlora_fp32", {}).get("peft_fp32_autocast") for row in rows]
    out["worst_fp32_vs_peft_fp32"] = None if None in wide else min(wide, default=None)
    return out


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The main cases and the worst one."""
    main = [row for row in rows if not row["sweep"]]
    names = list(dict.fromkeys(name for row in main for name in row["over_frozen"]))
    lines = [
        [row["case"], f"{row['ms'].get('frozen', float('nan')):.3f}"]
        + [f"{value:.3f}" if (value := row["over_frozen"].get(name)) is not None else "-" for name in names]
        for row in main
    ]
    out = text_table(["case", "frozen ms", *(f"{name} /frozen" for name in names)], lines)
    figures = summary(rows)
    if figures["worst_vs_peft_case"] is not None:
        worst = next(row for row in rows if row["case"] == figures["worst_vs_peft_case"])
        out.append(f"worst case against the best PEFT: {worst['case']}, {best_peft(worst):.3f}x")
    return out
