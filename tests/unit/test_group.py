"""Groups of layers against the specification in float64: torch plans, and the kernels under Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from group_cases import (
    KINDS,
    GroupCase,
    cast,
    compare,
    group_is_as_exact,
    make_case,
    others_keep_their_bits,
    run_group,
    run_reference,
    share_of_small,
)
from seeds import SEED, SOAK, some

from packlora.ops import launcher
from packlora.ops.lora_linear import call as call_module
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.kernels import sizes
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.plans import cost
from packlora.plans.case import Case

BEFORE = Plan(up="before", dx="before")
AGAIN = Plan(keep_s=False)
EVERYTHING = {
    "ranks": [[4], [7], [0], [5], [3], [2]], "dropouts": [0.0, 0.25, 0.0, 0.3, 0.0, 0.0],
    "dora": [False, True, False, False, True, False], "biases": [False, False, True, False, False, True],
}  # fmt: skip
ALL = {**KINDS, "all kinds in one batch": EVERYTHING}


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("plan", [CHAIN, BEFORE, AGAIN], ids=lambda plan: plan.name)
@pytest.mark.parametrize("kind", ALL.values(), ids=ALL.keys())
def test_products_equal_the_reference_in_float64(kind: dict[str, Any], plan: Plan, with_bias: bool) -> None:
    for trial in range(2):
        case = make_case(37 + trial, 33, [29, 12, 40][: len(kind["ranks"][0]) if kind["ranks"] else 1], with_bias=with_bias,
                         seed=SEED + trial, keep_output=bool(trial), **kind)  # fmt: skip
        compare(run_group(case, torch.float64, plan), run_reference(case, torch.float64), 1e-11)


FLOAT, HALF = torch.float32, torch.float16
LIBRARY = Plan("routed", "before", "mm", "routed")
FUSED = Plan("routed", "fused", "one-pass", "fused")
EPILOGUE = Plan("mm", "epilogue", "one-pass", "fused")
WIDE = Plan("mm", "fused", "mm", "before")
MIXED = Plan("mm", "routed", "mm", "after")
ONE = ["one adapter", "dropout", "rank 24", "rank over K", "siblings", "DoRA", "DoRA, rank 40"]
WHOLE = [
    kind for kind, own in KINDS.items() if "whole" in own and not ("dora" in own and own.get("base_dropped", True))
]
"""One adapter has all tokens; without DoRA that drops its base product, which torch's products compute."""
MANY = ["six adapters, siblings, some absent", "DoRA and LoRA, siblings, some absent, biases"]
KERNELS = [
    *((kind, ROUTED, FLOAT) for kind in KINDS),
    *((kind, ROUTED, HALF) for kind in ("dropout", "siblings", "DoRA", *MANY, *WHOLE)),
    *((kind, FUSED, HALF) for kind in (*ONE, *WHOLE, "DoRA, dropout on the low-rank branch", "four adapters", *MANY)),
    *((kind, LIBRARY, FLOAT) for kind in ("DoRA", *MANY)),
    *((kind, EPILOGUE, HALF) for kind in ("dropout", "siblings", "DoRA, rank 40", *MANY)),
    *((kind, WIDE, HALF) for kind in ("rank over K", "DoRA, rank 40", "DoRA, dropout on the low-rank branch")),
    *((kind, MIXED, FLOAT) for kind in ("dropout", "DoRA with dropout and LoRA", *MANY)),
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "plan", "dtype"),
    some(KERNELS, 3),
    ids=[f"{kind}-{plan.name}-{dtype}"[:90] for kind, plan, dtype in some(KERNELS, 3)],
)
def test_kernels_are_as_exact_as_torch_in_the_same_dtype(kind: str, plan: Plan, dtype: torch.dtype) -> None:
    """Interpreted, with poisoned buffers."""
    group_is_as_exact(drawn(KINDS[kind], dtype), 12 if dtype == FLOAT and SOAK else 4, dtype, plan, SEED)


def drawn(kind: dict[str, Any], dtype: torch.dtype) -> Callable[[int], GroupCase]:
    """Cases of a kind by number: of odd sizes, and of sizes that the fused kernel takes."""
    layers = len(kind["ranks"][0]) if kind["ranks"] else 1

    def case(trial: int) -> GroupCase:
        K, sizes = (50, [37, 20, 66]) if trial % 2 else (64, [32, 16, 80])
        return make_case(
            71 + trial, K, sizes[:layers], with_bias=trial % 4 < 3, seed=SEED + trial, dtype=dtype,
            keep_output=trial % 4 > 1, **kind,
        )  # fmt: skip

    return case


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [FLOAT, torch.bfloat16, HALF])
@pytest.mark.parametrize("kind", ALL.values(), ids=ALL.keys())
def test_the_chain_is_as_exact_as_torch_in_the_same_dtype(kind: dict[str, Any], dtype: torch.dtype) -> None:
    group_is_as_exact(drawn(kind, dtype), 10, dtype, CHAIN, SEED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["DoRA, dropout", "all tokens, DoRA, dropout, siblings", "DoRA with dropout and LoRA"])
