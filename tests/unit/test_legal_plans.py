"""Which plans compute a call is decided by one function, on the adapters that own its tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from group_cases import GroupCase, cast, compare, make_case, run_group, run_reference
from seeds import SEED

from packlora.ops.lora_linear.plan import CHAIN, PLANS, ROUTED, NamedPlan, Plan, legal, ordered, why_not
from packlora.ops.lora_linear.types import Segment, situation
from packlora.plans.cache import PlanCache
from packlora.plans.case import Case
from packlora.plans.select import PlanChooser
from packlora.plans.space import legal_plans

CPU = torch.device("cpu")

ATTACHED: dict[str, dict[str, Any]] = {
    "DoRA": {"ranks": [[3, 2], [4, 5]], "dropouts": [0.0, 0.0], "dora": [False, True]},
    "DoRA with dropout": {"ranks": [[3, 0], [4, 5]], "dropouts": [0.0, 0.3], "dora": [False, True]},
    "a trained bias": {"ranks": [[3, 2], [0, 4]], "dropouts": [0.2, 0.0], "biases": [False, True]},
}
"""Adapter 0, a plain LoRA, has all tokens; the other one is attached and has none."""


def beside(kind: str, seed: int = SEED, owner: int = 0) -> GroupCase:
    return make_case(23, 9, [7, 12], with_bias=True, seed=seed, whole=owner, **ATTACHED[kind])


def test_a_case_s_plans_are_those_that_compute_its_calls(tmp_path: Path) -> None:
    """Random calls, among several attached adapters: what the planner may choose is never illegal where it is used, and
    gives the specified numbers."""
    rng = random.Random(SEED)
    for trial in range(12):
        kind = rng.choice([*ATTACHED])
        case = beside(kind, SEED + trial, owner=rng.randrange(2))
        if rng.random() < 0.4:
            case = replace(
                case, segments=(Segment(0, 0, 9, rng.choice([0.0, 0.2])), Segment(1, 9, rng.choice([20, 23])))
            )
        found = situation(case.layers, case.segments, 23)
        asked: list[Case] = []

        class Asking(PlanChooser):
            def plan_for(self, case: Case, asked: list[Case] = asked) -> Plan:
                asked.append(case)
                return CHAIN

        own, _ = cast(case, torch.float64)
        Asking(CPU, cache=PlanCache(CPU, tmp_path / "none.json")).plan_of(own.x, own.layers, own.segments)
        made = asked[0]
        assert made == Case.of_call(own.x, own.layers, own.segments)
        assert made.situation()._replace(target=None) == found
        plans = legal_plans(made)
        assert all(why_not(ordered(plan, size), found) is None for plan in plans for size in (2, 4))
        if len(plans) > 1:
            for plan in rng.sample(plans[1:], min(2, len(plans) - 1)):
                compare(run_group(case, torch.float64, plan), run_reference(case, torch.float64), 1e-11)


@pytest.mark.parametrize("named", PLANS, ids=lambda named: named.name)
def test_every_plan_of_the_list_gives_the_specified_numbers(named: NamedPlan) -> None:
    """In float64, where plans of kernels give way to the plain chain."""
    case = beside("DoRA")
    assert named.plan.needs_triton != (
        legal(named.plan, situation(case.layers, case.segments, 23)._replace(double=True)) == named.plan
    )
    compare(run_group(case, torch.float64, named.plan), run_reference(case, torch.float64), 1e-11)


def test_kernels_asked_for_in_float64_give_way_to_the_plain_chain() -> None:
    """They have no float64: gradients would be NaN without a word."""
    case = make_case(23, 32, [16], [[4]], [0.0], False, SEED, whole=0)
    compare(run_group(case, torch.float64, ROUTED), run_reference(case, torch.float64), 1e-11)
