"""What is read off a layer's mask: the window, or the first row that no window explains, without a mask of size T x T."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from packlora.base.masks import ROWS, describe
from packlora.ops.attention.by_sample import visible

NO_PADDING = torch.zeros(1, dtype=torch.long)


def described(rule: Any, length: int) -> int:
    return int(
        describe(
            batch_size=1, q_length=length, kv_length=length, q_offset=0, kv_offset=0, mask_function=rule,
            attention_mask=None, allow_is_causal_skip=True, dtype=torch.float32, use_vmap=False, device="cpu",
        )
    )  # fmt: skip


@pytest.mark.parametrize("length", [1, 7, ROWS, ROWS + 1, 2 * ROWS + 88])
def test_causal_attention_is_a_window_of_the_whole_sample(length: int) -> None:
    assert described(causal_mask_function, length) == length


@pytest.mark.parametrize("window", [1, 8, ROWS - 1, ROWS, ROWS + 1, 599])
def test_a_window_is_read_to_the_token_as_packed_attention_keeps_to_it(window: int) -> None:
    assert described(sliding_window_causal_mask_function(window), 600) == window
    rule = sliding_window_causal_mask_function(window)
    index = torch.arange(600)
    assert torch.equal(rule(0, 0, index[:, None], index), visible(600, window, torch.device("cpu")))


@pytest.mark.parametrize("chunk", [64, ROWS, 300, 599])
def test_chunks_are_told_from_a_window_with_the_first_token_that_they_change(chunk: int) -> None:
    assert described(chunked_causal_mask_function(chunk, NO_PADDING), 600) == -chunk


def test_a_mask_that_differs_in_one_early_row_alone_is_no_window() -> None:
    def hole(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query != 70) | (key != 3)

    assert described(and_masks(causal_mask_function, hole), 600) == -70


def test_a_mask_that_shows_what_comes_later_fits_no_sample() -> None:
    assert described(bidirectional_mask_function, 600) == 0


def test_a_causal_mask_is_written_twice_and_nothing_else_of_its_size_is() -> None:
    aten, sizes = torch.ops.aten, []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket in (aten.le, aten.gt, aten.ne, aten.bitwise_and, aten.any):
                sizes.append(out.numel())
            return out

    length = 3 * ROWS
    with Counted():
        assert described(causal_mask_function, length) == length
    assert sum(sizes) == 2 * length**2
