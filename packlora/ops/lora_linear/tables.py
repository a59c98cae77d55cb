"""Tables on the device that tell a kernel which tokens, adapter and offsets are its own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packlora.ops.dropout.keys import dropout_threshold
from packlora.ops.lora_linear.layout import Layout
from packlora.ops.lora_linear.types import Segment


def cover(segments: Sequence[Segment], num_tokens: int) -> list[tuple[int, int, int, float]]:
    """(adapter, start, stop, dropout) over all tokens in order; adapter -1 where no segment is."""
    out: list[tuple[int, int, int, float]] = []
    end = 0
    for segment in sorted(segments, key=lambda segment: segment.start):
        if segment.start > end:
            out.append((-1, end, segment.start, 0.0))
        out.append((segment.adapter, segment.start, segment.stop, segment.dropout))
        end = segment.stop
    if end < num_tokens:
        out.append((-1, end, num_tokens, 0.0))
    return out


def gaps(segments: Sequence[Segment], num_tokens: int) -> list[tuple[int, int]]:
    """(start, stop) of the tokens that no segment owns."""
    return [(start, stop) for adapter, start, stop, _ in cover(segments, num_tokens) if adapter < 0]


class SegmentTables:
    """Tokens cut into blocks that never cross from one segment into another; one table per block size, one copy to the device.

    A row is (adapter or -1, start, stop, dropout threshold), int32. `ranges` has per block size and adapter the first row
    that is the adapter's and one past its last; rows of others may lie between. `uncut` has a row for each segment, and for
    the tokens between segments, uncut; `spans` per tile of so many tokens, cut without regard to segments, the first of those
    rows that the tile meets and one past its last.
    """

    def __init__(
        self, segments: Sequence[Segment], num_tokens: int, device: torch.device, sizes: Sequence[int], num_adapters: int,
        tile: int,
    ) -> None:  # fmt: skip
        flat: list[int] = []
        ranges: dict[int, int] = {}
        bounds: dict[int, tuple[int, int]] = {}
        parts = cover(segments, num_tokens)
        for size in dict.fromkeys(sizes):
            first = len(flat) // 4
            for adapter, start, stop, p in parts:
                threshold = dropout_threshold(p)
                for at in range(start, stop, size):
                    flat += (adapter, at, min(at + size, stop), threshold)
            bounds[size] = (first, len(flat) // 4)
        uncut = len(flat) // 4
        for adapter, start, stop, p in parts:
            flat += (adapter, start, stop, dropout_threshold(p))
        for size, (first, last) in bounds.items():
            ranges[size] = len(flat) // 2
            owners = [flat[4 * row] for row in range(first, last)]
            for adapter in range(num_adapters):
                own = [row for row, owner in enumerate(owners) if owner == adapter]
                flat += (own[0], own[-1] + 1) if own else (0, 0)
            flat += (0, 0) * (len(flat) % 4 // 2)
        spans, number = len(flat) // 2, 0
        for at in range(0, num_tokens, tile):
            while parts[number][2] <= at:
                number += 1
            last = number
            while last + 1 < len(parts) and parts[last + 1][1] < at + tile:
                last += 1
            flat += (number, last + 1)
        tiles = len(flat) // 2 - spans
        flat += (0, 0) * (len(flat) % 4 // 2)
        table = torch.tensor(flat, dtype=torch.int32)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        rows, pairs = table.view(-1, 4), table.view(-1, 2)
        self.blocks = {size: rows[first:last] for size, (first, last) in bounds.items()}
        self.counts = {size: last - first for size, (first, last) in bounds.items()}
        """How many blocks there are."""
        self.ranges = {size: pairs[at : at + num_adapters] for size, at in ranges.items()}
        self.uncut, self.spans = rows[uncut : uncut + len(parts)], pairs[spans : spans + tiles]
        self.dropout = any(segment.dropout > 0 for segment in segments)
        self.launches: dict[Hashable, Any] = {}
        """Launches made on these tables, see launcher.py."""
        self.chunk_sizes: dict[tuple[tuple[int, ...], int], int] = {}
        """Chunks of tokens chosen for these tables, see kernels/sizes.py."""


@dataclass(frozen=True, slots=True)
class GroupTables:
    """A group's offsets on the device; -1 and unknown adapters are never looked up, absent ones have rank 0.

    rows: int32 [adapters, 2], (first row in the stacked A, padded rank over all layers).
    places: per layer int32 [adapters, 4], (column in S, offset in flat B, padded rank, 0).
    scalings: per layer float32 [adapters].
    row_scales: float32 [rows of the stacked A], the scaling of each row.
    owners: int32 [rows of the stacked A, 2], adapter and column in S of each row.
    adapters: how many.
    """

    rows: torch.Tensor
    places: list[torch.Tensor]
    scalings: list[torch.Tensor]
    row_scales: torch.Tensor
    owners: torch.Tensor
    adapters: int


def make_group_tables(layout: Layout, scalings: Mapping[tuple[int, int], float], num: int, device: Any) -> GroupTables:
    """`num`: one more than the largest adapter number that a segment may have."""
    layers = range(len(layout.b_sizes))
    rows = [[0, 0] for _ in range(num)]
    for number, (first, padded) in layout.rows.items():
        rows[number] = [first, padded]
    places = [[[0, 0, 0, 0] for _ in range(num)] for _ in layers]
    factors = [[0.0] * num for _ in layers]
    for (number, layer), place in layout.places.items():
        places[layer][number] = [place.column, place.b_offset, place.padded, 0]
        factors[layer][number] = scalings[number, layer]

    by_row = [0.0] * layout.num_rows
    owners = [[number, row] for number, (_, padded) in layout.rows.items() for row in range(padded)]
    for (number, layer), place in layout.places.items():
        first = layout.rows[number][0] + place.column
        by_row[first : first + place.padded] = [scalings[number, layer]] * place.padded

    def put(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    return GroupTables(
        put(rows, torch.int32),
        [put(table, torch.int32) for table in places],
        [put(table, torch.float32) for table in factors],
        put(by_row, torch.float32),
        put(owners, torch.int32).view(-1, 2),
        num,
    )
