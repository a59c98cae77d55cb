"""Parts layer and multi of `benchmarks dora`: DoRA on one linear layer against the frozen layer, PEFT and the paper's way.

packlora is its operator with float32 adapters, called as training calls it; the norm is that of the present values and kept as
long as they are (adapters/norms.py). The peers are real PEFT layers, in each of the dtype regimes that their users have.

Shapes: T tokens, K inputs, N outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import layer, multi
from benchmarks.layer import accelerated, show, work
from benchmarks.options import Options, choose, plan_from_name
from benchmarks.peers.dora import PaperLayer, dense_norm
from benchmarks.peers.peft import One, check_close, peft_model, under_autocast
from packlora.adapters.norms import RowNorms
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.ops.row_norm.row_norm import row_norm, squared_row_norm
from packlora.plans.select import PlanChooser
from packlora.plans.space import legal_plans
from packlora.plans.timing import Contender, Work, paired

SHAPES = [(4096, 4096), (4096, 14336), (8192, 8192)]
"""K x N."""
RANKS = (16, 64, 384)
SCALING = 2.0
CONTENDERS = [
    "frozen", "packlora", "packlora_stepped", "packlora_accelerate", "norm_refresh", "peft_bf16", "peft_fp32_autocast", "paper",
]  # fmt: skip
LOW_RANK = "packlora_low_rank"
OPTIONAL = [LOW_RANK, "peft_compiled", "peft_fp32_adapters", "peft_fp32", "plans"]
PROTOCOL = (
    "layer: forward and backward of one linear layer in bfloat16 with DoRA, alpha = 2 r, B not zero, magnitudes 2 % away "
    "from the norms. frozen: forward and input gradient of the nn.Linear alone. packlora: its operator with float32 "
    "adapters, norm ready; _stepped: adapters written to before each run, so that norm and all that is derived from them "
    "are made again in the timed run, an optimizer step for every microbatch; _accelerate: packlora.accelerate on the "
    "bfloat16 PEFT layer; _low_rank: with dropout on the low-rank branch alone, which is not PEFT's. norm_refresh: the norm"
    " alone. peft_bf16, peft_fp32_autocast, peft_fp32_adapters, peft_fp32: PEFT's layer with bfloat16 adapters; with its "
    "default float32 ones under torch.autocast; the same without; all in float32. peft_compiled: torch.compile of the "
    "first. paper: the formulas of Scaling-DoRA, own code (factored float32 norm in every forward, one composing kernel "
    "each way). multi: four adapters in one batch, ranks 8, 16, 32, 64, the second and the fourth with DoRA, ragged runs, "
    "no dropout; PEFT: four layers on their own rows. Timing as in the layer benchmark, 15 to 25 rounds; wall_ms of layers: 15 "
    "more rounds in which each run is waited for; without dropout packlora's results are compared with PEFT's first."
)


@dataclass(frozen=True, slots=True)
class Case:
    K: int
    N: int
    T: int
    rank: int
    dropout: float = 0.0

    @property
    def label(self) -> str:
        return f"layer {self.K}x{self.N} T{self.T} r{self.rank} p{self.dropout:g}"

    @property
    def shape(self) -> str:
        """As in the summary's keys."""
        return f"{self.K}" if self.K == self.N else f"{self.K}x{self.N}"


def cases(options: Options) -> list[Case]:
    """All cases, or the subset of `quick`; sizes of a toy on a CPU."""
    if options.tiny:
        return [Case(64, 96, 32, 16), Case(64, 64, 64, 8), Case(64, 96, 64, 16, 0.1)]
    if options.quick:
        return [Case(4096, 4096, 8192, rank) for rank in (16, 384)]
    out = [Case(K, N, 8192, rank) for K, N in SHAPES for rank in RANKS]
    out += [Case(K, N, 2048, rank) for K, N in SHAPES for rank in (16, 384)]
    return out + [Case(K, N, 8192, 16, 0.1) for K, N in SHAPES] + [Case(4096, 4096, 2048, 16, 0.1)]


