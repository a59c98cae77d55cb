"""DoRA under dropout by what dropout changes of the base product, in FP8: the specified numbers, and how far they are off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from change_cases import beside, specified
from group_cases import KINDS, GroupCase, cast, compare, make_case, outcome, run_reference
from peft import LoraConfig, get_peft_model
from seeds import SEED

from packlora.fp8 import change
from packlora.fp8.change import CodedBeside
from packlora.fp8.change_launches import add_change, add_change_t, changed_rows, scaled_rows
from packlora.fp8.change_rows import LEFT_OUT, factors_of
from packlora.fp8.rows import Rows, plain_rows_of
from packlora.ops.dropout.keys import dropout_factor, dropped, token_keys
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.changes import Mask
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import situation

FUSED = Plan("routed", "fused", "one-pass", "fused")
SIZES = (16, 32, 48)
CASES: dict[str, dict[str, Any]] = {name: own for name, own in KINDS.items() if own.get("dora")} | {
    "several DoRA, LoRA and none, ragged": {
        "ranks": [[8, 0, 3], [4, 20, 0], [0, 0, 0], [16, 2, 5]], "dropouts": [0.25, 0.1, 0.1, 0.05],
        "dora": [True, False, False, True], "biases": [False, True, False, False],
    },
    "DoRA, dropout, outputs kept": {"ranks": [[5, 7]], "dropouts": [0.3], "dora": [True], "keep_output": True},
}  # fmt: skip


def spread(case: GroupCase, size: float) -> GroupCase:
    """The case with scales g that differ from 1 by about `size`."""
    draw, layers = torch.Generator().manual_seed(7), []
    for layer in case.layers:
        adapters = {}
        for number, low in layer.adapters.items():
            if low.magnitude is not None:
                more = size * torch.randn(low.norm.shape, generator=draw, dtype=torch.float64)
                low = replace(low, magnitude=(low.norm * (1 + more)).float().double())
            adapters[number] = low
        layers.append(replace(layer, adapters=adapters))
    return replace(case, layers=tuple(layers))


def of_kind(kind: str, T: int, K: int, dtype: torch.dtype, size: float = 0.3) -> GroupCase:
    own = CASES[kind]
    sizes, bias = SIZES[: len(own["ranks"][0])], not own.get("keep_output", False)
    return spread(make_case(T, K, sizes, with_bias=bias, seed=SEED, dtype=dtype, **own), size)


@pytest.mark.parametrize("plan", [CHAIN, Plan(up="before", dx="before")], ids=lambda plan: plan.name)
@pytest.mark.parametrize("kind", CASES)
def test_a_group_gives_the_specified_numbers(kind: str, plan: Plan) -> None:
    """Outputs and every gradient: siblings, several jobs of which some are LoRA, biases, tokens of nobody."""
    case = of_kind(kind, 31, 32, torch.float32)
    compare(outcome(beside(case), plan), specified(case), 1e-9)


@pytest.mark.parametrize("size", [1e-3, 1e-2, 0.1, 1.0])
def test_numbers_are_as_specified_however_far_scales_are_from_1(size: float) -> None:
    case = of_kind("DoRA, dropout", 31, 32, torch.float32, size)
    compare(outcome(beside(case), CHAIN), specified(case), 1e-9)


def test_a_job_that_drops_the_low_rank_branch_alone_is_left_alone() -> None:
    case = of_kind("several DoRA, LoRA and none, ragged", 31, 32, torch.float32)
    segments = tuple(replace(segment, base_dropped=segment.adapter != 3) for segment in case.segments)
    case = replace(case, segments=segments)
    compare(outcome(beside(case), CHAIN), specified(case), 1e-9)


def test_without_rounding_it_is_the_specified_function() -> None:
    """The same as two base products: the error of FP8 is all that there is."""
    case = of_kind("several DoRA, LoRA and none, ragged", 31, 32, torch.float64)

    def product(x: torch.Tensor, g: torch.Tensor, W: torch.Tensor, factors: torch.Tensor, rate: float) -> torch.Tensor:
        return (g - 1) * ((x * factors) @ W.T)

    compare(specified(case, product), run_reference(case, torch.float64), 1e-6)


def test_tokens_whose_change_is_too_small_keep_their_dx_and_no_output_does() -> None:
    case = of_kind("all tokens, DoRA, dropout, siblings", 12, 32, torch.float32, 1e-4)
    case = replace(case, segments=(replace(case.segments[0], dropout=0.05),))
    got, want = outcome(beside(case), CHAIN), specified(case)
    compare(got, want, 1e-9)
    low_rank = outcome(replace(case, segments=(replace(case.segments[0], base_dropped=False),)), CHAIN)
    assert torch.equal(got["dx"], low_rank["dx"])
    assert not torch.equal(got["y0"], low_rank["y0"])
    far = spread(case, 0.1)
    assert not torch.equal(outcome(beside(far), CHAIN)["dx"], outcome(low(far), CHAIN)["dx"])


def low(case: GroupCase) -> GroupCase:
    return replace(case, segments=tuple(replace(segment, base_dropped=False) for segment in case.segments))


@pytest.mark.parametrize("plan", [ROUTED, FUSED], ids=lambda plan: plan.name)
@pytest.mark.parametrize("kind", ["several DoRA, LoRA and none, ragged", "all tokens, DoRA, dropout, siblings"])
def test_all_else_goes_by_the_kernels(kind: str, plan: Plan) -> None:
    """Which do not compute two base products."""
    case = of_kind(kind, 40, 32, torch.float16)
    own, want = cast(case, torch.float16)[0], specified(case)
    with mock.patch.object(change, "changed_rows_of", wraps=change.changed_rows_of) as made:
        got = outcome(beside(own), plan)
    assert made.call_count == sum(segment.dropout > 0 and segment.adapter in (0, 3) for segment in own.segments)
    for name, exact in want.items():
        assert (got[name].double() - exact).norm() <= 6 * torch.finfo(torch.float16).eps * exact.norm(), name


def two_products(case: GroupCase, known: bool = True) -> bool:
    return situation(case.layers, case.segments, len(case.x), known).base_dropped


def test_a_group_of_which_one_layer_cannot_has_two_base_products() -> None:
    case = of_kind("all tokens, DoRA, dropout, siblings", 31, 32, torch.float64)
    mixed = replace(case, layers=(*beside(case).layers[:2], case.layers[2]))
    assert two_products(mixed) and not two_products(beside(case))
    compare(run_reference(case, torch.float64), outcome(mixed, CHAIN), 1e-9)
    odd = make_case(9, 24, [16], [[4]], [0.1], False, SEED, dora=[True])
    assert two_products(beside(odd))


def test_segments_that_move_have_two_base_products_which_no_plan_computes() -> None:
    assert two_products(beside(of_kind("DoRA, dropout", 31, 32, torch.float64)), known=False)


def test_codes_are_made_once_and_a_weight_that_is_not_finite_is_named() -> None:
    case = beside(of_kind("DoRA, dropout", 31, 32, torch.float32))
    with mock.patch.object(change, "coded", wraps=change.coded) as made:
        outcome(case, CHAIN)
        outcome(case, CHAIN)
    assert made.call_count == len(case.layers)
    with pytest.raises(ValueError, match="not finite"):
        CodedBeside(torch.full((16, 16), float("nan"))).make()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_reaches_no_other(value: float) -> None:
    case = beside(of_kind("all tokens, DoRA, dropout, siblings", 20, 32, torch.float64))
    others = [row for row in range(20) if row != 7]

    def results(x: torch.Tensor, dy: list[torch.Tensor]) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        outputs = lora_group(leaf, case.layers, case.segments, case.keys, case.salt)
        return [*outputs, *torch.autograd.grad(outputs, [leaf], dy)]

    x, dy = case.x.clone(), [d.clone() for d in case.dy]
    x[7, 3] = dy[0][7, 3] = value
    for got, want in zip(results(x, dy), results(case.x, case.dy), strict=True):
        assert torch.equal(got[others], want[others]) and not got[7].isfinite().all()


# --- how far it is off -------------------------------------------------------------------------------------------------


class _Masked(torch.nn.Module):
    """Dropout by a mask that is given."""

    def __init__(self, gone: torch.Tensor, factor: float) -> None:
        super().__init__()
        self.gone, self.factor = gone, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.factor).masked_fill(self.gone, 0.0)


def by_peft(case: GroupCase, gone: torch.Tensor) -> dict[str, torch.Tensor]:
    """The case of one DoRA layer by PEFT in bfloat16."""
    (layer,), (segment,) = case.layers, case.segments
    weight, own, x = layer.frozen.dense().bfloat16(), layer.adapters[0], case.x.bfloat16().requires_grad_()
    base = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16))
    base[0].weight.data = weight
    settings = {"r": own.rank, "lora_alpha": own.scaling * own.rank, "lora_dropout": segment.dropout, "use_dora": True}
    model = get_peft_model(base, LoraConfig(target_modules=["0"], **settings), autocast_adapter_dtype=False).train()
    inner: Any = model.base_model.model[0]
    inner.lora_dropout["default"] = _Masked(gone, dropout_factor(segment.dropout))
    parameters = {
        "dA0.0": inner.lora_A["default"].weight, "dB0.0": inner.lora_B["default"].weight,
        "dmagnitude0.0": inner.lora_magnitude_vector["default"].weight,
    }  # fmt: skip
    for (name, parameter), value in zip(parameters.items(), (own.A, own.B, own.magnitude), strict=True):
        assert parameter.shape == value.shape, name
        parameter.data = value.bfloat16()
    y = model(x)
    grads = torch.autograd.grad(y, [x, *parameters.values()], case.dy[0].bfloat16())
    return {"y0": y.detach()} | dict(zip(("dx", *parameters), grads, strict=True))


def errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((got[name].double() - want[name]).norm() / want[name].norm()) for name in want}


@pytest.mark.parametrize("size", [1e-3, 1e-2, 0.1, 1.0])
def test_errors_are_bounded_by_those_of_peft_in_bfloat16(size: float) -> None:
    """Outputs, and gradients of x, A and B, have less error than PEFT's up to scales of 0.9 to 1.1, and all less than twice as
    much. Each is measured against the function of its own parameters: PEFT's magnitudes are rounded to bfloat16."""
    case = make_case(96, 256, [512], [[8]], [0.05], False, SEED, torch.bfloat16, dora=[True], whole=0)
    case = spread(case, size)
    low_rank = case.layers[0].adapters[0]
    coarse = replace(low_rank, magnitude=low_rank.magnitude.bfloat16().double())
    rounded = replace(case, layers=(replace(case.layers[0], adapters={0: coarse}),))
    gone = dropped(case.keys, case.salt, 256, 0.05)
    theirs = errors(by_peft(rounded, gone), run_reference(rounded, torch.float64))
    ours = errors(by_change(case), run_reference(case, torch.float64))
    for name, error in ours.items():
        bound = 2.0 if size > 0.1 or "magnitude" in name else 1.0
        assert error <= bound * theirs[name], (name, error, theirs[name])


