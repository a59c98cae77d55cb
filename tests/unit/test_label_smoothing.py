"""Label smoothing beside the cross entropy is torch's label_smoothing, with a share for each row, whole and in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_linear_cross_entropy import SHAPES, case

from packlora.ops.cross_entropy.chunked import chunked_cross_entropy
from packlora.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from packlora.ops.cross_entropy.reference import IGNORE
from packlora.ops.cross_entropy.reference import cross_entropy as plain

SHARES = (0.0, 0.1, 0.6)


def by_row(of: Any, smoothing: torch.Tensor) -> torch.Tensor:
    """Each row's loss with its own share, from losses of all rows with one share."""
    return sum(torch.where(smoothing == share, of(share), 0) for share in SHARES)  # type: ignore[return-value]


@pytest.mark.parametrize("chunk_bytes", [None, 1])
@pytest.mark.parametrize(("L", "D", "V"), SHAPES)
def test_losses_and_gradient_are_those_of_torch_in_float64(L: int, D: int, V: int, chunk_bytes: int | None) -> None:
    for bias in (False, True):
        hidden, weight, bias_V, labels, weights = case(L, D, V, bias=bias)
        hidden.requires_grad_()
        smoothing = torch.tensor(SHARES, dtype=torch.float64)[torch.randint(3, (L,))]
        wanted = by_row(lambda share: plain(hidden, weight, bias_V, labels, share), smoothing)  # noqa: B023
        (want,) = torch.autograd.grad(wanted, hidden, weights)
        losses, total = linear_cross_entropy(
            hidden, weight, bias_V, labels, weights, chunk_bytes, smoothing_L=smoothing
        )
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(total, hidden)[0], want, rtol=1e-11, atol=1e-12)
        assert not losses[labels == IGNORE].any()
        weight.requires_grad_()
        called, total = chunked_cross_entropy(
            hidden,
            lambda part, *_: F.linear(part, weight, bias_V),  # noqa: B023
            [weight],
            V,
            labels,
            weights,
            chunk_bytes,
            smoothing,
        )
        torch.testing.assert_close(called, wanted, rtol=1e-12, atol=1e-12)
        wanted = by_row(lambda share: plain(hidden, weight, bias_V, labels, share), smoothing)  # noqa: B023
        for got, want in zip(
            torch.autograd.grad(total, (hidden, weight)),
            torch.autograd.grad(wanted, (hidden, weight), weights),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["ignored", "not smoothed", "no word"])
def test_a_row_that_is_not_smoothed_has_the_loss_that_it_has_without_others(kind: str) -> None:
    """A layer with adapters: whatever its logits are, nothing times them is nothing."""
    hidden, weight, _, _, _ = case(3, 4, 9)
    labels, smoothing = torch.tensor([1, 2, 3]), torch.tensor([0.1, 0.1, 0.0])
    if kind == "ignored":
        labels[2], hidden[2] = IGNORE, torch.nan
    if kind == "no word":
        labels[2] = 9

    def logits_of(part: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        logits = F.linear(part, weight)
        return logits.masked_fill(torch.arange(9) == 5, -torch.inf) if kind == "not smoothed" else logits

    def losses(smoothing_L: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        given = hidden.detach().requires_grad_()
        found, total = chunked_cross_entropy(given, logits_of, [], 9, labels, smoothing_L=smoothing_L)
        return found[2], torch.autograd.grad(total, given)[0][2]

    for got, want in zip(losses(smoothing), losses(None), strict=True):
        torch.testing.assert_close(got, want, equal_nan=kind == "no word")
