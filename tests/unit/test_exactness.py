"""The measure of exactness itself: who is as exact as torch passes, with few draws as well, who is not does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exactness import assert_as_exact


def dot(scale: float) -> Callable[[int], tuple[dict[str, torch.Tensor], ...]]:
    """Products in float32 in two orders of summation, scales far apart; the error of the first times `scale`."""

    def draw(_: int) -> tuple[dict[str, torch.Tensor], ...]:
        a, b = torch.randn(8, 300) * torch.logspace(0, 1, 8)[:, None], torch.randn(300, 40)
        want = a.double() @ b.double()
        got, plain = (sum(a[:, i : i + 1] * b[i : i + 1] for i in o) for o in (torch.randperm(300), range(300)))
        return {"y": want + scale * (got - want)}, {"y": plain}, {"y": want}

    return draw


def test_two_orders_of_one_sum_are_equally_exact() -> None:
    for _ in range(4):
        assert_as_exact(dot(1.0), 12, "none")


def test_an_error_three_times_torchs_is_found() -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match="y"):
            assert_as_exact(dot(3.5), 6, "none")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1.0])
def test_one_wrong_number_in_one_draw_is_never_forgotten(wrong: float) -> None:
    def draw(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        got, plain, want = dot(1.0)(number)
        if number == 1:
            got["y"][3, 1] += wrong
        return got, plain, want

    with pytest.raises(AssertionError, match="y: "):
        assert_as_exact(draw, 2, "none")


@pytest.mark.parametrize("wrong", ["gone", "nan", "another"])
def test_a_wrong_result_of_torch_s_is_no_measure(wrong: str) -> None:
    """As where a part of a gradient is missing from it: every result of ours would be within twice its error."""

    def draw(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        got, plain, want = dot(1.0)(number)
        factor = {"gone": 0.0, "nan": float("nan"), "another": 0.9}[wrong]
        return got, {"y": factor * plain["y"]}, want

    with pytest.raises(AssertionError, match="torch's own result is wrong"):
        assert_as_exact(draw, 2, "none")