def contenders(case: Case, names: Sequence[str], options: Options) -> list[str]:
    """Those that take part in a case: some peers in a few cases alone, when the whole is measured."""
    out = list(names)
    if not options.only:
        out += [LOW_RANK] if case.dropout else []
        if not options.quick and (case.K, case.N, case.T, case.dropout) == (4096, 4096, 8192, 0.0):
            out += ["peft_compiled", "peft_fp32_adapters", "peft_fp32"] if case.rank == 16 else []
            out += ["peft_compiled"] if case.rank == 384 else []
    return [name for name in out if not (case.dropout and name == "paper")]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Those of the LoRA layer, and magnitudes [N]: values that bfloat16 holds, so all regimes start from the same."""

    lora: layer.Inputs
    magnitude_N: torch.Tensor

    @staticmethod
    def random(case: Case, device: torch.device) -> Inputs:
        lora = layer.Inputs.random(layer.Case(case.K, case.N, case.T, case.rank, case.dropout), device)
        assert lora.dy.is_contiguous() and 0 not in lora.dy.stride()
        return Inputs(lora, magnitudes(lora.weight_NK, lora.A_rK, lora.B_Nr))


def magnitudes(weight_NK: torch.Tensor, A_rK: torch.Tensor, B_Nr: torch.Tensor) -> torch.Tensor:
    """Norms of the rows of W + s B A, moved by 2 %: what training does to them, and g is 1 nowhere."""
    norm_N = dense_norm(weight_NK.float(), A_rK.float(), B_Nr.float(), SCALING)
    return (norm_N * (1 + 0.02 * torch.randn_like(norm_N))).bfloat16().float()


def contender(name: str, inputs: Inputs) -> Contender:
    """By name: one of CONTENDERS, OPTIONAL but plans, or packlora:PLAN."""
    lora = inputs.lora

    def make() -> Work:
        if name == "frozen":
            return work(One(lora.weight_NK), lora.x, lora.dy, [])
        if name == "norm_refresh":
            base_N = squared_row_norm(lora.weight_NK)
            refresh = partial(row_norm, lora.weight_NK, lora.A_rK.float(), lora.B_Nr.float(), SCALING, base_N)
            return Work(lambda: [refresh()].clear(), lambda: None)
        if name == "paper":
            paper = PaperLayer(lora.weight_NK, lora.A_rK, lora.B_Nr, inputs.magnitude_N, SCALING)
            trained = [paper.A, paper.B, paper.magnitude]
            compare_with_peft(paper, trained, inputs)
            return work(paper, lora.x, lora.dy, trained)
        if name == "packlora_accelerate":
            model, one, parameters = peft_layer(inputs, wide=False)
            note = accelerated(name, model, {"x": lora.x.detach()[:1, :2]})
            if not lora.case.dropout:
                compare_with_peft(one, parameters, inputs)
            return work(one, lora.x, lora.dy, parameters, note=note)
        if name.startswith("packlora"):
            return packlora_work(name, inputs)
        return peft_work(name, inputs)

    return Contender(name, make)


def peft_layer(inputs: Inputs, wide: bool) -> tuple[Any, One, list[nn.Parameter]]:
    lora = inputs.lora
    return peft_model(lora.weight_NK, lora.A_rK, lora.B_Nr, lora.case.dropout, wide, inputs.magnitude_N)


def peft_work(name: str, inputs: Inputs) -> Work:
    """A real PEFT layer in one of its regimes."""
    lora = inputs.lora
    if name == "peft_fp32":
        weight = nn.Parameter(lora.weight_NK.float(), requires_grad=False)
        _, one, parameters = peft_model(weight, lora.A_rK, lora.B_Nr, lora.case.dropout, True, inputs.magnitude_N)
        return work(one, lora.x.detach().float().requires_grad_(), lora.dy.float(), parameters)
    _, one, parameters = peft_layer(inputs, wide=name.startswith("peft_fp32"))
    call: Callable[[torch.Tensor], torch.Tensor] = one
    if name == "peft_compiled":
        torch._dynamo.reset()  # else its limit of recompilations makes later cases run uncompiled
        call = torch.compile(one)
    elif name == "peft_fp32_autocast":
        call = under_autocast(one, lora.x.device)
    return work(call, lora.x, lora.dy, parameters)


@dataclass(frozen=True, slots=True)
class Operator:
    """The operator on one layer, as training holds it: float32 parameters and norms that follow them."""

    layers: tuple[Layer, ...]
    segments: tuple[Segment, ...]
    parameters: list[torch.Tensor]

    @staticmethod
    def of(
        weight_NK: nn.Parameter,
        factors: Sequence[tuple[torch.Tensor, ...]],
        runs: Sequence[tuple[int, int, float]],
        parity: bool,
    ) -> Operator:
        """
        Args:
            factors: (A, B) or (A, B, magnitude) of each adapter.
            runs: (start, stop, dropout) of each.
            parity: dropout as PEFT has it.
        """
        norms, parameters, adapters = RowNorms(), [], {}
        for number, values in enumerate(factors):
            own = [value.detach().to(torch.float32, copy=True).requires_grad_() for value in values]
            parameters += own
            get = norms.add(weight_NK, own[0], own[1], SCALING, version_counted=True).get if len(own) == 3 else None
            adapters[number] = LowRank(own[0], own[1], SCALING, own[2] if len(own) == 3 else None, get)
        # nobody writes into the output here, as nobody does in the models that packlora trains
        made = (Layer(Dense(weight_NK), None, adapters, keep_output=True),)
        return Operator(
            made, tuple(Segment(number, *run, base_dropped=parity) for number, run in enumerate(runs)), parameters
        )

    def call(self, name: str, x_TK: torch.Tensor, keys_T2: torch.Tensor) -> tuple[Callable[..., torch.Tensor], str]:
        """The call, for x [..., K], and the name of its plan: the one that the contender names, else the chooser's."""
        if ":" in name:
            plan = plan_from_name(name.partition(":")[2])
        else:
            plan = PlanChooser(x_TK.device).plan_of(x_TK, self.layers, self.segments)
        state = GroupState(version_counted=True)  # as in training: an optimizer moves version counters

        def call(x: torch.Tensor) -> torch.Tensor:
            return lora_group(x, self.layers, self.segments, keys_T2, 1, plan, state)[0]

        return call, plan.name


