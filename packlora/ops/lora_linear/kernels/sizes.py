"""Choice of a launch among the block sizes of its kernel (config.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from packlora.ops.gpu import has_copy_engine, processors
from packlora.ops.lora_linear.call import Call
from packlora.ops.lora_linear.tables import SegmentTables
from packlora.ops.lora_linear.types import Layer

FUSED_M, FUSED_BYTES = 128, 128
"""Rows of the fused product's tiles, and bytes of the columns of x that are read at a time."""
FUSED_TILES = ((256, 8, 3, 1.0), (128, 8, 5, 0.54))
"""Columns of the fused product's tiles with their warps and stages, and what a tile takes, of the first one's time."""
DESCRIBED = 1 << 24
CHUNK_START = 128
"""Start-up time of a program that walks over a chunk, in tokens of its walk."""


def programs_at_once(device: torch.device) -> int:
    """Number of programs that run at the same time; one on the CPU, where the interpreter runs them."""
    return processors(device)


def dtype_of(t: torch.Tensor | None) -> torch.dtype | None:
    """Dtype of an operand for the key of a launch; None where the operand is absent."""
    return None if t is None else t.dtype


def block_of(rank: int, largest: int) -> int:
    """Power of two that covers a rank, from 16 to `largest`."""
    size = 16
    while size < rank and size < largest:
        size *= 2
    return size


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def chunk_size(chunks: tuple[int, ...], columns: int, segments: SegmentTables, device: torch.device) -> int:
    """Tokens of a chunk, for kernels with a program for each chunk and block of columns: those that take the fewest turns of
    all processors, two programs on each; of equals the longest."""
    chunk = segments.chunk_sizes.get((chunks, columns))
    if chunk is None:
        slots = 2 * processors(device)
        turns = {chunk: cdiv(columns * segments.counts[chunk], slots) for chunk in chunks}
        chunk = min(chunks, key=lambda chunk: (turns[chunk] * (chunk + CHUNK_START), -chunk))
        segments.chunk_sizes[chunks, columns] = chunk
    return chunk


def few_programs(columns: int, chunks: tuple[int, ...], segments: SegmentTables, device: torch.device) -> bool:
    """Whether a program for each of the shortest chunks and block of columns makes fewer than two for each processor."""
    return columns * segments.counts[chunks[0]] < 2 * processors(device)


def described(t: torch.Tensor, stride: int) -> bool:
    """Whether kernels read its rows, so many elements apart, through a tensor descriptor: 16 bits, aligned rows, Hopper's copy
    engine, and enough of it to be worth the host's time for a descriptor."""
    return (
        (t.numel() >= DESCRIBED or not t.is_cuda) and t.element_size() == 2 and t.stride(-1) == 1 and stride % 8 == 0
        and t.data_ptr() % 16 == 0
        and has_copy_engine(t.device)
    )  # fmt: skip


@lru_cache(maxsize=4096)
def tile_of(T: int, Q: int, slots: int, twice: bool = False) -> tuple[int, int, int]:
    """Columns, warps and stages of the tiles that take the least time in all turns of the processors. twice: two sums of a tile
    are in registers at a time, which those of half the columns take."""

    def turns(columns: int) -> int:
        return cdiv(cdiv(T, FUSED_M) * cdiv(Q, columns), slots)

    columns, warps, stages, _ = min(FUSED_TILES[twice:], key=lambda tile: turns(tile[0]) * tile[3])
    return columns, warps, stages


def fusable(x: torch.Tensor, layers: Sequence[Layer]) -> bool:
    """Whether fused_kernel takes these: a GPU with Hopper's copy engine, 16 bits, aligned rows."""
    return (
        x.element_size() == 2 and has_copy_engine(x.device) and x.shape[-1] % 16 == 0 and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        and all(layer.frozen.has_tensor and layer.frozen.shape[0] % 16 == 0 and _lies_flat(layer) for layer in layers)
    )  # fmt: skip


def _lies_flat(layer: Layer) -> bool:
    """Temporary tensors do."""
    weight = layer.frozen.dense()
    return weight is None or (weight.is_contiguous() and weight.data_ptr() % 16 == 0)


def rows_of(call: Call) -> tuple[int, int, int]:
    """Dropout threshold, first row in the stacked A and padded rank of the segment that has all tokens; zeros where several
    segments share them."""
    single = call.single_adapter
    return (0, 0, 0) if single is None else (call.threshold, *call.layout.rows[single.adapter])


def place_of(call: Call, index: int) -> tuple[int, int, int]:
    """Column in S, offset in the flat B and padded rank of the single adapter on a layer; zeros where several segments share
    the tokens."""
    if call.single_adapter is None:
        return 0, 0, 0
    place = call.layout.places[call.single_adapter.adapter, index]
    return place.column, place.b_offset, place.padded
