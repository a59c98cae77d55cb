"""A layer whose adapters train no more than its bias, beside siblings with A and B: no kernel has a B to read there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from group_cases import GroupCase, group_is_as_exact, make_case
from test_compiled_kernels import SHARED_KIB, compiled

from packlora.ops.lora_linear.plan import ROUTED, Plan

FUSED = Plan("routed", "fused", "one-pass", "fused")
EPILOGUE = Plan("mm", "epilogue", "one-pass", "fused")
KINDS: dict[str, dict[str, Any]] = {
    "one adapter": {"ranks": [[4, 0, 0]], "dropouts": [0.0], "biases": [True]},
    "one that has all tokens": {"ranks": [[4, 0, 0], [3, 2, 0]], "dropouts": [0.1, 0.0], "biases": [True, False], "whole": 0},
    "two, of which one has biases": {"ranks": [[4, 0], [3, 0]], "dropouts": [0.1, 0.0], "biases": [True, False]},
    "DoRA": {"ranks": [[4, 0], [0, 0]], "dropouts": [0.0, 0.0], "dora": [True, False], "biases": [True, True]},
}  # fmt: skip


CASES = [
    ("one adapter", ROUTED, torch.float32), ("one that has all tokens", ROUTED, torch.float16),
    ("one that has all tokens", EPILOGUE, torch.float16), ("two, of which one has biases", FUSED, torch.float16),
    ("DoRA", ROUTED, torch.float16), ("DoRA", FUSED, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "plan", "dtype"), CASES, ids=[f"{kind}-{plan.name}-{dtype}" for kind, plan, dtype in CASES]
)
def test_a_sibling_that_trains_only_its_bias_gets_outputs_and_gradients(
    kind: str, plan: Plan, dtype: torch.dtype
) -> None:
    """Interpreted, with poisoned buffers."""

    def case(trial: int) -> GroupCase:
        sizes = [32, 16, 80][: len(KINDS[kind]["ranks"][0])]
        return make_case(37 + trial, 64, sizes, with_bias=True, seed=trial, dtype=dtype, **KINDS[kind])

    group_is_as_exact(case, 2, dtype, plan, 0)


@pytest.mark.soak
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_a_sibling_that_trains_only_its_bias_are_compiled(capability: int, tmp_path: Path) -> None:
    rows = compiled(capability, tmp_path, "biases alone on siblings")
    assert {row["kernel"] for row in rows} >= {"up_kernel", "grad_kernel", "compose_kernel", "scale_kernel"}
    assert all(row["shared"] <= SHARED_KIB[capability] * 1024 for row in rows)
