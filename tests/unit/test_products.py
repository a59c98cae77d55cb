"""One adapter by plain products in every association: against the specification in float64, and counted as they run."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from group_cases import GroupCase, cast, make_case, run_group, run_reference
from seeds import SEED
from torch.utils.flop_counter import FlopCounterMode

from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.plan import CHAIN, RUNLORA, Plan, named_plan, why_not
from packlora.plans.case import Case
from packlora.plans.cost import steps
from packlora.plans.space import carried_out

NAMES = [named.name for named in RUNLORA]
CPU = torch.device("cpu")


def one_adapter(p: float, seed: int = SEED, with_bias: bool = True) -> GroupCase:
    """Random sizes and operands of a layer whose adapter has all tokens."""
    T, K, N, r = (int(n) for n in np.random.default_rng(seed).integers([5, 6, 6, 1], [40, 48, 48, 9]))
    return make_case(T, K, [N], [[r]], [p], with_bias, seed, whole=0)


def assert_as_specified(case: GroupCase, plan: Plan) -> None:
    got, want = run_group(case, torch.float64, plan), run_reference(case, torch.float64)
    assert got.keys() == want.keys()
    for name, value in want.items():
        error, size = (got[name] - value).abs().max(), value.abs().max()
        assert error <= 1e-12 * size, f"{name} is off by {error:.1e} of {size:.1e} (seed {SEED})"


@pytest.mark.parametrize("name", NAMES)
def test_every_graph_of_runlora_gives_the_specified_numbers(name: str) -> None:
    assert_as_specified(one_adapter(0.0), named_plan(name))


def plain_plans(drops: bool, needs: tuple[bool, bool, bool] = (True, True, True)) -> tuple[Plan, ...]:
    case = Case.of(CPU, torch.float64, 8, 8, [8], [[2]], [drops], [False], needs=needs)
    call = case.situation()._replace(target=None)
    every = (
        Plan("mm", up, "mm", dx, dA, dB, keep_s)  # type: ignore[arg-type]
        for up, dx, dA, dB, keep_s in itertools.product(
            *(("after", "before", "merged"),) * 2, ("dS", "xd"), ("S", "xd"), (True, False)
        )
    )
    return tuple({carried_out(plan, case): plan for plan in every if why_not(plan, call) is None}.values())


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_every_legal_plan_of_one_adapter_gives_the_specified_numbers(p: float, with_bias: bool) -> None:
    plans = plain_plans(bool(p))
    assert len(plans) == (24 if p else 48)  # by hand: up x dx x dA x (S kept, S again, xd)
    for number, plan in enumerate(plans):
        assert_as_specified(one_adapter(p, SEED + number, with_bias), plan)


def counter() -> FlopCounterMode:
    """Counts mm and addmm; torch's counter does not know the in-place addmm_ by itself."""

    def in_place(out: Any, a: Any, b: Any, **_: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place})


def flops_of(plan: Plan, case: Case, phase: str) -> int:
    """Of forward or backward, by the cost model."""
    return sum(step.flops for step in steps(plan, case) if step.phase == phase)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_the_counted_products_are_those_of_the_cost_model(p: float) -> None:
    """Every legal plan, forward and backward apart, with every choice of wanted gradients; exact."""
    checked = 0
    for needs in [*itertools.product((False, True), repeat=3)][1:]:
        for plan in {
            *plain_plans(bool(p), needs),
            *(() if p else (named_plan(name) for name in NAMES)),
        }:
            own, leaves = cast(one_adapter(p, SEED + checked), torch.float64)
            for leaf, need in zip(leaves.values(), needs, strict=True):
                leaf.requires_grad_(need)
            (T, K), (N, r) = own.x.shape, leaves["B0.0"].shape
            case = Case("cpu", "float64", T, K, (N,), ((r,),), (bool(p),), (True,), True, needs)
            with counter() as counted:
                y = lora_group(own.x, own.layers, own.segments, own.keys, own.salt, plan)
            assert counted.get_total_flops() == flops_of(plan, case, "forward"), (plan.name, needs)
            with counter() as counted:
                torch.autograd.grad(y, [leaf for leaf in leaves.values() if leaf.requires_grad], own.dy)
            assert counted.get_total_flops() == flops_of(plan, case, "backward"), (plan.name, needs)
            checked += 1
    assert checked > 150 if not p else checked > 60


def test_nothing_of_the_size_of_the_weight_is_saved() -> None:
    own, leaves = cast(one_adapter(0.0), torch.float64)
    weight = own.layers[0].frozen.dense()
    for plan in plain_plans(False):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            lora_group(own.x, own.layers, own.segments, own.keys, own.salt, plan)
        known = {t.data_ptr() for t in (*leaves.values(), weight, own.keys)}
        extra = [tuple(t.shape) for t in saved if t.data_ptr() not in known]
        assert extra == ([(len(own.x), len(leaves["A0.0"]))] if plan.keep_s else []), plan.name


def test_dropout_without_keys_is_refused() -> None:
    case = one_adapter(0.1)
    with pytest.raises(ValueError, match=r"dropout needs keys \[\d+, 2\] int32, got None"):
        lora_group(case.x, case.layers, case.segments, None, case.salt, CHAIN)
