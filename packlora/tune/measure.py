"""Measuring plans on the device: which of them is really fastest for a case.

All plans of a case run in turn inside one loop (timing.py: random order, L2 flushed on a GPU), forward and backward
together, because what a forward keeps is what its backward saves. A plan's time is the longer of the device's and the host's:
in a run of many layers the one that is slower sets the pace. A plan that fails, out of memory above all, is left out with its
reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import torch

from packlora.ops.dropout.keys import token_keys
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.plans.cache import Record
from packlora.plans.case import Case
from packlora.plans.cost import flops, machine, seconds
from packlora.plans.space import legal_plans
from packlora.tune.timing import Contender, Work, paired

RATE = 0.1
"""Dropout rate of cases with dropout; the time does not depend on it."""

FAR = 1.25
"""Times the best estimate: a plan that should take longer than that is not measured."""

Make = Callable[[Case, Plan], Callable[[], None]]
"""Builds one forward and backward of a case by a plan, ready to be called again and again."""


def with_earlier(now: Record, earlier: Record | None) -> Record:
    """A case's record after it was measured again. Plans that were not measured now, as those that merge weights or those for
    which there was no time, keep their time over the plain chain's."""
    if earlier is None:
        return now
    scale = now.ms[CHAIN.name] / earlier.ms[CHAIN.name]
    before = {name: time * scale for name, time in earlier.ms.items() if name not in now.failed}
    ms = before | now.ms
    failed = {name: why for name, why in earlier.failed.items() if name not in ms} | now.failed
    return replace(now, ms=ms, failed=failed)


def candidates(case: Case, device: torch.device, limit: int = 10, lossy: bool = False) -> tuple[Plan, ...]:
    """The plans worth measuring: the plain chain, the usual kernels, the plan with the fewest FLOPs, those within FAR of the
    best by estimated time; `limit` at most. lossy: after these, those that merge weights and are worth it among all."""
    plans = legal_plans(case, lossy)
    roofline = machine(device, case.dtype, case.tf32)
    estimated = {plan: seconds(plan, case, roofline) for plan in plans}
    best = min(estimated.values())
    near = sorted((plan for plan in plans if estimated[plan] <= FAR * best), key=estimated.__getitem__)
    usual = (CHAIN, ROUTED) if ROUTED in plans else (CHAIN,)
    first = (*usual, min(plans, key=lambda plan: (flops(plan, case), estimated[plan])))
    worth = tuple(dict.fromkeys((*first, *near)))[:limit]
    return (*candidates(case, device, limit), *(plan for plan in worth if plan.lossy)) if lossy else worth


def measure(
    case: Case,
    plans: Sequence[Plan],
    device: torch.device,
    make: Make | None = None,
    budget_s: float = 1.0,
    rounds: tuple[int, int] = (9, 100),
) -> Record:
    """Measure milliseconds of forward and backward per plan, see `summarised`.

    Args:
        make: of the work; by default ops.lora_linear.autograd.lora_group on random operands.
        budget_s, rounds: how long the counted rounds should take together, and the fewest and most of them.
    """
    make = make or group_maker(device)

    def contender(plan: Plan) -> Contender:
        def build() -> Work:
            return Work(make(case, plan), lambda: None)

        return Contender(plan.name, build)

    timings = paired([contender(plan) for plan in plans], device, budget_s, rounds)
    done = {name: timing for name, timing in timings.by_name.items() if timing.error is None}
    by_round = {
        name: [max(ms, us / 1e3) for ms, us in zip(timing.ms, timing.host_us, strict=True)]
        for name, timing in done.items()
    }
    failed = {name: timing.error for name, timing in timings.by_name.items() if timing.error is not None}
    return Record(summarised(by_round), failed, datetime.now(UTC).isoformat(timespec="seconds"))


def summarised(by_round: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds by plan name from those of every round.

    The plain chain's are its median. Another plan's are the chain's times the median ratio within a round, so that what slows
    the whole machine down for a while favours no plan; one that is not faster in three rounds of four counts as no faster.
    """
    chain = by_round.get(CHAIN.name)
    if chain is None:
        return {name: round(statistics.median(ms), 5) for name, ms in by_round.items()}
    out = {}
    for name, ms in by_round.items():
        ratios = sorted(own / other for own, other in zip(ms, chain, strict=True))
        ratio = statistics.median(ratios)
        if ratios[len(ratios) * 3 // 4] >= 1:
            ratio = max(ratio, 1.0)
        out[name] = round(statistics.median(chain) * ratio, 5)
    return out


def group_maker(device: torch.device) -> Make:
    """Work on random operands, which all plans of a case share: x and W in the case's dtype, A and B in float32 (float64 for
    float64), as in training. The tokens are shared out evenly; without `covered` one more share has no adapter."""
    operands: dict[Case, _Operands] = {}

    def make(case: Case, plan: Plan) -> Callable[[], None]:
        if case not in operands:
            operands.clear()
            operands[case] = _Operands(case, device)
        return operands[case].work(plan)

    return make


class _Operands:
    def __init__(self, case: Case, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def randn(*shape: int, dtype: torch.dtype = case.torch_dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        wide = torch.float64 if case.dtype == "float64" else torch.float32
        need_x, need_A, need_B = case.needs
        self.x_TK = randn(case.tokens, case.K).requires_grad_(need_x)
        self.d_TN = [randn(case.tokens, N) for N in case.Ns]
        self.leaves = [self.x_TK] if need_x else []
        self.layers = []
        for index, (N, bias) in enumerate(zip(case.Ns, case.biases, strict=True)):
            adapters = {}
            for number, by_layer in enumerate(case.ranks):
                if rank := by_layer[index]:
                    A_rK = randn(rank, case.K, dtype=wide).div_(case.K**0.5).requires_grad_(need_A)
                    B_Nr = randn(N, rank, dtype=wide).div_(rank**0.5).requires_grad_(need_B)
                    low = LowRank(A_rK, B_Nr, 1.0)
                    if case.composed:
                        norm_N = torch.rand(N, generator=generator, device=device, dtype=wide) + 1
                        low = LowRank(A_rK, B_Nr, 1.0, (norm_N * 1.01).requires_grad_(need_B), norm_N)
                    adapters[number] = low
                    self.leaves += [leaf for leaf in low.operands().values() if leaf.requires_grad]
            self.layers.append(Layer(Dense(randn(N, case.K).div_(case.K**0.5)), randn(N) if bias else None, adapters))
        shares = len(case.ranks) + (not case.covered)
        bounds = np.linspace(0, case.tokens, shares + 1).astype(int).tolist() if shares else []
        self.segments = [
            Segment(number, bounds[number], bounds[number + 1], RATE if drops else 0.0, case.base_dropped)
            for number, drops in enumerate(case.drops)
            if bounds[number] < bounds[number + 1]
        ]
        self.keys_T2 = torch.from_numpy(token_keys(0, 0, 0, case.tokens)).to(device) if any(case.drops) else None

    def work(self, plan: Plan) -> Callable[[], None]:
        state = GroupState(version_counted=True)  # like in training: parameters are packed once per optimizer step

        def step() -> None:
            outputs = lora_group(self.x_TK, self.layers, self.segments, self.keys_T2, 0, plan, state)
            if self.leaves:
                torch.autograd.grad(outputs, self.leaves, self.d_TN, allow_unused=True)

        return step