def test_an_update_that_g_makes_small_again_is_as_exact_as_torch(kind: str, dtype: torch.dtype) -> None:
    """Large S B' and g far from 1: nothing with S B' in it may be rounded before g scales it."""
    errors = {"ours": 0.0, "torch": 0.0}
    for draw in range(4):
        case = make_case(
            45, 50, [37, 20, 16][: len(KINDS[kind]["ranks"][0])], with_bias=False, seed=SEED + draw, **KINDS[kind]
        )
        layers = [
            replace(layer, adapters={
                number: low if low.magnitude is None else replace(low, scaling=10.0, magnitude=low.norm * 0.1)
                for number, low in layer.adapters.items()
            })
            for layer in case.layers
        ]  # fmt: skip
        case = replace(case, layers=tuple(layers))
        want = run_reference(case, torch.float64)
        for name, got in (("ours", run_group(case, dtype, CHAIN)), ("torch", run_reference(case, dtype))):
            errors[name] += sum(float((got[y] - want[y]).square().sum()) for y in want if y.startswith("y")) ** 0.5
    assert errors["ours"] < 1.2 * errors["torch"]


@pytest.mark.parametrize("kind", ["lora", "dora", "bias"])
@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        (CHAIN, torch.bfloat16),
        (CHAIN, HALF),
        (Plan(up="before", dx="before"), torch.bfloat16),
        (ROUTED, HALF),
        (FUSED, HALF),
    ],
    ids=lambda value: value.name if isinstance(value, Plan) else str(value),
)
def test_low_rank_parts_under_the_last_bit_are_not_lost(plan: Plan, dtype: torch.dtype, kind: str) -> None:
    """Such are those of an adapter in its first steps. Errors do not show it: they are within half of the last bit."""
    share = share_of_small(dtype, plan, dora=kind == "dora", seed=SEED, bias=5.0 if kind == "bias" else 0.0)
    assert all(0.7 < value < 1.3 for value in share.values()), (share, SEED)