def operator(inputs: Inputs, parity: bool = True) -> Operator:
    lora = inputs.lora
    factors = [(lora.A_rK, lora.B_Nr, inputs.magnitude_N)]
    return Operator.of(lora.weight_NK, factors, [(0, lora.case.T, lora.case.dropout)], parity)


def dropout_keys(T: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (T, 2), device=device).to(torch.int32)


def flat(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] for the chooser: as in a call, it wants a gradient."""
    return x.reshape(-1, x.shape[-1])


def packlora_work(name: str, inputs: Inputs) -> Work:
    """The operator with the layer's adapter."""
    lora = inputs.lora
    made = operator(inputs, parity=name != LOW_RANK)
    call, plan = made.call(name, flat(lora.x), dropout_keys(lora.case.T, lora.x.device))
    if not lora.case.dropout:
        compare_with_peft(call, made.parameters, inputs)
    return work(call, lora.x, lora.dy, made.parameters, name == "packlora_stepped", f"plan {plan}")


def compare_with_peft(
    call: Callable[[torch.Tensor], torch.Tensor], parameters: Sequence[torch.Tensor], inputs: Inputs
) -> None:
    """Results against the untouched bfloat16 PEFT layer. Raises AssertionError where they differ."""
    _, one, own = peft_layer(inputs, wide=False)
    results = []
    for made, adapter in ((call, parameters), (one, own)):
        y = made(inputs.lora.x)
        results.append([y.detach(), *torch.autograd.grad(y, [inputs.lora.x, *adapter], inputs.lora.dy)])
    check_close(*results)


