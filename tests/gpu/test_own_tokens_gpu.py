"""Gradients of A from sums of dS, by the plans that a GPU takes: as exact as torch's of one process.

make gpu
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from group_cases import group_is_as_exact
from seeds import SEED
from sliced_groups import case_of, run_on_slices

from packlora.ops.lora_linear.plan import named_plan

KNOWN = ["one adapter", "siblings", "four adapters", "all tokens, dropout, siblings, beside idle adapters", "DoRA"]


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("plan", ["base-added", "one-pass", "kernels", "kernels-mm-dx", "fused-mm-down", "fused"])
def test_gradients_of_gathered_tokens_are_as_exact_as_torch_s(kind: str, plan: str) -> None:
    group_is_as_exact(
        lambda trial: case_of(kind, trial, torch.bfloat16, "cuda"),
        4,
        torch.bfloat16,
        named_plan(plan),
        SEED,
        run_on_slices,
    )


@pytest.mark.parametrize("plan", ["kernels", "fused"])
def test_gradients_of_segments_that_move_are_too(plan: str) -> None:
    group_is_as_exact(
        lambda trial: case_of("four adapters", trial, torch.bfloat16, "cuda"), 4, torch.bfloat16, named_plan(plan), SEED,
        partial(run_on_slices, moves=True),
    )  # fmt: skip