@pytest.mark.parametrize("plan", [ROUTED, FUSED], ids=lambda plan: plan.name)
@pytest.mark.parametrize("kind", some(["dropout", "rank over K", "four adapters", *WHOLE], 3))
def test_blocks_for_many_processors_are_as_exact(kind: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of launches with few programs, and narrow tiles of the fused product."""
    asked: list[int] = []
    monkeypatch.setattr(sizes, "processors", lambda device: asked.append(1) or 132)
    layers = len(KINDS[kind]["ranks"][0])

    def case(trial: int) -> GroupCase:
        return make_case(
            300 + 31 * trial, 64, [272, 32, 16][:layers], with_bias=False, seed=SEED + trial, dtype=HALF, **KINDS[kind]
        )

    group_is_as_exact(case, 3 if SOAK else 2, HALF, plan, SEED)
    assert asked


@pytest.mark.parametrize("plan", [ROUTED, FUSED], ids=lambda plan: plan.name)
@pytest.mark.parametrize("kind", some(["four adapters", "dropout", "DoRA, dropout on the low-rank branch", *WHOLE], 3))
def test_programs_that_walk_over_several_blocks_are_as_exact(kind: str, plan: Plan) -> None:
    """Runs of many blocks of tokens, by tensor descriptors, with a last block that is not whole; tiles that two runs share."""
    layers = len(KINDS[kind]["ranks"][0])

    def case(trial: int) -> GroupCase:
        return make_case(
            700 + 31 * trial, 32, [16, 32][:layers], with_bias=False, seed=SEED + trial, dtype=HALF, **KINDS[kind]
        )

    group_is_as_exact(case, 3 if SOAK else 2, HALF, plan, SEED)


@pytest.mark.parametrize("plan", [ROUTED, FUSED], ids=lambda plan: plan.name)
@pytest.mark.parametrize(
    ("value", "factor"), some([(math.nan, "A"), (math.nan, "B"), (math.inf, "A"), (math.inf, "B")], 4)
)
def test_an_adapter_that_is_not_finite_leaves_others_their_bits(value: float, factor: str, plan: Plan) -> None:
    """Also in blocks and tiles that it shares with them."""
    kind = {"dora": [False, True, False], "base_dropped": False}
    case = make_case(300, 64, [32, 48], [[0, 8], [20, 3], [9, 40]], [0.0, 0.2, 0.1], True, SEED, HALF, **kind)
    others_keep_their_bits(case, HALF, 1, factor, value, plan)


@pytest.mark.parametrize("dora", [False, True])
def test_gradients_of_a_layer_take_as_many_launches_as_the_cost_model_counts(
    dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    usual = launcher.launch

    def noted(kernel: Any, *args: Any, **constants: Any) -> None:
        launched.append(kernel.fn.__name__ + " of magnitudes" * constants.get("MAGNITUDE", False))
        usual(kernel, *args, **constants)

    monkeypatch.setattr(launcher, "launch", noted)
    sizes, ranks = (16, 33, 48), (4, 3, 7)
    run_group(make_case(71, 50, sizes, [ranks], [0.0], False, SEED, FLOAT, dora=[dora]), FLOAT, ROUTED, poison=True)
    case = Case.of(torch.device("cuda"), FLOAT, 71, 50, sizes, [ranks], [False], [False] * 3, composed=dora)
    counted = [step.launches for step in cost.steps(ROUTED, case) if step.name == "dS = s e B, dB = e' S"]
    own = [name for name in launched if name in ("grad_kernel", "sum_grads_kernel", "sum_rows_kernel of magnitudes")]
    assert len(own) == sum(counted) == (9 if dora else 6), launched


@pytest.mark.parametrize("kind", ["all tokens, DoRA, dropout, siblings", "DoRA with dropout and LoRA"])
def test_what_siblings_read_dropped_is_dropped_once_for_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a segment with dropout: S and the base products of all layers read the same tensor. In the backward once for dA and
    once for dx."""
    sizes = [13, 6, 9][: len(KINDS[kind]["ranks"][0])]
    case = make_case(45, 24, sizes, with_bias=False, seed=SEED, **KINDS[kind])
    own, leaves = cast(case, torch.float64)
    dropped: list[torch.Size] = []
    usual = call_module.masked

    def counted(x_TK: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dropped.append(x_TK.shape)
        return usual(x_TK, *args, **kwargs)

    monkeypatch.setattr(call_module, "masked", counted)
    outputs = lora_group(own.x, own.layers, own.segments, own.keys, own.salt, CHAIN)
    assert len(dropped) == sum(segment.dropout > 0 for segment in own.segments) > 0
    torch.autograd.grad(outputs, list(leaves.values()), own.dy, allow_unused=True)
    assert len(dropped) == 3 * sum(segment.dropout > 0 for segment in own.segments)


@pytest.mark.parametrize("off", ["x", "d"])
def test_tokens_that_are_not_aligned_go_around_tensor_descriptors(off: str) -> None:
    """The bits of the routed way, where the fused one would need a descriptor that cannot be made."""
    T, K, N, r = 71, 64, 32, 16
    generator = torch.Generator().manual_seed(SEED)

    def draw(*shape: int, shift: int = 0) -> torch.Tensor:
        flat = torch.randn(math.prod(shape) + shift, generator=generator).half()
        return flat[shift:].view(shape)

    x, d = draw(T, K, shift=int(off == "x")), draw(T, N, shift=int(off == "d"))
    assert (x if off == "x" else d).data_ptr() % 16
    A, B, weight = draw(r, K).requires_grad_(), draw(N, r).requires_grad_(), draw(N, K)
    keys = torch.randint(-(2**31), 2**31, (T, 2), dtype=torch.int32, generator=generator)
    layers = [Layer(Dense(weight), None, {0: LowRank(A, B, 0.5)})]

    def run(plan: Plan, aligned: bool) -> list[torch.Tensor]:
        tokens = (x.clone() if aligned else x).detach().requires_grad_()
        (y,) = lora_group(tokens, layers, [Segment(0, 0, T, 0.25)], keys, 3, plan)
        return [y, *torch.autograd.grad(y, [tokens, A, B], d.clone() if aligned else d)]

    # up is fused or routed by x alone, dx by d as well
    same = Plan("routed", "routed" if off == "x" else "fused", "one-pass", "routed")
    for got, want in zip(run(FUSED, False), run(same, True), strict=True):
        assert torch.equal(got, want)


def test_an_adapter_with_several_segments_adds_up_their_gradients() -> None:
    case, leaves = cast(make_case(40, 24, [18], [[5]], [0.0], True, SEED), torch.float64)
    segments = [Segment(0, 2, 13, 0.0), Segment(0, 20, 38, 0.0)]
    (y,) = lora_group(case.x, case.layers, segments, case.keys, case.salt, CHAIN)
    low = case.layers[0].adapters[0]
    assert low.A is not None and low.B is not None
    owned = torch.zeros(40, 1, dtype=torch.float64)
    owned[2:13] = owned[20:38] = low.scaling
    want = case.x @ case.layers[0].frozen.dense().t() + case.layers[0].bias + owned * (case.x @ low.A.t() @ low.B.t())
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    grads = [torch.autograd.grad(own, [leaves[name] for name in names], case.dy[0]) for own in (y, want)]
    torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-11)
    for name, got, expected in zip(names, *grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11, msg=name)
