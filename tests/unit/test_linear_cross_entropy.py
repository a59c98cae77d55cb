"""The fused output layer and loss against its reference: logits and torch's cross_entropy."""

from __future__ import annotations

import itertools
import math
import os
import random
from typing import Any

import pytest
import torch
from exactness import assert_as_exact
from seeds import SEED

from packlora.ops.cross_entropy import rows
from packlora.ops.cross_entropy.linear_cross_entropy import chunk_rows, linear_cross_entropy
from packlora.ops.cross_entropy.owners import chunk_rows_of_owners
from packlora.ops.cross_entropy.parts import part_sums, write_gradient
from packlora.ops.cross_entropy.reference import IGNORE
from packlora.ops.cross_entropy.reference import cross_entropy as plain
from packlora.ops.cross_entropy.softmax import softmax_gradient

SHAPES = [(16, 8, 10), (77, 33, 131), (200, 40, 1), (65, 7, 4099), (1, 5, 3)]
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def case(L: int, D: int, V: int, dtype: torch.dtype = torch.float64, bias: bool = True) -> Case:
    """Fresh every time: hidden, weight, bias, labels of which some are ignored, weights of two jobs and one of 0."""
    hidden, weight = torch.randn(L, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    labels = torch.randint(V, (L,))
    labels[torch.rand(L) < 0.2] = IGNORE
    weights = torch.rand(L, dtype=torch.float64) + 0.1
    weights[L // 2] = 0
    return hidden, weight, torch.randn(V, dtype=dtype) if bias else None, labels, weights


@pytest.mark.parametrize("chunk_bytes", [None, 1, 100_000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("L", "D", "V"), SHAPES)
def test_losses_and_gradient_are_those_of_the_written_out_logits_in_float64(
    L: int, D: int, V: int, bias: bool, chunk_bytes: int | None
) -> None:
    hidden, weight, bias_V, labels, weights = case(L, D, V, bias=bias)
    hidden.requires_grad_()
    want = plain(hidden, weight, bias_V, labels)
    (want_gradient,) = torch.autograd.grad(want, hidden, weights)
    losses, total = linear_cross_entropy(hidden, weight, bias_V, labels, weights, chunk_bytes)
    torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, (want * weights).sum(), rtol=1e-12, atol=1e-12)
    assert losses.dtype == torch.float64
    (gradient,) = torch.autograd.grad(total, hidden)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-11, atol=1e-12)
    assert (losses[labels == IGNORE] == 0).all()
    assert (gradient[labels == IGNORE] == 0).all()


def test_rows_of_an_owner_are_cut_as_if_there_were_no_others() -> None:
    draw = random.Random(SEED)
    for _ in range(200):
        sizes = [draw.choice((1, 9, 15, 16, 33, 100, 131)) for _ in range(draw.randint(1, 6))]
        chunks = chunk_rows_of_owners(sizes, 10, torch.float32, 40 * 40)
        assert sum(chunks) == sum(sizes) and max(chunks) < 40 + 2 * 16 and (min(chunks) >= 16 or sum(sizes) < 16)
        ends, start = set(itertools.accumulate(chunks)), 0
        for size in sizes:
            alone = {start + end for end in itertools.accumulate(chunk_rows(size, 10, torch.float32, 40 * 40))}
            assert {end for end in ends if start < end < start + size} <= alone, "no cut is made for others"
            start += size
        assert chunk_rows_of_owners(sizes[:1], 10, torch.float32, 1600) == chunk_rows(sizes[0], 10, torch.float32, 1600)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_exact_as_the_written_out_logits(dtype: torch.dtype) -> None:
    """Errors against float64 on the same rounded operands, at most twice those of torch in the same dtype."""

    def draw(number: int) -> tuple[dict[str, torch.Tensor], ...]:
        torch.manual_seed(SEED + number)
        hidden, weight, bias, labels, weights = case(300, 64, 1001, dtype)
        weight, hidden = weight / 8, hidden.requires_grad_()
        assert bias is not None
        losses, total = linear_cross_entropy(hidden, weight, bias, labels, weights, 200_000)
        assert losses.dtype == torch.float32
        (gradient,) = torch.autograd.grad(total, hidden)
        torch_losses = plain(hidden, weight, bias, labels)
        (torch_gradient,) = torch.autograd.grad(torch_losses, hidden, weights.float())
        exact = hidden.detach().double().requires_grad_()
        exact_losses = plain(exact, weight.double(), bias.double(), labels)
        (exact_gradient,) = torch.autograd.grad(exact_losses, exact, weights)
        found = (losses, gradient), (torch_losses, torch_gradient), (exact_losses, exact_gradient)
        one, two, three = ({"losses": a.detach(), "gradient": b} for a, b in found)
        return one, two, three

    assert_as_exact(draw, 6, SEED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_of_a_row_depend_on_no_other_row(dtype: torch.dtype, threads: int) -> None:
    """The same 20 rows at the front, in the middle and at the end of others, in chunks of other sizes."""
    if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        pytest.skip(
            "oneDNN's bfloat16 products by AMX read one number beyond each row of an odd length, times 0: NaN for NaN"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        hidden, weight, bias, labels, weights = case(20, 61, 515, dtype)
        others = case(150, 61, 515, dtype)
        want = run(hidden, weight, bias, labels, weights, None)
        for front in (0, 13, 130):
            for back in (0, 3, 150 - front):
                for chunk_bytes in (1, 100_000, None):
                    pieces = [
                        torch.cat([o[:front], own, o[front : front + back]])
                        for o, own in zip((others[0], *others[3:]), (hidden, labels, weights), strict=True)
                    ]
                    losses, gradient = run(pieces[0], weight, bias, pieces[1], pieces[2], chunk_bytes)
                    assert torch.equal(losses[front : front + 20], want[0]), (front, back, chunk_bytes)
                    assert torch.equal(gradient[front : front + 20], want[1]), (front, back, chunk_bytes)
    finally:
        torch.set_num_threads(before)


def run(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, weights: torch.Tensor,
    chunk_bytes: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    leaf = hidden.detach().clone().requires_grad_()
    losses, total = linear_cross_entropy(leaf, weight, bias, labels, weights, chunk_bytes)
    (gradient,) = torch.autograd.grad(total, leaf)
    return losses, gradient


def test_a_nan_in_one_row_stays_in_it_and_in_an_ignored_row_it_counts_nothing() -> None:
    hidden, weight, bias, labels, weights = case(64, 16, 50)
    labels[:] = torch.randint(50, (64,))
    labels[40] = IGNORE
    want = run(hidden, weight, bias, labels, weights, None)
    hidden[7] = math.nan
    hidden[40] = math.inf
    losses, gradient = run(hidden, weight, bias, labels, weights, None)
    assert losses[7].isnan() and gradient[7].isnan().all()
    assert losses[40] == 0 and (gradient[40] == 0).all()
    rest = torch.arange(64) != 7
    assert torch.equal(losses[rest], want[0][rest])
    assert torch.equal(gradient[rest], want[1][rest])


def test_a_label_outside_the_vocabulary_gives_nan_and_never_a_number() -> None:
    hidden, weight, bias, labels, weights = case(20, 8, 30)
    labels[3], labels[4] = 30, -7
    losses, gradient = run(hidden, weight, bias, labels, weights, None)
    assert losses.isnan().nonzero().flatten().tolist() == [3, 4]
    assert gradient.isnan().any(1).nonzero().flatten().tolist() == [3, 4]


def test_logits_of_all_rows_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from packlora.ops.cross_entropy import linear_cross_entropy as module

    seen = []
    original = module.softmax_gradient

    def watching(logits: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(logits.numel() * (logits.element_size() + 4 * (logits.dtype == torch.bfloat16)))
        return original(logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "softmax_gradient", watching)
    run(*case(1000, 8, 500, torch.bfloat16), 600_000)
    assert len(seen) == 5 and max(seen) <= 600_000


@pytest.mark.parametrize(("L", "D", "V"), SHAPES)
def test_logits_in_aligned_rows_give_the_same_losses_and_gradient(
    L: int, D: int, V: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; what lies between rows is poison."""
    own = case(L, D, V)
    want, want_gradient = run(*own, 100_000)
    made, empty = [], torch.empty

    def poisoned(*shape: int, **settings: Any) -> torch.Tensor:
        made.append(empty(*shape, **settings).fill_(math.nan))
        return made[-1]

    monkeypatch.setattr(rows, "columns", lambda V, device: rows.aligned(V))
    monkeypatch.setattr(torch, "empty", poisoned)
    losses, gradient = run(*own, 100_000)
    assert len(made) == len(chunk_rows(L, V, torch.float64, 100_000)) and made[0].shape[1] == rows.aligned(V) > V
    torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-11, atol=1e-12)


def test_operands_that_do_not_fit_are_refused() -> None:
    hidden, weight, bias, labels, weights = case(20, 8, 30)
    with pytest.raises(ValueError, match="do not fit an output layer"):
        linear_cross_entropy(hidden[:, :7], weight, bias, labels, weights)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 do not fit an output layer of torch\.float32; cast"):
        linear_cross_entropy(hidden.bfloat16(), weight.float(), bias, labels, weights)
    with pytest.raises(ValueError, match=r"labels of shape \(19,\) for 20 rows"):
        linear_cross_entropy(hidden, weight, bias, labels[1:], weights)
    with pytest.raises(ValueError, match="weights of shape"):
        linear_cross_entropy(hidden, weight, bias, labels, weights[:, None])
    with pytest.raises(ValueError, match="must be frozen"):
        linear_cross_entropy(hidden, weight.requires_grad_(), bias, labels, weights)


def laid(logits: torch.Tensor, width: int) -> torch.Tensor:
    """In rows of so many columns, of which those behind the logits are NaN."""
    rows = torch.full((len(logits), width), math.nan, dtype=logits.dtype)[:, : logits.shape[1]]
    return rows.copy_(logits)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton's interpreter")
@pytest.mark.parametrize(
    ("C", "V", "dtype", "width"),
    [
        (3, 1, torch.float32, 1), (6, 4096, torch.float32, 4096), (6, 9001, torch.float32, 9008), (7, 131, torch.float16, 131),
        (7, 131, torch.float16, 144), (7, 4097, torch.bfloat16, 4112), (3, 1, torch.float32, 16),
    ],
)  # fmt: skip
def test_the_kernel_does_what_the_torch_path_does(C: int, V: int, dtype: torch.dtype, width: int) -> None:
    triton_path = pytest.importorskip("packlora.ops.cross_entropy.triton_path")
    assert width in (V, rows.aligned(V))
    torch.manual_seed(SEED)
    logits = (3 * torch.randn(C, V)).to(dtype)
    labels, weights = torch.randint(V, (C, 2))[:, 0], torch.rand(C, 3)[:, 1]  # which lie in any way
    labels[1] = IGNORE
    logits[1] = math.nan
    if C > 5:
        labels[4] = V
        logits[3, : V // 2] = -math.inf
        labels[3] = V - 1
    if C > 6:
        logits[2, 5] = math.nan
    for gradient in (False, True):
        ours, theirs = laid(logits, width), logits.clone()
        losses = triton_path.softmax_gradient(ours, labels, weights, gradient)
        want = softmax_gradient(theirs, labels, weights, gradient)
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-5, equal_nan=True)
        if gradient:
            tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
            assert not ours._base[:, V:].any()  # type: ignore[index]
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(ours.nan_to_num(), logits.nan_to_num())
    ours, theirs, ignored, start = laid(logits, width), logits.clone(), labels == IGNORE, V // 3  # a part from here on
    found, wide = triton_path.part_sums(ours, labels - start), part_sums(theirs, labels - start, torch.float32)
    torch.testing.assert_close(found, wide, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(ours.nan_to_num(), logits.nan_to_num())
    sums = wide[0].nan_to_num(1.0) + torch.rand(C)
    for write, out in ((triton_path.part_gradient, ours), (write_gradient, theirs)):
        write(out, torch.stack([labels - start] * 2, 1)[:, 0], weights, sums, ignored)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-5, equal_nan=True)
    assert not ours[1].any() and not ours._base[:, V:].any()  # type: ignore[index]
