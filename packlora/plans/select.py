"""PlanChooser: the plan for a case, at once, as the user asked for it (ask.py). It never measures: tune/plans.py does.

Where nothing was asked for, the order of the evidence is: what was measured on this device, else the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import ReferenceType

import torch

from packlora.ops.lora_linear.plan import CHAIN, Plan, ordered, why_not
from packlora.ops.lora_linear.types import Layer, Segment
from packlora.plans import identity
from packlora.plans.ask import MEASURED, Ask
from packlora.plans.cache import PlanCache, fastest
from packlora.plans.case import Case
from packlora.plans.space import legal_plans

Origin = Literal["measured", "estimated", "not measured", "only one", "flops", "asked for", "gave way"]
LITTLE = 0.05
"""Share of the estimated time of forward and backward that recomputing S may cost where memory is preferred."""
MOST = 16_384
"""Cases that are remembered."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and what speaks for it. ms, chain_ms: measured for it and for the plain chain, where they were. why_not: the plan
    that was asked for, and why it does not compute the case."""

    plan: Plan
    origin: Origin
    ms: float | None = None
    chain_ms: float | None = None
    why_not: str | None = None

    def described(self, case: Case) -> str:
        """Describe the choice for a report: its evidence, its saving against the plain chain, and the bytes of S that it
        keeps."""
        from packlora.plans.cost import flops, s_bytes

        own, chain = flops(self.plan, case), flops(CHAIN, case)
        words = [f"{self.origin}: {self.why_not}" if self.why_not is not None else str(self.origin)]
        if self.ms is not None:
            words.append(f"{self.ms:.3g} ms, the chain {self.chain_ms:.3g} ms")
        elif own != chain:
            words.append(
                f"{100 * abs(1 - own / chain):.1f} % {'fewer' if own < chain else 'more'} FLOPs than the chain"
            )
        kept = s_bytes(self.plan, case)
        words.append(f"S {kept / 2**20:.3g} MiB" if kept else "S not kept")
        return ", ".join(words)


class PlanChooser:
    """Chooses one plan per case and remembers it: the fastest one measured; where nothing was measured, on a GPU the fastest
    one by the roofline estimate, on a CPU the plain chain: there the products are the library's in every plan, and the estimate
    would decide on a few per cent. As `ask` says: the plan that is asked for instead, and where it does not compute the case
    the plain chain; or the one with the fewest floating-point operations. The kernels have the sizes that were measured on the
    device (kernel_sizes.py).

    Args:
        device: of the layers.
        cache: of measurements; by default the device's own.
        ask: what the user wants.
    """

    def __init__(self, device: torch.device, cache: PlanCache | None = None, ask: Ask = MEASURED) -> None:
        self.device, self.estimates, self.ask = device, device.type == "cuda", ask
        if identity.has_kernels(device):
            from packlora.plans.kernel_sizes import use_tuned

            use_tuned(device)
        self.cache = cache or PlanCache(device)
        self.choices: dict[Case, Choice] = {}
        """Choice by case, in the order in which the cases first occurred."""
        self._calls: dict[Any, tuple[tuple[ReferenceType[Layer], ...], Plan]] = {}
        """Plan by call. Layers that are gone, with the adapters on them, are not kept."""

    def choice(self, case: Case) -> Choice:
        """The plan, ordered for the dtype, and where it comes from. Known cases cost one dict lookup."""
        found = self.choices.get(case)
        if found is None:
            found = self._choose(case)
            found = replace(found, plan=ordered(found.plan, case.torch_dtype.itemsize))
            if len(self.choices) >= MOST:  # any mix of adapters' ranks is one
                self.choices.clear()
            self.choices[case] = found
        return found

    def plan_for(self, case: Case) -> Plan:
        """The plan."""
        return self.choice(case).plan

    def plan_of(
        self, x: torch.Tensor, layers: Sequence[Layer], segments: Sequence[Segment], known: bool = True
    ) -> Plan:
        """The plan for a call of ops.lora_linear.autograd.lora_group with these operands. known: whether the host knows the
        boundaries of the segments (boundaries.py).

        Raises:
            ValueError: no plan computes segments that move, here.
        """
        T = x.numel() // x.shape[-1]
        who = tuple([(segment.adapter, segment.dropout > 0, segment.base_dropped) for segment in segments])
        covered = sum([segment.stop - segment.start for segment in segments]) == T  # noqa: C419
        key = (x.dtype, T, covered, x.requires_grad, known, who, *map(id, layers))
        found = self._calls.get(key)
        if found is None or any(new is not old() for new, old in zip(layers, found[0], strict=True)):
            if len(self._calls) > 20_000:  # token counts differ from microbatch to microbatch
                self._calls.clear()
            plan = self.plan_for(Case.of_call(x, layers, segments, not known))
            found = self._calls[key] = tuple(map(ReferenceType, layers)), plan
        return found[1]

    def _choose(self, case: Case) -> Choice:
        reason = None
        if (given := self.ask.given) is not None:
            call = case.situation("any" if self.ask.lossy else "exact")
            reason = why_not(given, call if isinstance(self.ask.plan, str) else call._replace(target=None))
            if reason is None:
                return self._timed(Choice(given, "asked for"), case)
            reason = f"{self.ask.plan if isinstance(self.ask.plan, str) else given.name}: {reason}"
            chain = Plan(keep_s=given.keep_s)
            if why_not(chain, call) is None:
                return Choice(chain, "gave way", why_not=reason)
        plans = legal_plans(case, self.ask.lossy)
        if not plans:
            raise ValueError(f"no plan computes {case.key}")
        choice = self._fewest(plans, case) if self.ask.plan == "flops" else self._fastest(plans, case)
        if self.ask.prefer == "memory" and self._remade_at_little_cost(choice.plan, case):
            choice = Choice(replace(choice.plan, keep_s=False), choice.origin)
        return replace(choice, why_not=reason)

    def _fastest(self, plans: Sequence[Plan], case: Case) -> Choice:
        """The plain chain is among the plans, unless the segments move."""
        if len(plans) == 1:
            return Choice(plans[0], "only one")
        if (record := self.cache.get(case.key)) is not None:
            best = fastest(plans, record.ms)
            return Choice(best, "measured", record.ms[best.name], record.ms[CHAIN.name])
        if not self.estimates and CHAIN in plans:
            return Choice(CHAIN, "not measured")
        return Choice(min(plans, key=lambda plan: self._seconds(plan, case)), "estimated")

    def _fewest(self, plans: Sequence[Plan], case: Case) -> Choice:
        """Choose the plan with the fewest FLOPs. Among several with equally few it is the fastest one where the chain is among
        them, else the first."""
        from packlora.plans.cost import flops

        by_plan = {plan: flops(plan, case) for plan in plans}
        least = [plan for plan in plans if by_plan[plan] == min(by_plan.values())]
        best = self._fastest(least, case).plan if CHAIN in least or case.moving else least[0]
        return self._timed(Choice(best, "flops"), case)

    def _timed(self, choice: Choice, case: Case) -> Choice:
        """Choice with the measured times of its plan, if there are any."""
        record = self.cache.get(case.key)
        if record is None or choice.plan.name not in record.ms:
            return choice
        return replace(choice, ms=record.ms[choice.plan.name], chain_ms=record.ms[CHAIN.name])

    def _remade_at_little_cost(self, plan: Plan, case: Case) -> bool:
        """Whether S, which the plan keeps, would be made again at no more than LITTLE of the estimated time."""
        from packlora.plans.cost import s_bytes

        again = self._seconds(replace(plan, keep_s=False), case)
        return s_bytes(plan, case) > 0 and again <= (1 + LITTLE) * self._seconds(plan, case)

    def _seconds(self, plan: Plan, case: Case) -> float:
        from packlora.plans.cost import machine, seconds

        return seconds(plan, case, machine(self.device, case.dtype, case.tf32))

    def record(self) -> list[dict[str, Any]]:
        """Choices by case, for run.json and the report; why_not only where a plan that was asked for could not be used."""
        return [
            {"case": case.key, "plan": choice.plan.name, "origin": choice.origin, "ms": choice.ms, "chain_ms": choice.chain_ms}
            | ({"why_not": choice.why_not} if choice.why_not is not None else {})
            for case, choice in list(self.choices.items())  # other threads add some
        ]  # fmt: skip
