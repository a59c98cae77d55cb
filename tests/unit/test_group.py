"""Groups of layers against the specification in float64: torch plans, and the kernels under Triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from group_cases import compare, largest_errors, make_case, run_group, run_reference

from packlora.ops.lora_linear.plan import CHAIN, ROUTED, Plan

SEED = random.SystemRandom().randrange(2**31)
BEFORE = Plan(up="before", dx="before")
AGAIN = Plan(keep_s=False)
CASES: dict[str, dict[str, Any]] = {
    "one adapter": {"ranks": [[4]], "dropouts": [0.0]},
    "dropout": {"ranks": [[5]], "dropouts": [0.3]},
    "rank 1": {"ranks": [[1]], "dropouts": [0.1]},
    "rank 24": {"ranks": [[24]], "dropouts": [0.0]},
    "rank over K": {"ranks": [[96]], "dropouts": [0.5]},
    "siblings": {"ranks": [[4, 3, 7]], "dropouts": [0.2]},
    "four adapters": {"ranks": [[8], [16], [3], [33]], "dropouts": [0.0, 0.05, 0.1, 0.5]},
    "six adapters, siblings, some absent": {
        "ranks": [[8, 0, 2], [0, 0, 5], [1, 2, 3], [0, 0, 0], [17, 1, 0], [4, 4, 4]],
        "dropouts": [0.0, 0.3, 0.1, 0.2, 0.4, 0.0],
    },
    "an adapter on none": {"ranks": [[0], [4]], "dropouts": [0.1, 0.1]},
    "no adapters": {"ranks": [], "dropouts": []},
}


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("plan", [CHAIN, BEFORE, AGAIN], ids=lambda plan: plan.name)
@pytest.mark.parametrize("kind", CASES.values(), ids=CASES.keys())
def test_products_equal_the_reference_in_float64(kind: dict[str, Any], plan: Plan, with_bias: bool) -> None:
    for trial in range(2):
        case = make_case(37 + trial, 33, [29, 12, 40][: len(kind["ranks"][0]) if kind["ranks"] else 1], with_bias=with_bias,
                         seed=SEED + trial, **kind)  # fmt: skip
        compare(run_group(case, torch.float64, plan), run_reference(case, torch.float64), 1e-11)


LIBRARY = Plan("routed", "before", "mm", "routed")
FUSED = Plan("routed", "fused", "one-pass", "fused")


@pytest.mark.parametrize("plan", [ROUTED, LIBRARY, FUSED], ids=lambda plan: plan.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", CASES.values(), ids=CASES.keys())
def test_kernels_are_as_exact_as_torch_in_the_same_dtype(kind: dict[str, Any], dtype: torch.dtype, plan: Plan) -> None:
    """max|out - ref64| <= 2 max|plain torch - ref64| + 1e-6, over several draws; interpreted, with poisoned buffers."""
    ours: dict[str, float] = {}
    plain: dict[str, float] = {}
    for trial in range(14 if dtype == torch.float32 else 4):  # the largest of many is steadier
        # odd sizes, and sizes that the fused kernel takes
        K, sizes = (50, [37, 20, 66]) if trial % 2 else (64, [32, 16, 80])
        case = make_case(
            71 + trial, K, sizes[: len(kind["ranks"][0]) if kind["ranks"] else 1], with_bias=True,
            seed=SEED + trial, dtype=dtype, **kind,
        )  # fmt: skip
        want = run_reference(case, torch.float64)
        largest_errors(ours, run_group(case, dtype, plan, poison=True), want)
        largest_errors(plain, run_reference(case, dtype), want)
    for name in ours:
        assert ours[name] <= 2 * plain[name] + 1e-6, f"{name}: {ours[name]:.3g} against {plain[name]:.3g}, seed {SEED}"
