"""One adapter by plain products in every association: against the specification in float64, and counted as they run."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from seeds import SEED
from torch.utils.flop_counter import FlopCounterMode

from packlora.ops.dropout.keys import token_keys
from packlora.ops.lora_linear import reference
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import CHAIN, RUNLORA, Plan, named_plan, why_not
from packlora.ops.lora_linear.reference import ReferenceSegment
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.plans.case import Case
from packlora.plans.cost import steps
from packlora.plans.space import carried_out

NAMES = [named.name for named in RUNLORA]
CPU = torch.device("cpu")


def operands(dtype: torch.dtype = torch.float64, seed: int = SEED, with_bias: bool = True) -> dict[str, Any]:
    """Random operands; B is as large as A."""
    rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    T, K, N, r = (int(n) for n in rng.integers([5, 6, 6, 1], [40, 48, 48, 9]))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "x": randn(T, K), "weight": randn(N, K), "bias": randn(N) if with_bias else None, "A": randn(r, K),
        "B": randn(N, r), "scaling": float(rng.uniform(0.3, 3)), "keys": torch.from_numpy(token_keys(seed, 1, 0, T)),
        "salt": int(rng.integers(2**32)), "dy": randn(T, N),
    }  # fmt: skip


LEAVES = ("x", "A", "B")


def outcome(function: Any, c: dict[str, Any], names: tuple[str, ...] = LEAVES) -> dict[str, torch.Tensor]:
    """y and the gradients of the named operands."""
    leaves = {name: c[name].clone().requires_grad_() for name in names if c[name] is not None}
    y = function({**c, **leaves})
    grads = torch.autograd.grad(y, list(leaves.values()), c["dy"])
    return {"y": y.detach()} | dict(zip(leaves, grads, strict=True))


def by_reference(p: float) -> Any:
    def run(c: dict[str, Any]) -> torch.Tensor:
        seg = ReferenceSegment(0, len(c["x"]), c["scaling"], p, c["A"], c["B"])
        return reference.lora_linear(c["x"], c["weight"], c["bias"], [seg], c["keys"], c["salt"])

    return run


def by_products(plan: Plan, p: float) -> Any:
    def run(c: dict[str, Any]) -> torch.Tensor:
        layer = Layer(Dense(c["weight"]), c["bias"], {0: LowRank(c["A"], c["B"], c["scaling"])})
        return lora_group(c["x"], [layer], [Segment(0, 0, len(c["x"]), p)], c["keys"], c["salt"], plan)[0]

    return run


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        error, size = (got[name] - value).abs().max(), value.abs().max()
        assert error <= 1e-12 * size, f"{name} is off by {error:.1e} of {size:.1e} (seed {SEED})"


@pytest.mark.parametrize("name", NAMES)
def test_every_graph_of_runlora_gives_the_specified_numbers(name: str) -> None:
    c = operands()
    assert_same(outcome(by_products(named_plan(name), 0.0), c), outcome(by_reference(0.0), c))


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
        c = operands(seed=SEED + number, with_bias=with_bias)
        assert_same(outcome(by_products(plan, p), c), outcome(by_reference(p), c))


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
            c = operands(seed=SEED + checked)
            (T, K), (N, r) = c["x"].shape, c["B"].shape
            case = Case("cpu", "float64", T, K, (N,), ((r,),), (bool(p),), (True,), True, needs)
            leaves = {n: c[n].clone().requires_grad_(need) for n, need in zip(("x", "A", "B"), needs, strict=True)}
            with counter() as counted:
                y = by_products(plan, p)({**c, **leaves})
            assert counted.get_total_flops() == flops_of(plan, case, "forward"), (plan.name, needs)
            with counter() as counted:
                torch.autograd.grad(y, [leaf for leaf in leaves.values() if leaf.requires_grad], c["dy"])
            assert counted.get_total_flops() == flops_of(plan, case, "backward"), (plan.name, needs)
            checked += 1
    assert checked > 150 if not p else checked > 60


def test_nothing_of_the_size_of_the_weight_is_saved() -> None:
    c = operands()
    for plan in plain_plans(False):
        leaves = {name: c[name].clone().requires_grad_() for name in LEAVES}
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            by_products(plan, 0.0)({**c, **leaves})
        known = {t.data_ptr() for t in (*leaves.values(), c["weight"], c["keys"])}
        extra = [tuple(t.shape) for t in saved if t.data_ptr() not in known]
        assert extra == ([(len(c["x"]), len(c["A"]))] if plan.keep_s else []), plan.name


def test_dropout_without_keys_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout needs keys \[\d+, 2\] int32, got None"):
        by_products(CHAIN, 0.1)(operands() | {"keys": None})
