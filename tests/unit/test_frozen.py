"""Frozen weights that are not dense tensors: what frozen.FrozenWeight asks for is all that the operator needs of W."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from group_cases import KINDS, GroupCase, cast, compare, make_case, outcome, run_reference
from seeds import SEED
from stored_weights import Bytes

from packlora.adapters.norms import NormHandle, RowNorms
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense, FrozenWeight
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment, situation


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


@pytest.mark.parametrize("version_counted", [False, True])
def test_dora_on_a_weight_of_bytes_its_norms_included(version_counted: bool) -> None:
    """Outputs and gradients, before and after a step, of x W' + s B A with each row scaled by m over its norm."""
    torch.manual_seed(SEED)
    weight, (N, K, r, s) = Bytes(torch.randn(13, 20, dtype=torch.float64)), (13, 20, 4, 1.5)
    A, B, m = (torch.randn(*size, dtype=torch.float64).requires_grad_() for size in ((r, K), (N, r), (N,)))
    handle, state = NormHandle(RowNorms(), weight, A, B, s, version_counted), GroupState(version_counted)
    layers = (Layer(weight, None, {0: LowRank(A, B, s, m, handle.get)}),)
    x, d = torch.randn(9, K, dtype=torch.float64, requires_grad=True), torch.randn(9, N, dtype=torch.float64)
    leaves = [x, A, B, m]
    optimizer = torch.optim.AdamW([A, B, m], lr=0.1)
    for _ in range(3):
        (y,) = lora_group(x, layers, (Segment(0, 0, 9),), state=state)
        merged = weight.rows(0, N) + s * B @ A
        want = x @ merged.T * (m / merged.detach().norm(dim=1))
        torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-11)
        grads = torch.autograd.grad(y, leaves, d)
        for got, wanted in zip(grads, torch.autograd.grad(want, leaves, d), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
        A.grad, B.grad, m.grad = grads[1:]
        optimizer.step()
