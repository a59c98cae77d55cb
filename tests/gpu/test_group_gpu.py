"""Groups of layers on a GPU: the kernels and the torch plans against the specification in float64.

make gpu
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from group_cases import (
    KINDS,
    GroupCase,
    group_is_as_exact,
    make_case,
    others_keep_their_bits,
    run_group,
    share_of_small,
)
from seeds import SEED

from packlora.ops.gpu import rounds_before_adding
from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan
from packlora.ops.lora_linear.types import Segment

BEFORE = Plan(up="before", dx="before")
FUSED = Plan("routed", "fused", "one-pass", "fused")
EPILOGUE = Plan("mm", "epilogue", "one-pass", "fused")
WIDE = Plan("mm", "fused", "mm", "before")
LARGE: dict[str, dict[str, Any]] = KINDS | {
    "rank 384": {"ranks": [[384]], "dropouts": [0.1]},
    "rank 1024": {"ranks": [[1024]], "dropouts": [0.0]},
    "DoRA, rank 16": {"ranks": [[16]], "dropouts": [0.1], "dora": [True], "base_dropped": False},
    "DoRA, rank 384": {"ranks": [[384]], "dropouts": [0.0], "dora": [True]},
    "four adapters, larger": {"ranks": [[8], [16], [32], [64]], "dropouts": [0.0, 0.05, 0.1, 0.1]},
    "six adapters, larger": {
        "ranks": [[8, 0, 2], [0, 0, 5], [1, 2, 3], [0, 0, 0], [17, 64, 130], [4, 4, 4]],
        "dropouts": [0.0, 0.3, 0.1, 0.2, 0.4, 0.0], "dora": [True, False, False, False, True, False], "base_dropped": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("plan", [CHAIN, BEFORE, ROUTED, FUSED, EPILOGUE, WIDE], ids=lambda plan: plan.name)
@pytest.mark.parametrize("kind", LARGE.values(), ids=LARGE.keys())
def test_plans_are_as_exact_as_torch_in_the_same_dtype(kind: dict[str, Any], plan: Plan, dtype: torch.dtype) -> None:
    """Poisoned buffers, odd sizes, ragged runs."""
    if "before" in (plan.up, plan.dx) and dtype == torch.float32:
        pytest.skip("not a legal plan: see plans/space.py")
    drops = any(p and d for p, d in zip(kind["dropouts"], kind.get("dora", ()), strict=False))
    if drops and kind.get("base_dropped", True) and plan != CHAIN and dtype == torch.float32:
        pytest.skip("not a legal plan: see plans/space.py")
    layers = len(kind["ranks"][0]) if kind["ranks"] else 1

    def case(trial: int) -> GroupCase:
        K, sizes = (528, [768, 256, 528]) if trial % 2 else (515, [770, 257, 515])
        return make_case(
            1003 + trial, K, sizes[:layers], with_bias=True, seed=SEED + trial, dtype=dtype, device="cuda",
            keep_output=trial % 2 == 0, **kind,
        )  # fmt: skip

    group_is_as_exact(case, 2, dtype, plan, SEED)


@pytest.mark.parametrize("case", ["lora", "dora", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", [CHAIN, BEFORE, ROUTED, FUSED, WIDE], ids=lambda plan: plan.name)
def test_low_rank_parts_under_the_last_bit_are_not_lost(plan: Plan, dtype: torch.dtype, case: str) -> None:
    """None of it in fused products and in outputs of LoRA; elsewhere no more than the library loses of what its products
    accumulate onto (cuBLAS rounds a product before it adds, on Hopper, and more than half is gone)."""
    library = share_of_library(dtype)
    assert rounds_before_adding(torch.device("cuda", 0)) == (library < 0.7), library
    shares = share_of_small(dtype, plan, "cuda", case == "dora", SEED, 5.0 if case == "bias" else 0.0)
    for name, value in shares.items():
        way = plan.up if name == "y0" else plan.dx
        kept = way == "fused" or (name == "y0" and case != "dora" and way != "routed")
        assert (0.7 if kept else min(library - 0.1, 0.7)) < value < 1.3, (name, value, library, SEED)


def share_of_library(dtype: torch.dtype) -> float:
    """How much of what is a tenth of the last bit of a product arrives where the product is added to it."""
    g = torch.Generator("cuda").manual_seed(SEED)
    x, weight, small = (
        torch.randn(*shape, generator=g, device="cuda").to(dtype) for shape in [(600, 64), (64, 96), (600, 96)]
    )
    rest = x.double() @ weight.double()
    small = (small * (0.1 * torch.finfo(dtype).eps * float(rest.norm() / small.double().norm()))).to(dtype)
    part = small.double()
    return float(((torch.addmm(small, x, weight) - rest) * part).sum() / part.square().sum())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("factor", ["A", "B"])
@pytest.mark.parametrize("plan", [ROUTED, FUSED], ids=lambda plan: plan.name)
def test_an_adapter_that_is_not_finite_leaves_others_their_bits(value: float, factor: str, plan: Plan) -> None:
    kind = {"dora": [False, True, False], "base_dropped": False}
    case = make_case(
        1000, 512, [768, 256], [[0, 8], [20, 3], [9, 40]], [0.0, 0.2, 0.1], True, SEED, torch.bfloat16, "cuda", **kind
    )
    others_keep_their_bits(case, torch.bfloat16, 1, factor, value, plan)


def test_more_tokens_than_24576_and_unaligned_rows() -> None:
    def case(trial: int) -> GroupCase:
        return make_case(30011, 72, [136], [[16], [9]], [0.1, 0.0], False, SEED + trial, torch.bfloat16, "cuda")

    group_is_as_exact(case, 1, torch.bfloat16, ROUTED, SEED)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("plan", [ROUTED, FUSED, EPILOGUE], ids=lambda plan: plan.name)
def test_remembered_launches_take_other_operands_at_other_places(plan: Plan, dora: bool) -> None:
    """The same shapes and runs, so that all but the first draw find their launches remembered."""
    held: list[GroupCase] = []

    def case(trial: int) -> GroupCase:
        kind = {"dora": [dora], "base_dropped": False, "keep_output": False}
        made = make_case(1024, 512, [768, 256], [[16, 33]], [0.1], True, SEED + trial, torch.bfloat16, "cuda", **kind)
        held.append(replace(made, segments=(Segment(0, 0, 1024, 0.1, base_dropped=False),)))
        return held[-1]

    group_is_as_exact(case, 4, torch.bfloat16, plan, SEED)


def test_the_kernels_give_the_same_bits_every_time() -> None:
    case = make_case(2000, 512, [768], [[16], [33]], [0.1, 0.2], True, SEED, torch.bfloat16, "cuda")
    first, second = (run_group(case, torch.bfloat16, ROUTED, torch.float32) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("plan", [CHAIN, ROUTED, FUSED], ids=lambda plan: plan.name)
def test_layers_on_a_gpu_that_is_not_the_current_one(plan: Plan) -> None:
    kind = {"ranks": [[16], [9]], "dropouts": [0.1, 0.0], "dora": [False, True], "base_dropped": False}
    first, second = (
        run_group(make_case(700, 512, [768], with_bias=True, seed=SEED, dtype=torch.bfloat16, device=f"cuda:{number}", **kind),
                  torch.bfloat16, plan)
        for number in (0, 1)
    )  # fmt: skip
    for name in first:
        assert torch.equal(first[name].cpu(), second[name].cpu()), name
