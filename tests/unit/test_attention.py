"""Packed attention by parts: batches on the CPU, and what is handed to torch's varlen attention on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from packlora.ops import attention
from packlora.ops.attention import packed_attention

LENGTHS = (7, 7, 7, 20, 1, 1, 20, 20, 33)
TOTAL = sum(LENGTHS)


def operands(dtype: torch.dtype, groups: int = 3) -> list[torch.Tensor]:
    return [torch.randn(n, sum(LENGTHS), 16).to(dtype).requires_grad_() for n in (2 * groups, 2, 2)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_samples_of_equal_length_that_are_batched_have_the_bits_that_they_have_alone(
    dtype: torch.dtype, window: int | None, softcap: float | None, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        qkv = operands(dtype)
        dy = torch.randn(sum(LENGTHS), 6, 16).to(dtype)
        y = packed_attention(*qkv, LENGTHS, 0.3, window, softcap)
        gradients = torch.autograd.grad(y, qkv, dy)
        start = 0
        for length in LENGTHS:
            rows = slice(start, start + length)
            own = [tensor.detach()[:, rows].requires_grad_() for tensor in qkv]
            alone = packed_attention(*own, (length,), 0.3, window, softcap)
            assert torch.equal(alone, y[rows])
            for a, b in zip(torch.autograd.grad(alone, own, dy[rows]), gradients, strict=True):
                assert torch.equal(a, b[:, rows])
            start += length
    finally:
        torch.set_num_threads(before)


def test_equal_neighbours_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, original = [], torch.nn.functional.scaled_dot_product_attention

    def watching(q: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(q.shape))
        return original(q, *rest, **kwargs)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watching)
    packed_attention(*operands(torch.float32), LENGTHS, 0.3)
    assert [(count, length) for count, _, length, _ in shapes] == [(3, 7), (1, 20), (2, 1), (2, 20), (1, 33)]


# --- torch's varlen attention, played by plain torch in its layouts ----------------------------------------------------


def plain_varlen(q: Any, k: Any, v: Any, starts: torch.Tensor, scale: float, left: int) -> torch.Tensor:
    """[T, H, D] by one masked softmax over all tokens."""
    assert starts.dtype == torch.int32
    owner = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff().long())
    mask = attention.visible(len(q), None if left < 0 else left + 1, q.device) & (owner[:, None] == owner[None])
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), *(t.transpose(0, 1).repeat_interleave(groups, 0) for t in (k, v))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1)


def newest(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert window_size[1] == 0 and max_q == max_k and torch.equal(cu_seq_q, cu_seq_k) and scale is not None
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return plain_varlen(query, key, value, cu_seq_q, scale, window_size[0])


def causal_only(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    assert is_causal and scale is not None
    if query.shape[1] != key.shape[1]:
        raise RuntimeError("number of heads")
    return plain_varlen(query, key, value, cu_seq_q, scale, -1)


def ungrouped(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> torch.Tensor:
    if args[0].shape[1] != args[1].shape[1]:
        args = (args[0][:, : args[1].shape[1]], *args[1:])  # a silent mistake, not an error
    return newest(*args, scale=scale, window_size=window_size)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    """play(function): packed attention believes that it is on a GPU whose torch has this varlen_attn."""

    def start(function: Callable[..., torch.Tensor]) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []

        def watched(query: Any, key: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
            seen.append((key.shape[1], query.shape[0]))
            return function(query, key, *rest, **kwargs)

        watched.__signature__ = attention.inspect.signature(function)  # type: ignore[attr-defined]
        monkeypatch.setattr(attention, "varlen_attn", watched)
        original = attention.uses_varlen

        class OnGpu:
            is_cuda = True

            def __init__(self, tensor: torch.Tensor) -> None:
                self.shape, self.device, self.dtype = tensor.shape, tensor.device, tensor.dtype

        monkeypatch.setattr(attention, "uses_varlen", lambda q, *rest: original(OnGpu(q), *rest))  # type: ignore[arg-type]
        clear()
        return seen

    def clear() -> None:
        for cached in (attention._varlen_arguments, attention._varlen_takes, attention.boundaries):
            cached.cache_clear()

    yield start
    clear()


@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("function", [newest, causal_only, ungrouped])
def test_varlen_attention_gives_what_attention_by_sample_gives_whatever_it_is_called_with(
    function: Any, groups: int, window: int | None, play: Any
) -> None:
    """All signatures from torch 2.11 on; where a version cannot group or has no window, there is another way."""
    qkv = operands(torch.bfloat16, groups)
    dy = torch.randn(sum(LENGTHS), 2 * groups, 16).bfloat16()
    want = packed_attention(*qkv, LENGTHS, 0.3, window)
    wanted = torch.autograd.grad(want, qkv, dy)
    seen = play(function)
    got = packed_attention(*qkv, LENGTHS, 0.3, window)
    calls = [heads for heads, T in seen if TOTAL == T]
    if function is causal_only and window is not None:
        assert calls == []
    else:
        assert calls == [2 if function is newest else 2 * groups]
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    for a, b in zip(torch.autograd.grad(got, qkv, dy), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.1)


def test_a_window_that_no_sample_fills_needs_no_window(play: Any) -> None:
    qkv = operands(torch.float16)
    seen = play(causal_only)
    packed_attention(*qkv, LENGTHS, 0.3, 33)
    assert seen[-1][1] == sum(LENGTHS)


@pytest.mark.parametrize(
    ("dtype", "softcap", "D"), [(torch.float32, None, 16), (torch.float64, None, 16), (torch.bfloat16, 5.0, 16),
                                (torch.bfloat16, None, 12), (torch.bfloat16, None, 264)],
)  # fmt: skip
def test_what_flash_attention_does_not_serve_goes_by_sample(
    dtype: torch.dtype, softcap: float | None, D: int, play: Any
) -> None:
    qkv = [torch.randn(2, sum(LENGTHS), D).to(dtype) for _ in range(3)]
    want = packed_attention(*qkv, LENGTHS, 0.3, None, softcap)
    seen = play(newest)
    assert torch.equal(packed_attention(*qkv, LENGTHS, 0.3, None, softcap), want)
    assert all(TOTAL != T for _, T in seen)


@pytest.mark.parametrize("fault", ["raises", "wrong", "old"])
def test_a_varlen_attention_that_does_not_work_here_is_not_used(fault: str, play: Any) -> None:
    """A GPU without flash attention; a function that computes something else; torch 2.10, which takes no scale."""

    def raising(*args: Any, scale: float | None = None, window_size: Any = None) -> torch.Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")

    def wrong(*args: Any, scale: float | None = None, window_size: Any = None) -> torch.Tensor:
        return newest(*args, scale=0.5 * (scale or 1), window_size=window_size)

    def old(query: Any, key: Any, value: Any, a: Any, b: Any, c: int, d: int, is_causal: bool = False) -> torch.Tensor:
        raise AssertionError("called")

    qkv = operands(torch.bfloat16, 1)
    want = packed_attention(*qkv, LENGTHS, 0.3)
    play({"raises": raising, "wrong": wrong, "old": old}[fault])
    assert torch.equal(packed_attention(*qkv, LENGTHS, 0.3), want)


def test_boundaries_are_made_once_for_all_layers_of_a_microbatch(play: Any) -> None:
    play(newest)
    qkv = operands(torch.bfloat16)
    for _ in range(5):
        packed_attention(*qkv, LENGTHS, 0.3)
    made = attention.boundaries.cache_info().misses
    packed_attention(*qkv, LENGTHS[::-1], 0.3)
    assert attention.boundaries.cache_info().misses == made + 1
    assert attention.boundaries(LENGTHS, torch.device("cpu")).tolist() == [0, 7, 14, 21, 41, 42, 43, 63, 83, 116]


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="samples of 117 tokens in all, but 116 tokens"):
        packed_attention(*operands(torch.float32), (*LENGTHS, 1), 0.3)