def by_change(case: GroupCase) -> dict[str, torch.Tensor]:
    """The case in bfloat16 with magnitudes of float32, as a run and accelerate() have them."""
    own, leaves = cast(case, torch.bfloat16)
    low_rank = own.layers[0].adapters[0]
    magnitude = case.layers[0].adapters[0].magnitude.float().requires_grad_()
    leaves["magnitude0.0"] = magnitude
    layer = replace(own.layers[0], adapters={0: replace(low_rank, magnitude=magnitude)})
    own = beside(replace(own, layers=(layer,)))
    y = lora_group(own.x, own.layers, own.segments, own.keys, own.salt, CHAIN, GroupState())
    grads = torch.autograd.grad(y, list(leaves.values()), own.dy)
    return {"y0": y[0].detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


# --- kernels, by Triton's interpreter ----------------------------------------------------------------------------------


def mask_of(T: int, rate: float) -> Mask:
    return Mask(torch.from_numpy(token_keys(3, 1, 2, T)), 12345, rate)


def codes_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 0x7F, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(("T", "K"), [(13, 300), (3, 5000)])
def test_the_kernel_of_changed_rows_gives_numbers_that_are_codes_back(T: int, K: int) -> None:
    """At a rate of 1/2, where both factors are 1 in size; the interpreter rounds other numbers to wrong codes."""
    values, mask = codes_of(T, K).float(), mask_of(T, 0.5)
    values[:, 7] = 448
    scales = torch.exp2(torch.randint(-20, 20, (T,)).float())
    rows = changed_rows(values * scales[:, None], mask)
    assert torch.equal(rows.scales, scales) and torch.equal(rows.codes.float(), values * factors_of(mask, K))


@pytest.mark.parametrize(("T", "N"), [(13, 304), (5, 5008)])
def test_the_kernel_of_scaled_rows_gives_numbers_that_are_codes_back_or_leaves_them_out(T: int, N: int) -> None:
    values, mask = codes_of(T, N).float(), mask_of(T, 0.5)
    values[:, 7] = 448
    values[2, :] = 0
    sizes, less = torch.exp2(torch.randint(-3, 3, (N,)).float()), torch.exp2(torch.randint(-2, 2, (N,)).float())
    rows = scaled_rows(values / sizes / less, 1 + less, sizes, mask, LEFT_OUT)
    others = [row for row in range(T) if row != 2]
    assert torch.equal(rows.scales, torch.ones(T).index_fill(0, torch.tensor([2]), 0.0))
    assert torch.equal(rows.codes.float()[others], values[others])
    assert (scaled_rows(values, torch.full((N,), 1 + 2.0**-11), sizes, mask, LEFT_OUT).scales == 0).all()
    assert (scaled_rows(values, torch.full((N,), 1 + 2.0**-10), sizes, mask, LEFT_OUT).scales[others] > 0).all()


@pytest.mark.parametrize("keep", [True, False])
def test_the_kernel_adds_products_by_its_scales_and_masks(keep: bool) -> None:
    T, P, Q, mask = 150, 144, 272, mask_of(150, 0.1)
    rows = Rows(plain_rows_of(torch.randn(T, P)).codes, torch.rand(T))
    rows.scales[:131] = torch.where(torch.arange(131) % 3 == 0, 0.0, rows.scales[:131])
    weight, scales, g = plain_rows_of(torch.randn(Q, P)).codes, torch.rand(Q), 1 + torch.randn(Q)
    y, z = torch.randn(T, Q).half(), torch.randn(T, Q).half()
    u = (rows.codes.double() @ weight.double().T) * rows.scales.double()[:, None]
    of_y, of_z = y.double() + (g.double() - 1) * u * scales.double(), z.double() + u * scales.double()
    got_y, got_z, got_dx = y.clone(), z.clone(), y.clone()
    add_change(rows, weight, scales, g, got_y, got_z if keep else None)
    torch.testing.assert_close(got_y, of_y.half(), rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(got_z, of_z.half() if keep else z, rtol=1e-3, atol=1e-2)
    add_change_t(rows, weight, mask, got_dx)
    torch.testing.assert_close(got_dx, (y.double() + factors_of(mask, Q) * u).half(), rtol=1e-3, atol=1e-2)
