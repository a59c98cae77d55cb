"""`python -m benchmarks multi`: one linear layer, four adapters in one batch, against the frozen layer and four PEFT layers.

Ranks 8, 16, 32 and 64, dropouts 0, 0.05, 0.1 and 0.1, each adapter on a run of tokens whose length is no multiple of anything.
The operator is called directly with float32 parameters, as training does. The peers are four real PEFT layers, each on its
own rows, outputs concatenated.

Shapes: x [T, K], y [T, N].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.layer import SHAPES, show, work
from benchmarks.layer import summary as layer_summary
from benchmarks.layer import table as layer_table
from benchmarks.options import Options, Outcome, choose, plan_from_name
from benchmarks.peers.peft import One, check_close, peft_model, under_autocast
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.plans.select import PlanChooser
from packlora.plans.timing import Contender, Work, paired

ADAPTERS = [(8, 0.0), (16, 0.05), (32, 0.1), (64, 0.1)]
"""Rank and dropout of each."""
SHARES = (0.31, 0.12, 0.38, 0.19)
"""Of the tokens, before the boundaries are made odd."""
CONTENDERS = ["frozen", "packlora", "packlora_stepped", "packlora_bf16", "peft_bf16", "peft_fp32_autocast"]
PROTOCOL = (
    "Forward and backward of one linear layer in bfloat16 with four LoRA adapters in one batch: ranks 8, 16, 32, 64, dropouts "
    "0, 0.05, 0.1, 0.1, shares of the tokens 0.31, 0.12, 0.38, 0.19 with odd boundaries. frozen: forward and input gradient of "
    "the nn.Linear alone. packlora: its operator with float32 adapters (_bf16: bfloat16; _stepped: the adapters are written to "
    "before each run, as by an optimizer step, so that nothing derived from them is kept). peft_bf16, peft_fp32_autocast: four "
    "PEFT layers one after the other on their rows, outputs concatenated. Timing as in the layer benchmark: in turn inside "
    "one loop, random order each round, L2 flushed, CUDA events, medians, ratios within a round, ahead_ms."
)


@dataclass(frozen=True, slots=True)
class Case:
    K: int
    N: int
    T: int

    @property
    def label(self) -> str:
        return f"{self.K}x{self.N} T{self.T}"


def cases(options: Options) -> list[Case]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""
    if options.tiny:
        return [Case(64, 96, 96), Case(64, 64, 96)]
    if options.quick:
        return [Case(4096, 4096, T) for T in (2048, 8192)]
    return [Case(K, N, T) for K, N in SHAPES for T in (2048, 8192)]


def boundaries(T: int) -> list[tuple[int, int]]:
    """Start and stop of each adapter's tokens: they cover [0, T), and no inner boundary is even."""
    stops = [int(sum(SHARES[: index + 1]) * T) | 1 for index in range(len(SHARES) - 1)] + [T]
    return list(zip([0, *stops[:-1]], stops, strict=True))


@dataclass(frozen=True, slots=True)
class Inputs:
    """x_TK: a leaf that wants a gradient. factors: A [r, K] and B [N, r] of each adapter, float32."""

    case: Case
    x_TK: torch.Tensor
    dy_TN: torch.Tensor
    weight_NK: nn.Parameter
    keys_T2: torch.Tensor
    factors: list[tuple[torch.Tensor, torch.Tensor]]

    @staticmethod
    def random(case: Case, device: torch.device) -> Inputs:
        torch.manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, device=device) * scale

        weight = nn.Parameter(draw(case.N, case.K, scale=case.K**-0.5).bfloat16(), requires_grad=False)
        keys = torch.randint(-(2**31), 2**31, (case.T, 2), device=device).to(torch.int32)
        factors = [(draw(r, case.K, scale=case.K**-0.5), draw(case.N, r, scale=0.02)) for r, _ in ADAPTERS]
        x = draw(case.T, case.K).bfloat16().requires_grad_()
        return Inputs(case, x, draw(case.T, case.N).bfloat16(), weight, keys, factors)


