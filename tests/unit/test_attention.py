"""Packed attention by parts: batches on the CPU, and what goes to the kernels on a GPU (test_attention_kernels.py)."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from seeds import some

from packlora.ops.attention import attention
from packlora.ops.attention.attention import packed_attention
from packlora.ops.attention.blocks import SampleBlocks

LENGTHS = (7, 7, 7, 20, 1, 1, 20, 20, 33)
TOTAL = sum(LENGTHS)


def operands(dtype: torch.dtype, groups: int = 3) -> list[torch.Tensor]:
    return [torch.randn(n, sum(LENGTHS), 16).to(dtype).requires_grad_() for n in (2 * groups, 2, 2)]


SETTINGS = [
    (dtype, window, *softcap_sinks, threads)
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    for softcap_sinks in ((None, None), (5.0, None), (None, 2.0), (5.0, -1.0)) for threads in (1, 2) for window in (None, 1, 3)
]  # fmt: skip
"""In an order of which every fifth has each pair of values."""


@pytest.mark.parametrize(("dtype", "window", "softcap", "sinks", "threads"), some(SETTINGS, 5))
def test_samples_of_equal_length_that_are_batched_have_the_bits_that_they_have_alone(
    dtype: torch.dtype, window: int | None, softcap: float | None, sinks: float | None, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        qkv = operands(dtype)
        dy = torch.randn(sum(LENGTHS), 6, 16).to(dtype)
        of_heads = None if sinks is None else torch.linspace(sinks, sinks + 1, 6)
        y = packed_attention(*qkv, LENGTHS, 0.3, window, softcap, sinks_H=of_heads)
        gradients = torch.autograd.grad(y, qkv, dy)
        start = 0
        for length in LENGTHS:
            rows = slice(start, start + length)
            own = [tensor.detach()[:, rows].requires_grad_() for tensor in qkv]
            alone = packed_attention(*own, (length,), 0.3, window, softcap, sinks_H=of_heads)
            assert torch.equal(alone, y[rows])
            for a, b in zip(torch.autograd.grad(alone, own, dy[rows]), gradients, strict=True):
                assert torch.equal(a, b[:, rows])
            start += length
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "D", "wide"), [(torch.float32, 16, 16), (torch.float64, 16, 16), (torch.bfloat16, 264, 264),
                                                 (torch.bfloat16, 16, 32)])  # fmt: skip
def test_what_the_kernels_do_not_serve_goes_by_sample(dtype: torch.dtype, D: int, wide: int) -> None:
    class OnGpu:
        is_cuda, device = True, torch.device("cuda", 0)

        def __init__(self, width: int, dtype: torch.dtype) -> None:
            self.shape, self.dtype = (2, TOTAL, width), dtype

    with mock.patch.object(attention, "why_no_kernels", return_value=None):
        assert attention.uses_kernels(OnGpu(16, torch.bfloat16), OnGpu(16, torch.bfloat16))  # type: ignore[arg-type]
        assert not attention.uses_kernels(OnGpu(D, dtype), OnGpu(wide, dtype))  # type: ignore[arg-type]
    with mock.patch.object(attention, "why_no_kernels", return_value="too old"):
        assert not attention.uses_kernels(OnGpu(16, torch.bfloat16), OnGpu(16, torch.bfloat16))  # type: ignore[arg-type]


def test_blocks_are_made_once_for_all_layers_of_a_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = []
    monkeypatch.setattr(attention, "uses_kernels", lambda q, v: True)
    monkeypatch.setattr(attention, "_one_call", lambda q, k, v, samples, *rest: tables.append(samples.table))
    for lengths in (LENGTHS, LENGTHS, LENGTHS[::-1], LENGTHS):
        packed_attention(*operands(torch.bfloat16), lengths, 0.3)
    first, second, reversed_, last = tables
    assert first is second is last and first is not reversed_


def test_blocks_on_the_device_are_for_the_kernels_alone() -> None:
    with pytest.raises(ValueError, match="where samples begin is on the device alone"):
        packed_attention(*operands(torch.float32), SampleBlocks(torch.zeros(2, 3, 9, dtype=torch.int32)), 0.3)


def test_lengths_that_do_not_add_up_and_a_negative_scale_are_refused() -> None:
    with pytest.raises(ValueError, match="samples of 117 tokens in all, but 116 tokens"):
        packed_attention(*operands(torch.float32), (*LENGTHS, 1), 0.3)
    q, k, v = operands(torch.float32)
    with pytest.raises(ValueError, match="above 0"):
        packed_attention(q, k, v, LENGTHS, -0.3)
    with pytest.raises(ValueError, match="tokens are given with keys of"):
        packed_attention(q, *(torch.cat([one, one[:, :1]], 1) for one in (k, v)), LENGTHS, 0.3)
