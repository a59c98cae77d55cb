"""Block tables of a packed row: the attention kernels read from them where samples begin and end."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 128
"""Most tokens of a block. A block lies in one sample, and the first one begins where the sample does."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleBlocks:
    """Samples whose boundaries are on the device, of which a CUDA graph may hold any number. Only the kernels take them.

    table: int32 [2, 3, N] on the device. Row 0 and 1 hold the same blocks, in the order in which programs for queries and for
        keys take them, those with most work first; of each block the first token, and the first and the end of its sample.
        Blocks that are not there are empty: all three are 0.
    """

    table: torch.Tensor


def most_blocks(tokens: int, samples: int) -> int:
    """Upper bound of the number of blocks that `samples` samples with `tokens` tokens in all can have."""
    return tokens // BLOCK + samples


def table_of(lengths: Sequence[int], most: int | None = None) -> np.ndarray:
    """The table of samples of these lengths, on the host. most: blocks that it has room for; as many as there are if None."""
    sizes = np.asarray(lengths)
    counts = -(-sizes // BLOCK)
    of_block = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(of_block)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = (np.cumsum(sizes) - sizes)[of_block]
    ends = firsts + sizes[of_block]
    begins = firsts + BLOCK * number
    table = np.zeros((2, 3, len(begins) if most is None else most), np.int32)
    for own, work in zip(table, (begins - firsts, ends - begins), strict=True):
        order = np.argsort(-work, kind="stable")
        own[:, : len(order)] = np.stack([begins, firsts, ends])[:, order]
    return table


@functools.lru_cache(maxsize=16)
def blocks_of(lengths: tuple[int, ...], device: torch.device) -> SampleBlocks:
    """Copy the block table of samples of these lengths to the device. Made once per microbatch, for all layers and for
    backward."""
    table = torch.from_numpy(table_of(lengths))
    with torch.inference_mode(False):
        return SampleBlocks((table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True))
