"""Frozen weights that are not dense tensors: what frozen.FrozenWeight asks for is all that the operator needs of W."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from group_cases import KINDS, GroupCase, cast, compare, make_case, outcome, run_reference
from seeds import SEED
from stored_weights import Bytes

from packlora.ops.lora_linear.frozen import Dense, FrozenWeight
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.types import situation


def stored(case: GroupCase) -> tuple[GroupCase, GroupCase]:
    """The case with weights of bytes, and with the dense weights that these stand for."""
    weights: list[FrozenWeight] = [Bytes(layer.frozen.rows(0, layer.frozen.shape[0])) for layer in case.layers]
    return tuple(
        replace(case, layers=tuple(replace(layer, frozen=w) for layer, w in zip(case.layers, own, strict=True)))
        for own in (weights, [Dense(weight.rows(0, weight.shape[0])) for weight in weights])
    )  # type: ignore[return-value]


@pytest.mark.parametrize(
    "plan", [CHAIN, Plan(up="before", dx="before"), Plan(keep_s=False)], ids=lambda plan: plan.name
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_bytes_gives_the_specified_numbers(kind: str, plan: Plan) -> None:
    ranks = KINDS[kind]["ranks"]
    case = make_case(31, 20, [13, 24, 9][: len(ranks[0]) if ranks else 1], with_bias=True, seed=SEED, **KINDS[kind])
    case, dense = stored(case)
    compare(outcome(case, plan), run_reference(dense, torch.float64), 1e-11)


def test_the_kernels_around_base_products_need_no_dense_weight() -> None:
    drawn = make_case(40, 32, [16, 48], [[4, 8], [3, 0]], [0.2, 0.0], True, SEED, torch.float32)
    case, dense = stored(cast(drawn, torch.float32)[0])
    got, want = (outcome(each, ROUTED) for each in (case, dense))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "plan", [Plan(up="merged", keep_s=False), Plan(dx="merged"), Plan("routed", "fused", "one-pass", "fused")], ids=str
)
def test_plans_that_read_the_weight_itself_give_way_to_the_plain_chain(plan: Plan) -> None:
    case, dense = stored(make_case(16, 16, [16], [[16]], [0.0], True, SEED, whole=0))
    got, want = (outcome(case, each) for each in (plan, replace(CHAIN, keep_s=plan.keep_s)))
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not situation(case.layers, case.segments, 16).dense
    assert situation(dense.layers, dense.segments, 16).dense


def test_what_is_kept_of_a_weight_stands_while_its_key_does() -> None:
    weight: Any = torch.randn(4, 3)
    frozen = Dense(weight)
    before = frozen.key
    assert Dense(weight) == frozen and Dense(weight).key == before
    assert Dense(weight.clone()) != frozen
    weight.mul_(2)
    assert frozen.key != before
    before = frozen.key
    weight.data = weight.data.clone()
    assert frozen.key != before
    with torch.inference_mode():
        assert Dense(torch.randn(4, 3)).key is None
