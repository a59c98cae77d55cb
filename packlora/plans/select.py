"""PlanChooser: the plan for a case, at once. It never measures; that is tune.py's work.

Order of the evidence: what was measured on this device, else the cost model. Whatever the mode, a plan that was measured
slower than the plain chain is not chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from packlora.ops.lora_linear.plan import CHAIN, Plan, ordered
from packlora.ops.lora_linear.types import Layer, Segment
from packlora.plans.cache import PlanCache, Record, fastest
from packlora.plans.case import Case
from packlora.plans.cost import Machine, flops, machine, seconds
from packlora.plans.space import legal_plans

Mode = Literal["auto", "flops", "time"]
"""auto: the fastest one measured; where nothing was measured, the fastest one by the roofline estimate. flops: the fewest
FLOPs. time: the fastest one measured; where nothing was measured, the plain chain."""
Criterion = Literal["flops", "time"]
Origin = Literal["measured", "estimated", "flops", "not measured", "only one"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and what speaks for it. ms, chain_ms: measured for it and for the plain chain, where they were."""

    plan: Plan
    origin: Origin
    ms: float | None = None
    chain_ms: float | None = None


class PlanChooser:
    """Chooses one plan per case and remembers it.

    Args:
        device: of the layers.
        mode: see Mode; by default auto on a GPU. On a CPU, where the products are the library's in every plan and the
            estimate would decide on a few per cent, time.
        cache: of measurements; by default the device's own.
    """

    def __init__(self, device: torch.device, mode: Mode | None = None, cache: PlanCache | None = None) -> None:
        mode = mode or ("auto" if device.type == "cuda" else "time")
        if mode not in get_args(Mode):
            raise ValueError(f"mode {mode!r} is not one of {', '.join(get_args(Mode))}")
        self.device, self.mode = device, mode
        self.cache = cache or PlanCache(device)
        self.choices: dict[Case, Choice] = {}
        """By case, in the order in which they were first asked for."""
        self._plans: dict[Case, Plan] = {}
        self._calls: dict[Any, tuple[tuple[Layer, ...], Plan]] = {}

    def plan_for(self, case: Case) -> Plan:
        """The plan. Known cases cost one dict lookup."""
        plan = self._plans.get(case)
        if plan is None:
            choice = self._choose(case)
            plan = self._plans[case] = ordered(choice.plan, case.torch_dtype.itemsize)
            self.choices[case] = replace(choice, plan=plan)
        return plan

    def plan_of(self, x: torch.Tensor, layers: Sequence[Layer], runs: Sequence[Segment]) -> Plan:
        """The plan for a call of ops.lora_linear.autograd.lora_group with these operands."""
        T = x.numel() // x.shape[-1]
        who = tuple([(run.adapter, run.dropout > 0, run.base_dropped) for run in runs])
        covered = sum([run.stop - run.start for run in runs]) == T
        key = (x.dtype, T, covered, x.requires_grad, who, *map(id, layers))
        found = self._calls.get(key)
        if found is None or any(new is not old for new, old in zip(layers, found[0], strict=True)):
            if len(self._calls) > 100_000:  # token counts differ from microbatch to microbatch
                self._calls.clear()
            found = self._calls[key] = (tuple(layers), self.plan_for(Case.of_call(x, layers, runs)))
        return found[1]

    def _choose(self, case: Case) -> Choice:
        plans = legal_plans(case)
        if len(plans) == 1:
            return Choice(CHAIN, "only one")
        record = self.cache.get(case.key)
        chain_ms = record.ms[CHAIN.name] if record else None
        if record and self.mode != "flops":
            best = fastest(plans, record.ms)
            return Choice(best, "measured", record.ms[best.name], chain_ms)
        if self.mode == "time":
            return Choice(CHAIN, "not measured")
        if record:
            plans = tuple(plan for plan in plans if _no_slower(plan, record))
        criterion: Criterion = "flops" if self.mode == "flops" else "time"
        best = cheapest(plans, case, criterion, machine(self.device, case.dtype, case.tf32))
        ms = record.ms.get(best.name) if record else None
        return Choice(best, "flops" if criterion == "flops" else "estimated", ms, chain_ms)

    def record(self) -> list[dict[str, Any]]:
        """What was asked for and chosen, for run.json and the report."""
        return [
            {"case": case.key, "plan": choice.plan.name, "origin": choice.origin, "ms": choice.ms, "chain_ms": choice.chain_ms}
            for case, choice in self.choices.items()
        ]  # fmt: skip


def _no_slower(plan: Plan, record: Record) -> bool:
    """Nothing measured speaks against the plan."""
    return plan.name not in record.failed and record.ms.get(plan.name, 0.0) <= record.ms[CHAIN.name]


def cheapest(plans: Iterable[Plan], case: Case, criterion: Criterion, roofline: Machine) -> Plan:
    """By FLOPs, then by estimated time; or by estimated time alone. The first one of equals."""
    if criterion == "flops":
        return min(plans, key=lambda plan: (flops(plan, case), seconds(plan, case, roofline)))
    return min(plans, key=lambda plan: seconds(plan, case, roofline))