def contender(name: str, inputs: Inputs) -> Contender:
    """By name: one of CONTENDERS or packlora:PLAN."""

    def make() -> Work:
        if name == "frozen":
            return work(One(inputs.weight_NK), inputs.x_TK, inputs.dy_TN, [])
        if name.startswith("packlora"):
            return packlora_work(name, inputs)
        wide = name == "peft_fp32_autocast"
        runs = boundaries(inputs.case.T)
        layers, parameters = [], []
        for (A, B), (_, dropout) in zip(inputs.factors, ADAPTERS, strict=True):
            _, one, own = peft_model(inputs.weight_NK, A, B, dropout, wide)
            layers.append(one)
            parameters += own

        def in_turn(x_TK: torch.Tensor) -> torch.Tensor:
            return torch.cat([one(x_TK[a:b]) for one, (a, b) in zip(layers, runs, strict=True)])

        call = under_autocast(in_turn, inputs.x_TK.device) if wide else in_turn
        return work(call, inputs.x_TK, inputs.dy_TN, parameters)

    return Contender(name, make)


def packlora_work(name: str, inputs: Inputs) -> Work:
    """The operator with all four adapters."""
    dtype = torch.bfloat16 if name == "packlora_bf16" else torch.float32
    factors = [(A.to(dtype).requires_grad_(), B.to(dtype).requires_grad_()) for A, B in inputs.factors]
    adapters = {number: LowRank(A, B, 2.0) for number, (A, B) in enumerate(factors)}
    layers = (Layer(Dense(inputs.weight_NK), None, adapters),)
    segments = tuple(
        Segment(number, start, stop, ADAPTERS[number][1])
        for number, (start, stop) in enumerate(boundaries(inputs.case.T))
    )

    if ":" in name:
        plan = plan_from_name(name.partition(":")[2])
    else:
        plan = PlanChooser(inputs.x_TK.device).plan_of(inputs.x_TK, layers, segments)
    state = GroupState(version_counted=True)  # as in training: an optimizer moves version counters

    def call(x_TK: torch.Tensor) -> torch.Tensor:
        return lora_group(x_TK, layers, segments, inputs.keys_T2, 1, plan, state)[0]

    compare_with_peft(call, factors[0], inputs)
    parameters = [factor for pair in factors for factor in pair]
    return work(call, inputs.x_TK, inputs.dy_TN, parameters, name == "packlora_stepped", f"plan {plan.name}")


def compare_with_peft(
    call: Callable[[torch.Tensor], torch.Tensor], factors: tuple[torch.Tensor, torch.Tensor], inputs: Inputs
) -> None:
    """The adapter without dropout against a PEFT layer on its rows. Raises AssertionError where they differ."""
    rows = slice(*boundaries(inputs.case.T)[0])
    _, one, own = peft_model(inputs.weight_NK, *inputs.factors[0], ADAPTERS[0][1], wide=False)
    y = call(inputs.x_TK)
    dx, dA, dB = torch.autograd.grad(y, [inputs.x_TK, *factors], inputs.dy_TN)
    alone = inputs.x_TK[rows].detach().requires_grad_()
    y_peft = one(alone)
    check_close([y[rows], dx[rows], dA, dB], [y_peft, *torch.autograd.grad(y_peft, [alone, *own], inputs.dy_TN[rows])])


def run(options: Options) -> Outcome:
    """Measure; prints a line per case."""
    names, chosen = choose(options.only, CONTENDERS, [], cases(options))
    rows: list[dict[str, Any]] = []
    for case in options.each(chosen, rows):
        inputs = Inputs.random(case, options.device)
        timings = paired([contender(name, inputs) for name in names], options.device, seconds=0.6, ahead=True)
        own = [name for name in names if name.startswith("packlora")]
        peers = [name for name in names if name.startswith("peft")]
        rows.append(
            {
                "case": case.label, "K": case.K, "N": case.N, "T": case.T, "main": True, "sweep": False,
                **timings.row(),
                "vs_peft": {name: {peer: timings.ratio(peer, name) for peer in peers} for name in own},
            }
        )  # fmt: skip
        show(rows[-1], options.device)
    return Outcome(PROTOCOL, rows, options.keys(summary(rows)), table(rows))


summary, table = layer_summary, layer_table
