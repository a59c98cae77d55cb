"""Processes that compute slices of the outputs of gathered tokens: gradients of A from sums of dS, each of its own tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from group_cases import KINDS, cast, compare, group_is_as_exact, run_reference
from seeds import SEED
from sliced_groups import case_of, run_on_slices

from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.own_tokens import OwnTokens, gathered
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.types import Segment
from packlora.ops.recompute import recompute_of


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind]["ranks"]])
def test_gradients_are_those_of_one_process(kind: str) -> None:
    """In float64, by torch's products: also where the plan that was asked for would read x for more than dA."""
    case = case_of(kind, 0, torch.float64)
    for plan in (CHAIN, Plan(keep_s=False), Plan(dA="xd", dB="xd", keep_s=False)):
        compare(run_on_slices(case, torch.float64, plan), run_reference(case, torch.float64), 1e-11)


@pytest.mark.parametrize(
    ("kind", "moves"),
    [
        ("four adapters", False),
        pytest.param("DoRA and LoRA, siblings, some absent, biases", True, marks=pytest.mark.soak),
        ("four adapters", True),
    ],
)
def test_gradients_by_kernels_are_as_exact_as_torch(kind: str, moves: bool) -> None:
    """Interpreted, with poisoned buffers; segments on the host, and on the device."""
    group_is_as_exact(
        lambda trial: case_of(kind, trial, torch.float32), 1, torch.float32, ROUTED, SEED,
        partial(run_on_slices, moves=moves),
    )  # fmt: skip


def test_an_adapter_without_own_tokens_gets_zeros_and_one_without_any_nothing() -> None:
    """All processes step the same parameters."""
    case = case_of("four adapters", 0, torch.float64)
    segments = (Segment(0, 0, 20), Segment(1, 40, 70))
    own, leaves = cast(replace(case, segments=segments), torch.float64)
    names = [name for name in leaves if name.startswith("A")]
    tokens = OwnTokens(0, 36, [leaves[name] for name in names])
    x = gathered(own.x.detach()[None].requires_grad_(), tokens)
    (y,) = lora_group(x, own.layers, segments, own.keys, own.salt, recompute=recompute_of(x))
    y.backward(own.dy[0][None])
    grads = dict(zip(names, tokens.gradients(x.detach()[0, :36], [dS[:36] for dS in tokens.dS]), strict=True))
    assert grads["A0.0"].norm() > 0 and not grads["A1.0"].any() and grads["A2.0"] is None


def test_an_input_whose_adapters_are_not_known_is_kept() -> None:
    case = case_of("siblings", 0, torch.float64)
    own, leaves = cast(case, torch.float64)
    tokens = OwnTokens(0, 36, [leaves["A0.0"]])
    x = gathered(own.x.detach().requires_grad_(), tokens)
    outputs = lora_group(x, own.layers, own.segments, own.keys, own.salt, recompute=recompute_of(x))
    grads = torch.autograd.grad(outputs, [leaves["A0.0"], leaves["A0.1"]], own.dy)
    assert all(grad.norm() > 0 for grad in grads) and not tokens.dS
