"""Parameters whose data are replaced (`p.data = other`) between a forward and its backward, by every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.types import Layer, LowRank, Segment

PLANS = [
    CHAIN, Plan(keep_s=False), Plan(up="before", dx="before"), Plan(dA="xd"), Plan(dB="xd", keep_s=False),
    Plan(dA="xd", dB="xd", keep_s=False), Plan(up="merged", keep_s=False), Plan(dx="merged"),
    Plan(up="merged", dx="merged", dB="xd"),
]  # fmt: skip


@pytest.mark.parametrize("which", ["A", "B"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_a_parameter_whose_data_are_replaced_before_the_backward_gives_the_gradients_of_the_forward(
    plan: Plan, which: str
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    operands = {"weight": torch.nn.Parameter(draw(9, 6), requires_grad=False)}
    operands |= {"A": torch.nn.Parameter(draw(2, 6)), "B": torch.nn.Parameter(draw(9, 2))}
    x, d = draw(7, 6).requires_grad_(), draw(7, 9)

    def gradients(replaced: bool) -> tuple[Any, ...]:
        layer = Layer(Dense(operands["weight"]), None, {0: LowRank(operands["A"], operands["B"], 2.0)})
        (y,) = lora_group(x, (layer,), (Segment(0, 0, len(x), 0.0),), None, 0, plan)
        before = operands[which].data
        if replaced:
            operands[which].data = before * 1.5
        found = torch.autograd.grad(y, [x, operands["A"], operands["B"]], d)
        operands[which].data = before
        return found

    for got, want in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
