"""The plans that may be used for a case, and RunLoRA's names for some of them.

RunLoRA (Cherniuk et al., arXiv 2312.03415) chooses among 4 forwards and 8 backwards of one adapter on one layer; each of them
is a Plan. Its forward3 is forward1 with the products in the other order, its forward4 is forward2 without flattening a
batch, which packed tokens do not have. Its further 35 variants differ in when tensors are freed, not in what is computed.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import torch

from packlora.ops.gpu import HAS_TRITON, has_copy_engine
from packlora.ops.lora_linear.plan import CHAIN, Plan, Situation, why_not
from packlora.plans.case import Case

TRITON_DTYPES = ("float16", "bfloat16", "float32")

FUSED_MULTIPLE = 16

RUNLORA_FORWARD: dict[str, dict[str, Any]] = {
    "forward1": {"up": "after"},
    "forward2": {"up": "merged"},
    "forward3": {"up": "before"},
    "forward4": {"up": "merged"},
}
RUNLORA_BACKWARD: dict[str, dict[str, Any]] = {
    "b1": {"dA": "dS", "dB": "S", "dx": "after"},
    "b2": {"dA": "dS", "dB": "xd", "dx": "after"},
    "b3": {"dA": "xd", "dB": "xd", "dx": "after"},
    "b4": {"dA": "xd", "dB": "xd", "dx": "merged"},
    "b5": {"dA": "dS", "dB": "S", "dx": "merged"},
    "b6": {"dA": "xd", "dB": "S", "dx": "after"},
    "b7": {"dA": "xd", "dB": "S", "dx": "merged"},
    "b8": {"dA": "dS", "dB": "xd", "dx": "merged"},
}


def runlora_plan(forward: str, backward: str) -> Plan:
    """RunLoRA's graph by its two names. S is never saved there, so `keep_s` is False.

    Raises:
        ValueError: no such name.
    """
    for name, names in ((forward, RUNLORA_FORWARD), (backward, RUNLORA_BACKWARD)):
        if name not in names:
            raise ValueError(f"RunLoRA has no graph {name!r}; it has {', '.join(names)}")
    return Plan(keep_s=False, **RUNLORA_FORWARD[forward], **RUNLORA_BACKWARD[backward])


@lru_cache(maxsize=4096)
def legal_plans(case: Case, lossy: bool = False) -> tuple[Plan, ...]:
    """All plans for the case, the plain chain first. Of plans that would do the same there, one is listed.

    Args:
        lossy: with plans that round more than the chain does.
    """
    every = (
        Plan(*parts)  # type: ignore[arg-type]
        for parts in itertools.product(
            ("mm", "routed"), ("after", "before", "routed", "epilogue", "fused", "merged"), ("mm", "one-pass"),
            ("after", "before", "routed", "fused", "merged"), ("dS", "xd"), ("S", "xd"), (True, False),
        )
    )  # fmt: skip
    return (CHAIN, *(plan for plan in every if plan != CHAIN and why_illegal(plan, case, lossy) is None))


def why_illegal(plan: Plan, case: Case, lossy: bool = False) -> str | None:
    """Why the plan may not be used for the case, or None where it may. The plain chain always may.

    Besides plans that do not compute the case (plan.why_not) these are plans that could not run here, that round more than
    was asked for, and that do what another one does.
    """
    if plan == CHAIN:
        return None
    if not case.ranks:
        return "no adapter is there: the frozen layer has one way to be computed"
    double = case.dtype == "float64"
    call = Situation(case.single, True, any(case.drops), case.composed, case.base_dropped, double)
    return why_not(plan, call) or _why_not_here(plan, case, lossy) or _why_pointless(plan, case)


def _why_not_here(plan: Plan, case: Case, lossy: bool) -> str | None:
    """It would round more, or could not run."""
    if plan.lossy and not lossy:
        return "a merged weight rounds more than the chain and was not asked for"
    if not plan.keep_s and not case.single:
        return "S is computed again for one adapter that owns all tokens"
    adds_late = plan.up == "epilogue" or (plan.up == "routed" and case.rounds_first)
    if (
        adds_late and case.torch_dtype.itemsize == 2 and not case.composed
    ):  # which are rounded again when they are scaled
        return "in 16 bits what is added to a rounded product is lost where it is small"
    if "before" in (plan.up, plan.dx) and case.device == "cuda" and case.dtype == "float32":
        return "float32 products on a GPU round more when they accumulate onto another product"
    if plan.needs_triton:
        if case.device != "cuda" or case.dtype not in TRITON_DTYPES or not HAS_TRITON:
            return f"Triton kernels are for {', '.join(TRITON_DTYPES)} on a GPU, with the triton package"
        if "fused" in (plan.up, plan.dx) and (
            case.dtype == "float32" or any(size % FUSED_MULTIPLE for size in (case.K, *case.Ns)) or not has_tma()
        ):
            return f"fused kernels are for 16 bits and sizes that {FUSED_MULTIPLE} divides, on Hopper or a B200 (TMA)"
    return None


@lru_cache
def has_tma() -> bool:
    """Whether this machine's GPU has the copy engine that the fused kernels use."""
    return torch.cuda.is_available() and has_copy_engine(torch.device("cuda", torch.cuda.current_device()))


def _why_pointless(plan: Plan, case: Case) -> str | None:
    """Another plan does exactly the same for this case."""
    need_x, need_A, need_B = case.needs
    if case.base_dropped:
        return "DoRA with two base products has the plain chain alone"
    if plan.dA == "xd" and not need_A:
        return "dA is not wanted"
    if plan.dB == "xd" and not need_B:
        return "dB is not wanted"
    if plan.grad == "one-pass" and not (need_B and (need_x or need_A)):
        return "one-pass gives dS and dB; one of them is not wanted"
    if plan.dx not in ("after", "routed") and not need_x:
        return "dx is not wanted"
    could_keep = plan.up != "merged" and plan.dB == "S"
    if plan.keep_s and not could_keep:
        return "S is not used in the backward"
    if not plan.keep_s and could_keep and not need_B:
        return "S is not used in the backward"
    if case.torch_dtype.itemsize == 2 and (plan.up == "after" or (plan.dx == "after" and need_x)):
        return "in 16 bits `after` is carried out as `before`"
    return None
