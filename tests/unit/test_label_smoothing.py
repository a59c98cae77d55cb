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
