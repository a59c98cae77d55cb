"""Codes that are saved in FP8 are multiplied as they are; blocks are told apart."""

from __future__ import annotations

import pytest
import torch

from packlora.codes.library import LibraryCodes
from packlora.fp8.rows import CODE
from packlora.fp8.saved import saved_rows


def saved(scales: torch.Tensor, N: int = 32, K: int = 48) -> LibraryCodes:
    """Codes as a library holds them, whose values are codes times scales."""
    codes = torch.randn(N, K).to(CODE)
    spread = scales if scales.numel() in (1, N) else scales.repeat_interleave(N // scales.shape[0], 0)

    def make(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        wide = tensors["weight"].float()
        return wide * (spread if spread.numel() == 1 else spread.repeat_interleave(K // spread.shape[1], 1))

    return LibraryCodes({"method": "fp8"}, {"weight": codes, "weight_scale": scales}, (N, K), make)  # type: ignore[arg-type]


@pytest.mark.parametrize("scales", [torch.rand(32, 1) + 0.5, torch.tensor(0.37)], ids=["by output", "one"])
def test_codes_with_a_scale_for_each_output_or_all_are_taken_as_they_are(scales: torch.Tensor) -> None:
    own = saved(scales)
    rows = saved_rows(own)
    assert rows is not None and torch.equal(rows.codes.view(torch.uint8), own.stored)
    assert torch.equal(rows.values(torch.float32), own.values(torch.float32))


def test_codes_in_blocks_are_not_taken_as_rows() -> None:
    assert saved_rows(saved(torch.rand(2, 3) + 0.5)) is None
