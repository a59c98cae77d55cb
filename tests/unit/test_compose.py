"""Scaling-DoRA's composition against its formula in float64, and what is left of g near 1 in each form."""

from __future__ import annotations

import os
import random

import pytest
import torch

from benchmarks.peers import compose_kernel
from benchmarks.peers.compose import compose, compose_naive, near_unity_errors

SHAPES = [(1, 1), (3, 5), (37, 200), (130, 64), (9, 1100)]
"""Less than a program, odd in both, several strips, several column blocks with a ragged last one."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def operands(M: int, N: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """base, lora and d of `dtype`, g in float32; fresh at every call."""
    base, lora, d = (torch.randn(M, N, device=DEVICE).to(dtype) for _ in range(3))
    return [base, lora, 1 + 0.3 * torch.randn(N, device=DEVICE), d]


def by_autograd(
    base: torch.Tensor, lora: torch.Tensor, g: torch.Tensor, d: torch.Tensor, s: float, tier: str
) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in (base, lora, g)]
    out = compose(*leaves, s, tier)  # type: ignore[arg-type]
    assert out.dtype == base.dtype
    return [out.detach(), *torch.autograd.grad(out, leaves, d)]


def exact(
    base: torch.Tensor, lora: torch.Tensor, g: torch.Tensor, d: torch.Tensor, s: float
) -> tuple[torch.Tensor, ...]:
    """By hand, in float64: what is added to base so that the sum is g (base + s lora), and its derivatives."""
    base, lora, g, d = (t.double() for t in (base, lora, g, d))
    z = base + s * lora
    return g * z - base, (g - 1) * d, g * s * d, (d * z).sum(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tier", ["eager", "kernel"])
def test_values_and_gradients_are_rounded_once(tier: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    given, s = operands(*shape, dtype), random.uniform(0.1, 3)
    base, lora, g, d = (t.double() for t in given)
    sizes = (  # what the terms of each result come to without cancelling: the scale of float32's own rounding
        (g - 1).abs() * base.abs() + (g * s * lora).abs(), ((g - 1) * d).abs(), (g * s * d).abs(),
        (d.abs() * (base.abs() + s * lora.abs())).sum(0),
    )  # fmt: skip
    wanted = exact(*given, s)
    for number, (own, right, size) in enumerate(zip(by_autograd(*given, s, tier), wanted, sizes, strict=True)):
        rounding = torch.finfo(own.dtype).eps / 2
        if tier == "kernel" and INTERPRETED and own.dtype == torch.bfloat16:
            rounding *= 2  # the interpreter cuts float32 off where the GPU rounds
        # eager rounds s lora, and the parts of a gradient, to the operands' dtype
        inner = 8 * torch.finfo(torch.float32).eps if tier == "kernel" else 4 * torch.finfo(dtype).eps
        allowed = right.abs() * rounding + size * inner + torch.finfo(own.dtype).tiny * 2
        assert ((own.double() - right).abs() <= allowed).all(), f"result {number}"


def test_kernel_takes_what_is_not_contiguous_and_a_gradient_of_stride_0() -> None:
    base, lora, g, _ = operands(24, 40, torch.float32)
    leaves = [t.clone().requires_grad_() for t in (base, lora, g)]
    out = compose(leaves[0].T.contiguous().T, leaves[1], leaves[2], 0.7, "kernel")
    out.sum().backward()
    wanted = exact(base, lora, g, torch.ones(24, 40, device=DEVICE), 0.7)
    for own, right in zip([out, *(leaf.grad for leaf in leaves)], wanted, strict=True):
        assert own is not None
        torch.testing.assert_close(own.detach().double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("M", [3, 60, 64, 65, 200])
def test_strips_of_several_steps_cover_all_rows(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows, as on large shapes."""
    monkeypatch.setattr(compose_kernel, "PROGRAMS", 1)
    assert compose_kernel.strip_rows(M, 1) == min(64, max(M // 4 * 4, 4))
    base, lora, g, d = operands(M, 24, torch.float32)
    for own, right in zip(by_autograd(base, lora, g, d, 0.6, "kernel"), exact(base, lora, g, d, 0.6), strict=True):
        torch.testing.assert_close(own.double(), right, rtol=1e-5, atol=1e-4)


def test_gradient_of_g_has_the_same_bits_every_time() -> None:
    given = operands(300, 64, torch.float16)
    first, second = (by_autograd(*given, 0.5, "kernel") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_frozen_g_gets_no_gradient_and_the_others_do() -> None:
    base, lora, g, d = operands(10, 12, torch.float32)
    base.requires_grad_()
    lora.requires_grad_()
    compose(base, lora, g, 1.5, "kernel").backward(d)
    assert g.grad is None
    torch.testing.assert_close(base.grad, (g - 1) * d)
    torch.testing.assert_close(lora.grad, g * 1.5 * d)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_near_1_one_rounding_beats_a_rounded_g_and_the_naive_form(dtype: torch.dtype) -> None:
    """Real adapters have g within 0.15 % of 1. The direct form's error is that of rounding the result; so is the stable
    form's with a float32 g, but for the sum; the paper's code rounds g first and is no better than half an ulp of g."""
    errors = near_unity_errors(dtype, 1.5e-3, (256, 1024))
    eps = torch.finfo(dtype).eps
    direct = errors["direct"]["output"]
    assert direct <= 4.5 * eps / 2 * 1.5, (
        "largest of 262144 normal numbers is under 6, so half an ulp is at most 4 eps / 2"
    )
    assert errors["stable"]["output"] <= 1.25 * direct
    assert errors["rounded_g"]["output"] > 1.15 * direct
    assert errors["naive"]["output"] > 1.3 * direct
    assert errors["naive"]["delta"] > 3 * errors["stable"]["delta"]
    assert errors["rounded_g"]["delta"] > 3 * errors["stable"]["delta"]


def test_naive_form_is_the_same_function() -> None:
    base, lora, g, d = (t.double() for t in operands(20, 30, torch.float32))
    torch.testing.assert_close(compose_naive(base, lora, g, 0.8), exact(base, lora, g, d, 0.8)[0])
    torch.testing.assert_close(compose(base, lora, g, 0.8), exact(base, lora, g, d, 0.8)[0])


def test_what_does_not_fit_is_refused() -> None:
    base, lora, g, _ = operands(4, 6, torch.float32)
    with pytest.raises(ValueError, match=r"base \(4, 6\), lora \(4, 6\) and g \(5,\)"):
        compose(base, lora, g[:5], 1.0)
    with pytest.raises(ValueError, match="both must have one dtype"):
        compose(base, lora.half(), g, 1.0)
    with pytest.raises(ValueError, match="tier 'fast' is not one of eager, kernel"):
        compose(base, lora, g, 1.0, "fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"float16, torch\.bfloat16, torch\.float32, got torch\.float64"):
        compose(base.double(), lora.double(), g, 1.0, "kernel")
