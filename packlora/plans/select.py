"""PlanChooser: the plan for a case, at once. It never measures; that is tune.py's work.

Order of the evidence: what was measured on this device, else the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from packlora.ops.lora_linear.plan import CHAIN, Plan, ordered
from packlora.ops.lora_linear.types import Layer, Segment
from packlora.plans.cache import PlanCache, fastest
from packlora.plans.case import Case
from packlora.plans.cost import machine, seconds
from packlora.plans.space import legal_plans

Origin = Literal["measured", "estimated", "not measured", "only one"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and what speaks for it. ms, chain_ms: measured for it and for the plain chain, where they were."""

    plan: Plan
    origin: Origin
    ms: float | None = None
    chain_ms: float | None = None


class PlanChooser:
    """Chooses one plan per case and remembers it: the fastest one measured; where nothing was measured, on a GPU the fastest
    one by the roofline estimate, on a CPU the plain chain: there the products are the library's in every plan, and the estimate
    would decide on a few per cent.

    Args:
        device: of the layers.
        cache: of measurements; by default the device's own.
    """

    def __init__(self, device: torch.device, cache: PlanCache | None = None) -> None:
        self.device, self.estimates = device, device.type == "cuda"
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

    def plan_of(
        self, x: torch.Tensor, layers: Sequence[Layer], segments: Sequence[Segment], moving: bool = False
    ) -> Plan:
        """The plan for a call of ops.lora_linear.autograd.lora_group with these operands. moving: the segments are nominal.

        Raises:
            ValueError: no plan computes segments that move, here.
        """
        T = x.numel() // x.shape[-1]
        who = tuple([(segment.adapter, segment.dropout > 0, segment.base_dropped) for segment in segments])
        covered = sum([segment.stop - segment.start for segment in segments]) == T
        key = (x.dtype, T, covered, x.requires_grad, moving, who, *map(id, layers))
        found = self._calls.get(key)
        if found is None or any(new is not old for new, old in zip(layers, found[0], strict=True)):
            if len(self._calls) > 100_000:  # token counts differ from microbatch to microbatch
                self._calls.clear()
            found = self._calls[key] = (tuple(layers), self.plan_for(Case.of_call(x, layers, segments, moving)))
        return found[1]

    def _choose(self, case: Case) -> Choice:
        plans = legal_plans(case)
        if not plans:
            raise ValueError(f"no plan computes {case.key}")
        if len(plans) == 1:
            return Choice(plans[0], "only one")
        if (record := self.cache.get(case.key)) is not None:
            best = fastest(plans, record.ms)
            return Choice(best, "measured", record.ms[best.name], record.ms[CHAIN.name])
        if not self.estimates and CHAIN in plans:
            return Choice(CHAIN, "not measured")
        roofline = machine(self.device, case.dtype, case.tf32)
        return Choice(min(plans, key=lambda plan: seconds(plan, case, roofline)), "estimated")

    def record(self) -> list[dict[str, Any]]:
        """What was asked for and chosen, for run.json and the report."""
        return [
            {"case": case.key, "plan": choice.plan.name, "origin": choice.origin, "ms": choice.ms, "chain_ms": choice.chain_ms}
            for case, choice in self.choices.items()
        ]  # fmt: skip
