"""Products of frozen layers in FP8, computed here without the hardware: what the operator gives is the specification with
rounded operands of the base products, and nothing else is rounded."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from fp8_cases import e4m3, in_fp8, rounded_rows, specified
from group_cases import KINDS, cast, compare, make_case, outcome
from seeds import SEED

from packlora.fp8 import weight as fp8_weight
from packlora.fp8.launches import coded_rows
from packlora.fp8.rows import coded, plain_rows_of, scales_of
from packlora.fp8.weight import Fp8Linear, TwiceCoded
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.temporary import _MADE

FUSED = Plan("routed", "fused", "one-pass", "fused")
SIZES = (16, 32, 48)


def test_rows_are_the_nearest_numbers_of_e4m3() -> None:
    x = torch.cat(
        [torch.randn(40, 300), torch.randn(40, 300) * torch.logspace(-30, 30, 40)[:, None], torch.zeros(1, 300)]
    )
    assert torch.equal(plain_rows_of(x).values(torch.float64), rounded_rows(x))
    assert (plain_rows_of(x).codes.float().abs().amax(1)[:80] == 448).all()
    factors = torch.rand(300) + 0.5
    assert torch.equal(plain_rows_of(x, factors).values(torch.float64), rounded_rows(x * factors))


@pytest.mark.parametrize(("T", "K"), [(13, 300), (5, 1000), (3, 5000)])
def test_the_kernel_of_rows_gives_numbers_that_are_codes_back(T: int, K: int) -> None:
    """Triton's interpreter rounds other numbers to wrong codes."""
    values = torch.randint(0, 0x7F, (T, K), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values[:, 7] = 448
    scales, factors = torch.exp2(torch.randint(-20, 20, (T,)).float()), torch.exp2(torch.randint(-3, 3, (K,)).float())
    for own in (None, factors):
        x = values * scales[:, None] if own is None else values * scales[:, None] / own
        codes, made = coded_rows(x, own, 448.0, 1e-30)
        assert torch.equal(made, scales) and torch.equal(codes.float(), values)


def test_scales_of_a_weight_are_the_least_powers_of_two_that_hold_it() -> None:
    weight = torch.randn(50, 64) * torch.logspace(-8, 8, 50)[:, None]
    weight[3], weight[4, 0] = 0, 448.0 * 2**40  # the largest code itself
    scales, largest = scales_of(weight), weight.abs().amax(1)
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)
    others = largest > 0
    assert (largest <= 448 * scales).all() and (largest > 224 * scales)[others].all()
    rows = coded(weight)
    assert torch.equal(rows.values(torch.float64), e4m3(weight.double() / scales[:, None]) * scales.double()[:, None])


@pytest.mark.parametrize("plan", [CHAIN, Plan(up="before", dx="before")], ids=lambda plan: plan.name)
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_gives_the_specified_numbers(kind: str, plan: Plan) -> None:
    """LoRA, DoRA, siblings, several jobs, dropout, biases, tokens of nobody: outputs and every gradient."""
    ranks = KINDS[kind]["ranks"]
    sizes = SIZES[: len(ranks[0]) if ranks else 1]
    case = make_case(31, 32, sizes, with_bias=True, seed=SEED, dtype=torch.float32, **KINDS[kind])
    compare(outcome(in_fp8(case, torch.float64), plan), specified(case), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_sums_are_rounded_as_those_of_a_dense_weight_are(dtype: torch.dtype) -> None:
    case = make_case(60, 64, SIZES, [[4, 3, 7], [8, 0, 2]], [0.2, 0.0], True, SEED, dtype)
    own, want = cast(case, dtype)[0], specified(case)
    got = outcome(in_fp8(own, dtype), CHAIN)
    for name, exact in want.items():
        assert (got[name].double() - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm(), name


@pytest.mark.parametrize(
    "kind", ["four adapters", "all tokens, dropout, siblings, beside idle adapters", "DoRA", "dropout"]
)
@pytest.mark.parametrize("plan", [ROUTED, FUSED], ids=lambda plan: plan.name)
def test_the_kernels_give_the_specified_numbers(kind: str, plan: Plan) -> None:
    """By Triton's interpreter: the fused one reads codes and scales."""
    ranks = KINDS[kind]["ranks"]
    sizes = SIZES[: len(ranks[0])]
    case = make_case(40, 32, sizes, with_bias=True, seed=SEED, dtype=torch.float16, **KINDS[kind])
    own, want = cast(case, torch.float16)[0], specified(case)
    got = outcome(in_fp8(own, torch.float16), plan)
    for name, exact in want.items():
        assert (got[name].double() - exact).norm() <= 4 * torch.finfo(torch.float16).eps * exact.norm(), name


def test_siblings_share_the_codes_of_what_they_read_and_keep_none() -> None:
    case = in_fp8(make_case(31, 32, SIZES, [[4, 3, 7]], [0.2], True, SEED, torch.float32), torch.float64)
    with mock.patch.object(fp8_weight, "rows_of", wraps=fp8_weight.rows_of) as made:
        outcome(case, CHAIN)
    assert made.call_count == 1 + len(SIZES)  # of x, and of each gradient
    assert _MADE.input is None and not _MADE.tensors


def test_what_is_written_to_x_is_seen_by_the_next_call() -> None:
    case = in_fp8(make_case(8, 32, [16], [[4]], [0.0], False, SEED, torch.float32), torch.float64)
    x = case.x
    before = lora_group(x, case.layers, case.segments)[0]
    x.data.mul_(-1)
    assert torch.equal(lora_group(x, case.layers, case.segments)[0], -before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_reaches_no_other(value: float) -> None:
    case = in_fp8(make_case(20, 32, [16], [[4]], [0.0], False, SEED, torch.float32), torch.float64)
    others = [row for row in range(20) if row != 7]
    x = case.x.clone()
    x[7, 3] = value
    (got,), (want,) = lora_group(x, case.layers, case.segments), lora_group(case.x, case.layers, case.segments)
    assert torch.equal(got[others], want[others]) and got[7].isnan().all()


def test_a_layer_without_adapters_gives_the_same_product_and_survives_its_model_s_casts() -> None:
    weight, bias = torch.randn(48, 32), torch.randn(48)
    layer = Fp8Linear(TwiceCoded.of(coded(weight)), bias, torch.float32)
    x = torch.randn(2, 9, 32, requires_grad=True)
    d = torch.randn(2, 9, 48)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, d)
    case = make_case(18, 32, [48], [], [], False, SEED)
    of = replace(case, x=x.detach().view(18, 32).double(), dy=[d.view(18, 48).double()])
    of = replace(
        of, layers=(replace(case.layers[0], frozen=type(case.layers[0].frozen)(weight.double()), bias=bias.double()),)
    )
    want = specified(of)
    torch.testing.assert_close(y.detach().view(18, 48).double(), want["y0"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.view(18, 32).double(), want["dx"], rtol=1e-5, atol=1e-5)
    for cast_by in ("half", "bfloat16", "float"):
        getattr(torch.nn.Sequential(layer), cast_by)()
    layer.bias.data.copy_(bias)
    assert torch.equal(layer(x), y)
