"""The plans that are chosen among for a case: those of ops.lora_linear.plan.PLANS that compute it on this machine."""

from __future__ import annotations

from dataclasses import replace

from packlora.ops.lora_linear.plan import CHAIN, PLANS, Plan, ordered, why_not
from packlora.plans.case import Case


def legal_plans(case: Case, lossy: bool = False) -> tuple[Plan, ...]:
    """The plain chain first. Of plans that do the same for the case, the first of the list; a plan that computes again what
    the same plan keeps is only slower, and is for those who ask for it. lossy: with those that merge weights."""
    if not case.ranks:
        return (CHAIN,)
    call = case.situation("lossy" if lossy else "exact")
    found: dict[Plan, Plan] = {}
    for _, plan, _ in PLANS:
        slower = not plan.keep_s and replace(plan, keep_s=True) in found.values()
        if not slower and why_not(plan, call) is None:
            found.setdefault(carried_out(plan, case), plan)
    return tuple(found.values())


def carried_out(plan: Plan, case: Case) -> Plan:
    """Representative of all plans that do the same for the case: parts that do not matter there are the chain's."""
    plan = ordered(plan, case.torch_dtype.itemsize)
    need_x, need_A, need_B = case.needs
    if not need_x:  # `dx` then only decides how dA is computed
        by_kernel = plan.dx == "routed" or (plan.dx == "fused" and any(case.drops))
        plan = replace(plan, dx="routed" if by_kernel else "after")
    plan = replace(plan, dA=plan.dA if need_A else "dS", dB=plan.dB if need_B else "S")
    s_is_used = need_B and plan.dB == "S" and plan.up != "merged"
    return plan if s_is_used else replace(plan, keep_s=False)
