"""The attention kernels in Triton's interpreter against the reference written out, with poisoned buffers."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch
from exactness import assert_as_exact, poisoned
from seeds import SEED

from packlora.ops.attention import attention
from packlora.ops.attention.attention import packed_attention
from packlora.ops.attention.blocks import BLOCK, SampleBlocks, most_blocks, table_of
from packlora.ops.attention.by_sample import visible

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
LENGTHS = (40, 130, 3, 1, 64, 257)
FLOAT, HALF = torch.float32, torch.float16
T = sum(LENGTHS)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed by the kernels on the CPU. What they are given to write into holds NaN."""
    monkeypatch.setattr(attention, "uses_kernels", lambda q, v: True)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def operands(H: int, h: int, D: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v [heads, T, D] as views of [T, heads, D], and dy [T, H, D]."""
    generator = torch.Generator().manual_seed(SEED + seed)
    drawn = [torch.randn(T, n, D, generator=generator, dtype=torch.float64).to(dtype) for n in (H, h, h, H)]
    return [*(tensor.transpose(0, 1) for tensor in drawn[:3]), drawn[3]]


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Any, scale: float, window: int | None, cap: float | None,
    blocks: None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """One masked softmax over all tokens."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = visible(T, window, q.device) & (owner[:, None] == owner[None])
    k, v = (tensor.repeat_interleave(len(q) // len(k), 0) for tensor in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return (torch.softmax(scores, -1) @ v).transpose(0, 1)
    beside = sinks.to(scores.dtype)[:, None, None].expand(-1, T, 1)
    return (torch.softmax(torch.cat([scores, beside], -1), -1)[..., :-1] @ v).transpose(0, 1)


def outcome(function: Any, q: Any, k: Any, v: Any, dy: Any, *rest: Any) -> dict[str, torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    y = function(*leaves, *rest)
    return dict(zip(("y", "dq", "dk", "dv"), (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


@pytest.mark.parametrize(
    ("H", "h", "D", "window", "cap", "sinks", "dtype"),
    [(2, 2, 16, None, None, False, FLOAT), (4, 2, 24, None, None, True, FLOAT), (3, 1, 16, 17, None, True, FLOAT),
     (2, 1, 16, 150, 2.0, False, FLOAT), (2, 2, 12, 2, None, False, FLOAT), (4, 2, 128, None, None, True, HALF),
     (2, 1, 128, 150, 2.0, False, HALF)],
)  # fmt: skip
def test_attention_and_its_gradients_are_as_exact_as_torch(
    H: int, h: int, D: int, window: int | None, cap: float | None, sinks: bool, dtype: torch.dtype
) -> None:
    rest = LENGTHS, D**-0.5, window, cap, None, torch.linspace(-1, 4, H) if sinks else None

    def draw(seed: int) -> Any:
        drawn = operands(H, h, D, dtype, seed)
        want = outcome(written_out, *(tensor.double() for tensor in drawn), *rest)
        return outcome(packed_attention, *drawn, *rest), outcome(written_out, *drawn, *rest), want

    assert_as_exact(draw, draws=1, seed=SEED)


@pytest.mark.parametrize(("D", "dtype"), [(16, FLOAT), (128, HALF)])
def test_operands_that_lie_otherwise_give_the_same_bits(D: int, dtype: torch.dtype) -> None:
    drawn = operands(2, 1, D, dtype)
    want = outcome(packed_attention, *drawn, LENGTHS, 0.25)
    dense = [tensor.contiguous() for tensor in drawn[:3]]
    strewn = [tensor.repeat_interleave(2, -1)[..., ::2] for tensor in drawn[:3]]
    for others in (dense, strewn):
        got = outcome(packed_attention, *others, drawn[3].transpose(0, 1).contiguous().transpose(0, 1), LENGTHS, 0.25)
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(("window", "D"), [pytest.param(None, 16, marks=pytest.mark.soak), (17, 16), (None, 128)])
def test_what_is_packed_beside_a_sample_changes_no_bit_of_it_not_even_a_nan(window: int | None, D: int) -> None:
    drawn, others = operands(2, 1, D, HALF), operands(2, 1, D, HALF, seed=1)
    want = outcome(packed_attention, *drawn, LENGTHS, 0.25, window)
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    for number, fill in enumerate((None, math.nan, math.inf)):
        kept = owner % 2 == (number + (window is None)) % 2
        mixed = [other.clone() if fill is None else torch.full_like(other, fill) for other in others]
        for new, tensor in zip(mixed[:3], drawn[:3], strict=True):
            new[:, kept] = tensor[:, kept]
        mixed[3][kept] = drawn[3][kept]
        got = outcome(packed_attention, *mixed, LENGTHS, 0.25, window)
        assert torch.equal(got["y"][kept], want["y"][kept]), fill
        assert all(torch.equal(got[name][:, kept], want[name][:, kept]) for name in ("dq", "dk", "dv")), fill


@pytest.mark.parametrize("D", [16, 128])
def test_a_sample_has_the_bits_that_it_has_alone(D: int) -> None:
    drawn = operands(2, 1, D, HALF)
    whole, start = outcome(packed_attention, *drawn, LENGTHS, 0.25), 0
    for length in LENGTHS:
        own = slice(start, start + length)
        alone = outcome(packed_attention, *(t[:, own] for t in drawn[:3]), drawn[3][own], (length,), 0.25)
        assert torch.equal(alone["y"], whole["y"][own])
        assert all(torch.equal(alone[name], whole[name][:, own]) for name in ("dq", "dk", "dv"))
        start += length


def test_a_table_with_room_for_more_blocks_gives_the_same_bits() -> None:
    drawn = operands(2, 1, 16, torch.float32)
    want = outcome(packed_attention, *drawn, LENGTHS, 0.25)
    table = torch.from_numpy(table_of(LENGTHS, most_blocks(T, 16)))
    got = outcome(packed_attention, *drawn, SampleBlocks(table), 0.25)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_cover_each_token_once_and_stay_in_their_samples(seed: int) -> None:
    random = np.random.default_rng(SEED + seed)
    lengths = random.integers(1, 3 * BLOCK, random.integers(1, 30))
    most = most_blocks(int(lengths.sum()), len(lengths))
    for table in (table_of(lengths), table_of(lengths, most)):
        assert table.dtype == np.int32 and table.shape[2] <= most
        ends = np.cumsum(lengths)
        for begins, firsts, stops in table:
            taken = np.concatenate([np.arange(b, min(b + BLOCK, e)) for b, e in zip(begins, stops, strict=True)])
            assert sorted(taken) == list(range(ends[-1]))
            for b, f, e in zip(begins, firsts, stops, strict=True):
                assert b == f == e == 0 or ((b - f) % BLOCK == 0 and f <= b < e and e in ends and f in (0, *ends))
        work = table[0, 0] - table[0, 1], table[1, 2] - table[1, 0]
        assert all((np.diff(own) <= 0).all() for own in work)


def test_rows_that_are_too_far_apart_for_the_kernels_are_copied() -> None:
    from packlora.ops.attention import triton_path

    near, far = (
        torch.empty(2**20 * stride, device="meta").as_strided((1, 2**20, 16), (16, stride, 1))
        for stride in (2047, 2048)
    )
    assert triton_path._dense(near) is near
    assert triton_path._dense(far).stride(1) == 16
