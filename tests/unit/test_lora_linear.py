"""A layer of the operator by the arguments of the specification: what does not fit is refused by name, and no row is NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from group_cases import by_group, cast, make_case
from seeds import SEED

from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import PLANS, Plan
from packlora.ops.lora_linear.reference import ReferenceSegment
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.ops.row_norm.reference import weight_norm


def test_a_row_of_zeros_in_dora_gives_the_bias_and_never_nan() -> None:
    case, _ = cast(make_case(20, 16, [12], [[3]], [0.0], True, SEED, dora=[True]), torch.float64)
    (layer,), (segment,) = case.layers, case.segments
    low, weight = layer.adapters[0], layer.frozen.dense().clone()
    assert low.A is not None and low.B is not None and layer.bias is not None
    weight[3] = low.B.data[3] = 0
    norm = weight_norm(weight, low.A.detach(), low.B.detach(), low.scaling)
    low = dataclasses.replace(low, norm=norm, magnitude=norm.clone())
    (y,) = lora_group(case.x, [dataclasses.replace(layer, frozen=Dense(weight), adapters={0: low})], case.segments)
    assert torch.equal(segment.of(y)[:, 3], layer.bias[3].expand(segment.stop - segment.start))
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A": torch.zeros(4, 31)}, "A of .* must be"), ({"B": torch.zeros(29, 5)}, "B of .* must be"),
        ({"stop": 99}, "leaves"),
        ({"start": 5, "stop": 5}, "empty"), ({"bias": torch.zeros(3)}, "bias of .* must be"), ({"B": None}, "come together"),
        ({"magnitude": torch.zeros(29)}, "needs A, B and the norm"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    seg = dataclasses.replace(ReferenceSegment(0, 5, 1.0, 0.0, torch.zeros(4, 33), torch.zeros(29, 4)), **change)
    with pytest.raises(ValueError, match=message):
        by_group(torch.zeros(20, 33), torch.zeros(29, 33), None, [seg])


def test_overlapping_segments_and_missing_dropout_keys_are_refused() -> None:
    x, W, A, B = torch.zeros(20, 33), torch.zeros(29, 33), torch.zeros(4, 33), torch.zeros(29, 4)
    with pytest.raises(ValueError, match="overlaps"):
        by_group(x, W, None, [ReferenceSegment(0, 6, 1, 0, A, B), ReferenceSegment(5, 9, 1, 0, A, B)])
    with pytest.raises(ValueError, match="dropout needs keys"):
        by_group(x, W, None, [ReferenceSegment(0, 6, 1, 0.1, A, B)])
    turned = torch.zeros(2, 20, dtype=torch.int32).t()  # which kernels would read as they do not lie
    with pytest.raises(ValueError, match=r"dropout needs keys .* strides \(1, 20\); they must be contiguous"):
        by_group(x, W, None, [ReferenceSegment(0, 6, 1, 0.1, A, B)], turned)


@pytest.mark.parametrize("plan", [named.plan for named in PLANS if named.plan.needs_triton], ids=lambda plan: plan.name)
def test_b_alone_may_be_trained_by_every_plan_of_kernels(plan: Plan) -> None:
    """Where neither x nor an A needs a gradient."""
    torch.manual_seed(SEED)
    x, W, A, B = (torch.randn(*size) for size in ((20, 32), (48, 32), (4, 32), (48, 4)))
    layer = Layer(Dense(W), None, {3: LowRank(A, B.requires_grad_(), 0.5)})
    y, want = lora_group(x, [layer], [Segment(3, 0, 20)], plan=plan)[0], x @ W.T + 0.5 * x @ A.T @ B.T
    torch.testing.assert_close(
        *(torch.autograd.grad(own.square().sum(), B)[0] for own in (y, want)), rtol=1e-4, atol=1e-4
    )
