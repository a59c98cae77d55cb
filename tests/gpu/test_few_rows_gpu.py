"""The forward of few tokens without gradients on a GPU: as exact as torch's chain, by CUDA graphs too.

make gpu
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from exactness import assert_as_exact
from few_row_cases import CASES, by_few_rows, drawn, outputs
from group_cases import cast
from seeds import SEED

from packlora.ops.lora_linear import few_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [61, 253])
@pytest.mark.parametrize(("kind", "moves"), [(kind, moves) for kind, all_ in CASES.items() for moves in all_])
def test_outputs_are_as_exact_as_torchs(kind: str, moves: bool, T: int, dtype: torch.dtype) -> None:
    def draw(trial: int) -> Any:
        case = drawn(kind, trial, dtype, (1024, 600, 3072)[trial], (1024, 151, 2048), T, "cuda")
        own, exact = cast(case, dtype)[0], cast(case, torch.float64)[0]
        got = by_few_rows(own, moves)
        with mock.patch.object(few_rows, "_runs", return_value=False):
            return got, outputs(own), outputs(exact)

    assert_as_exact(draw, draws=3, seed=SEED, name=lambda name: "y")
