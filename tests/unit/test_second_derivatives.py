"""No plan lets its gradients be differentiated again: what goes through A, B and W would be missing without a word."""

from __future__ import annotations

import pytest
import torch
from test_products import plain_plans
from torch.utils.checkpoint import checkpoint

from packlora.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from packlora.ops.gpu import HAS_TRITON
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.plan import ROUTED, Plan
from packlora.ops.lora_linear.types import Layer, LowRank, Segment

REFUSED = "cannot be differentiated again"
PLANS = (*plain_plans(False), *((ROUTED, Plan(up="epilogue"), Plan(up="fused", dx="fused")) if HAS_TRITON else ()))


def layer(dtype: torch.dtype, dora: bool = False) -> tuple[Layer, torch.Tensor]:
    """A layer with an adapter on it, and tokens for it."""
    generator = torch.Generator().manual_seed(0)
    W, A, B, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 32), (4, 32), (16, 4), (6, 32)))
    m, norm = (
        (torch.ones(16, dtype=dtype).requires_grad_(), torch.full((16,), 2.0, dtype=dtype)) if dora else (None, None)
    )
    return Layer(Dense(W), None, {0: LowRank(A.requires_grad_(), B.requires_grad_(), 1.5, m, norm)}), x


def second_derivative(loss: torch.Tensor, leaf: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    (first,) = torch.autograd.grad(loss, leaf, create_graph=True, retain_graph=True)
    torch.autograd.grad(first.square().sum(), leaves, allow_unused=True)


def refused(own: Layer, x: torch.Tensor, plan: Plan, curved: bool) -> None:
    """curved: whether the gradient that comes in has a history of its own."""
    z = x.requires_grad_()
    (y,) = lora_group(
        z.sin(), [own], (Segment(0, 0, len(x)),), plan=plan
    )  # z's gradient has a history behind the layer
    loss = y.square().sum() if curved else y.sum()
    low = own.adapters[0]
    assert low.A is not None and low.B is not None
    for leaf in (z, low.A, low.B):
        with pytest.raises(RuntimeError, match=REFUSED):
            second_derivative(loss, leaf, [z, low.A, low.B])


@pytest.mark.parametrize("curved", [False, True], ids=["linear", "curved"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_every_plan_refuses(plan: Plan, curved: bool) -> None:
    refused(*layer(torch.float32 if plan.needs_triton else torch.float64), plan, curved)


def test_the_loss_s_own_gradient_too() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8)
    _, loss = linear_cross_entropy(hidden.sin(), weight, None, torch.randint(11, (5,)), torch.ones(5))
    with pytest.raises(RuntimeError, match=REFUSED):
        second_derivative(loss, hidden, [hidden])


@pytest.mark.parametrize("plan", [Plan(), Plan(dA="xd", dB="S", keep_s=True)], ids=lambda plan: plan.name)
def test_a_backward_inside_of_a_backward_is_not_refused(plan: Plan) -> None:
    """As checkpointing runs it."""
    own, x = layer(torch.float64)
    low, x = own.adapters[0], x.requires_grad_()

    def run(z: torch.Tensor) -> torch.Tensor:
        return lora_group(z, [own], (Segment(0, 0, len(x)),), plan=plan)[0].square().sum()

    leaves = [x, low.A, low.B]
    want = torch.autograd.grad(run(x), leaves)
    got = torch.autograd.grad(checkpoint(run, x, use_reentrant=False), leaves)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    checkpoint(run, x, use_reentrant=True).backward()
    assert all(torch.equal(leaf.grad, other) for leaf, other in zip(leaves, want, strict=True))


def test_several_gradients_at_once_are_refused_by_name() -> None:
    own, x = layer(torch.float64)
    y, _ = lora_group(x.requires_grad_(), [own, layer(torch.float64)[0]], (Segment(0, 0, len(x)),))
    with pytest.raises(RuntimeError, match="one gradient at a time: is_grads_batched=True"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape, dtype=y.dtype), is_grads_batched=True)


def test_a_backward_under_autocast_has_the_dtypes_of_its_forward() -> None:
    """As of layers whose products are wider than autocast's, or whose forward was outside of it."""
    own, x = layer(torch.float32, dora=True)
    low = own.adapters[0]
    leaves = [x.requires_grad_(), low.A, low.B, low.magnitude]

    def gradients(autocast: bool) -> list[torch.Tensor]:
        (y,) = lora_group(x, [own], (Segment(0, 0, len(x)),))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return list(torch.autograd.grad(y.square().sum(), leaves))

    for got, want in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(got, want)