def plans_of(inputs: Inputs) -> list[str]:
    """Every plan that is legal for the case, as names of contenders."""
    made, chooser = operator(inputs), PlanChooser(inputs.lora.x.device)
    chooser.plan_of(flat(inputs.lora.x), made.layers, made.segments)
    return [f"packlora:{plan.name}" for case in chooser.choices for plan in legal_plans(case)]


def run(options: Options) -> list[dict[str, Any]]:
    """Measure; prints a line per case."""
    names, chosen = choose(options.only, CONTENDERS, OPTIONAL, cases(options))
    rows: list[dict[str, Any]] = []
    for case in options.each(chosen, rows):
        inputs = Inputs.random(case, options.device)
        taking_part = contenders(case, names, options)
        if "plans" in taking_part:
            listed = plans_of(inputs)
            print(f"{case.label}: {len(listed)} legal plans", flush=True)
            taking_part = list(dict.fromkeys([*taking_part, *listed]))
            taking_part.remove("plans")
        made = [contender(name, inputs) for name in taking_part]
        timings = paired(made, options.device, seconds=0.5, rounds=(15, 25), warmup=2, ahead=True, wall=True)
        row = {
            "part": "layer", "case": case.label, "K": case.K, "N": case.N, "T": case.T, "r": case.rank,
            "dropout": case.dropout, "shape": case.shape, **timings.row(),
        }  # fmt: skip
        rows.append(row)
        del inputs, made, timings
        show(row, options.device)
    return rows


KEYS = {"packlora": "layer", "packlora_accelerate": "accelerate"}
"""First words of the summary's keys for these contenders; of others their name and layer."""


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios to the frozen layer at T = 8192 without dropout: layer_r16_4096_over_frozen of the operator,
    accelerate_r16_4096_over_frozen of what accelerate() gives, and peers with their names before; ahead_ before them with the
    host ahead, _wall behind them on the wall."""
    out: dict[str, Any] = {}
    for row in rows:
        if row["T"] != 8192 or row["dropout"]:
            continue
        for name in (*row["over_frozen"], *row["failed"]):
            if name != "norm_refresh" and ":" not in name:
                case = f"r{row['r']}_{row['shape']}_over_frozen"
                key = f"{KEYS.get(name, f'{name}_layer')}_{case}"
                out[key] = row["over_frozen"].get(name)
                if "ahead_over_frozen" in row:
                    out[f"ahead_{key}"] = row["ahead_over_frozen"].get(name)
                if "wall_over_frozen" in row:
                    out[f"{key}_wall"] = row["wall_over_frozen"].get(name)
    return out


# --- several adapters --------------------------------------------------------------------------------------------------

KINDS = (False, True, False, True)
"""Which of multi.ADAPTERS' four are DoRA."""
MULTI_CONTENDERS = ["frozen", "packlora", "packlora_stepped", "peft_bf16", "peft_fp32_autocast"]


@dataclass(frozen=True, slots=True)
class MultiCase(multi.Case):
    @property
    def label(self) -> str:
        return f"multi {self.K}x{self.N} T{self.T}"


def multi_cases(options: Options) -> list[MultiCase]:
    if options.tiny:
        return [MultiCase(64, 96, 96)]
    every = [MultiCase(K, N, T) for T in (8192, 2048) for K, N in SHAPES]
    return every[:1] if options.quick else every


Factors = list[tuple[torch.Tensor, ...]]
"""A, B and, of DoRA adapters, the magnitude."""


def multi_factors(inputs: multi.Inputs) -> Factors:
    return [
        (A, B, magnitudes(inputs.weight_NK, A, B)) if dora else (A, B)
        for (A, B), dora in zip(inputs.factors, KINDS, strict=True)
    ]


