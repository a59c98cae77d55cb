"""Label smoothing beside the cross entropy is torch's label_smoothing, with a share for each row, whole and in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packed import parts
from test_linear_cross_entropy import SHAPES, case
from test_loss import adapted, samples

from packlora.engine.collate import collate
from packlora.engine.heads import token_losses
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_smoothing_keep_their_bits_beside_rows_with_it(dtype: torch.dtype) -> None:
    hidden, weight, bias, labels, weights = case(60, 33, 131, dtype)
    assert bias is not None
    bias[5], labels[labels == 5] = -torch.inf, 6  # a word that is never said
    leaf = hidden.requires_grad_()
    smoothing = torch.where(torch.arange(60) % 3 == 0, 0.3, 0.0)
    want, want_total = linear_cross_entropy(leaf, weight, bias, labels, weights)
    got, total = linear_cross_entropy(leaf, weight, bias, labels, weights, smoothing_L=smoothing)
    gradients = [torch.autograd.grad(one, leaf)[0] for one in (want_total, total)]
    plain_rows = smoothing == 0
    assert torch.equal(got[plain_rows], want[plain_rows])
    assert torch.equal(gradients[1][plain_rows], gradients[0][plain_rows])
    assert not torch.equal(got[~plain_rows], want[~plain_rows])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_loss_of_a_microbatch_is_torchs_and_evaluation_has_none(family: str, fused: bool) -> None:
    """gemma2 caps its logits, so they are held."""
    if fused and family == "gemma2":
        pytest.skip("its output layer does not come last")
    model, attached, parameters = adapted(family, torch.float64)
    packed = [replace(item, smoothing=0.1) for item in samples((30, 7))]
    batch = collate(parts(packed), torch.device("cpu"))
    weights = torch.linspace(0.5, 2, len(batch.labels_L), dtype=torch.float64)
    with attached.active(batch.owners):
        losses, total, _ = token_losses(model, batch, weights, fused)
        gradients = torch.autograd.grad(total, parameters)
    with attached.active(batch.owners):
        from packlora.base.packing import packed_logits

        at = (batch.input_ids_T, batch.position_ids_T, batch.sample_lengths, batch.rows_L)
        want = F.cross_entropy(packed_logits(model, *at), batch.labels_L, reduction="none", label_smoothing=0.1)
        wanted = torch.autograd.grad((want * weights).sum(), parameters)
    torch.testing.assert_close(losses, want.detach(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert collate(parts(samples((30, 7))), torch.device("cpu")).labels == {}
