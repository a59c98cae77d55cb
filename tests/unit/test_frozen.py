"""Frozen weights that are not dense tensors: what frozen.FrozenWeight asks for is all that the operator needs of W."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from group_cases import KINDS, GroupCase, cast, compare, make_case, run_reference
from seeds import SEED

from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense, FrozenWeight
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.types import Layer, situation


class Bytes:
    """A weight [N, K] of eight bits a number with a scale per row, made dense a few rows at a time and never as a whole."""

    ROWS = 7

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._scales_N = weight_NK.abs().amax(1) / 127
        self._bytes_NK = (weight_NK / self._scales_N[:, None]).round().to(torch.int8)

    @property
    def shape(self) -> tuple[int, int]:
        return self._bytes_NK.shape  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self._scales_N.dtype

    @property
    def device(self) -> torch.device:
        return self._scales_N.device

    @property
    def key(self) -> Hashable:
        return id(self._bytes_NK), self._bytes_NK._version

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._bytes_NK[start:stop].to(self.dtype) * self._scales_N[start:stop, None]

    def dense(self) -> None:
        return None

    def _starts(self) -> range:
        return range(0, self.shape[0], self.ROWS)

    def matmul(
        self, x_TK: torch.Tensor, bias_N: torch.Tensor | None = None, accumulate: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:  # fmt: skip
        y_TN = torch.zeros(len(x_TK), self.shape[0], dtype=x_TK.dtype) if accumulate is None else accumulate
        for start in self._starts():
            y_TN[:, start : start + self.ROWS] += (scale * x_TK @ self.rows(start, start + self.ROWS).T).to(y_TN.dtype)
        return (y_TN if bias_N is None else y_TN.add_(bias_N)).to(x_TK.dtype)

    def matmul_t(self, d_TN: torch.Tensor, accumulate: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        dx_TK = torch.zeros(len(d_TN), self.shape[1], dtype=d_TN.dtype) if accumulate is None else accumulate
        for start in self._starts():
            dx_TK += scale * d_TN[:, start : start + self.ROWS] @ self.rows(start, start + self.ROWS)
        return dx_TK


def stored(case: GroupCase) -> tuple[GroupCase, GroupCase]:
    """The case with weights of bytes, and with the dense weights that these stand for."""
    weights: list[FrozenWeight] = [Bytes(layer.frozen.rows(0, layer.frozen.shape[0])) for layer in case.layers]
    return tuple(
        replace(case, layers=tuple(replace(layer, frozen=w) for layer, w in zip(case.layers, own, strict=True)))
        for own in (weights, [Dense(weight.rows(0, weight.shape[0])) for weight in weights])
    )  # type: ignore[return-value]


def outcome(case: GroupCase, plan: Plan) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name. Leaves are those of the dense case with its operands."""
    named = {"x": case.x.clone().requires_grad_()}
    layers: list[Layer] = []
    for index, layer in enumerate(case.layers):
        adapters = {}
        for number, low in layer.adapters.items():
            own = {name: t.clone().requires_grad_() for name, t in low.operands().items()}
            named |= {f"{name}{number}.{index}": t for name, t in own.items()}
            adapters[number] = replace(low, **own)
        layers.append(replace(layer, adapters=adapters))
    outputs = lora_group(named["x"], layers, case.segments, case.keys, case.salt, plan)
    grads = torch.autograd.grad(outputs, list(named.values()), case.dy, allow_unused=True)
    found = {f"y{index}": y.detach() for index, y in enumerate(outputs)}
    for (name, leaf), grad in zip(named.items(), grads, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


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