def multi_contender(name: str, inputs: multi.Inputs, factors: Factors) -> Contender:
    """By name: one of MULTI_CONTENDERS or packlora:PLAN."""
    runs = multi.boundaries(inputs.case.T)

    def peft(number: int, wide: bool) -> tuple[One, list[nn.Parameter]]:
        A, B, *rest = factors[number]
        _, one, parameters = peft_model(inputs.weight_NK, A, B, 0.0, wide, rest[0] if rest else None)
        return one, parameters

    def compare(call: Callable[[torch.Tensor], torch.Tensor], parameters: list[torch.Tensor]) -> None:
        """Every adapter against a PEFT layer on its rows."""
        y = call(inputs.x_TK)
        dx, *own = torch.autograd.grad(y, [inputs.x_TK, *parameters], inputs.dy_TN)
        for number, (start, stop) in enumerate(runs):
            one, theirs = peft(number, wide=False)
            x = inputs.x_TK[start:stop].detach().requires_grad_()
            y_peft = one(x)
            expected = torch.autograd.grad(y_peft, [x, *theirs], inputs.dy_TN[start:stop])
            mine, own = own[: len(theirs)], own[len(theirs) :]
            check_close([y[start:stop], dx[start:stop], *mine], [y_peft, *expected])

    def make() -> Work:
        if name == "frozen":
            return work(One(inputs.weight_NK), inputs.x_TK, inputs.dy_TN, [])
        if name.startswith("packlora"):
            made = Operator.of(inputs.weight_NK, factors, [(start, stop, 0.0) for start, stop in runs], parity=True)
            own, plan = made.call(name, inputs.x_TK, inputs.keys_T2)
            compare(own, made.parameters)
            stepped = name == "packlora_stepped"
            return work(own, inputs.x_TK, inputs.dy_TN, made.parameters, stepped, f"plan {plan}")
        wide = name == "peft_fp32_autocast"
        layers, parameters = zip(*(peft(number, wide) for number in range(len(runs))), strict=True)

        def in_turn(x_TK: torch.Tensor) -> torch.Tensor:
            return torch.cat([one(x_TK[a:b]) for one, (a, b) in zip(layers, runs, strict=True)])

        call = under_autocast(in_turn, inputs.x_TK.device) if wide else in_turn
        return work(call, inputs.x_TK, inputs.dy_TN, [p for each in parameters for p in each])

    return Contender(name, make)


def run_multi(options: Options) -> list[dict[str, Any]]:
    """Measure; prints a line per case."""
    names, chosen = choose(options.only, MULTI_CONTENDERS, [], multi_cases(options))
    rows: list[dict[str, Any]] = []
    for case in options.each(chosen, rows):
        inputs = multi.Inputs.random(case, options.device)
        factors = multi_factors(inputs)
        made = [multi_contender(name, inputs, factors) for name in names]
        timings = paired(made, options.device, seconds=0.5, rounds=(15, 25), warmup=2, ahead=True)
        row = {"part": "multi", "case": case.label, "K": case.K, "N": case.N, "T": case.T, **timings.row()}
        rows.append(row)
        show(row, options.device)
    return rows


def summary_multi(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios to the frozen layer at T = 8192."""
    return {
        f"{'' if name == 'packlora' else f'{name}_'}multi_{row['K']}x{row['N']}_over_frozen": row["over_frozen"].get(
            name
        )
        for row in rows
        if row["T"] == 8192
        for name in (*row["over_frozen"], *row["failed"])
    }


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Lines of case, contender, us, over frozen, peak MiB."""
    return [
        [
            row["case"], name, f"{1e3 * row['ms'][name]:.0f}", f"{row['over_frozen'].get(name, 1.0) or float('nan'):.3f}",
            f"{row['peak_mib'][name]:.0f}" if name in row["peak_mib"] else "-",
        ]
        for row in rows
        for name in row["ms"]
    ]  # fmt: skip
