"""Tables on the device that tell a kernel which tokens, adapter and offsets are its own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packlora.ops.dropout.keys import dropout_threshold
from packlora.ops.lora_linear.kernels.config import BITS_16, Sizes
from packlora.ops.lora_linear.layout import Layout
from packlora.ops.lora_linear.types import Segment, cover


class SegmentTables:
    """Tokens cut into blocks that never cross from one segment into another; one table per block size, one copy to the device.

    A row is (place of the adapter among `numbers` or -1, start, stop, dropout threshold), int32. `ranges` has per block size
    and adapter the first row that is the adapter's and one past its last; rows of others may lie between. `uncut` has a row
    for each segment, and for the tokens between segments, uncut; `spans` per tile of so many tokens, cut without regard to
    segments, the first of those rows that the tile meets and one past its last.

    Args:
        numbers: of the adapters that segments may have; tokens of others are as those of none.
        most: parts (segments, and stretches of tokens between them) that `write` may be given later. The tables then have rows
            for them, where they are too many those of no tokens, so that grids and addresses stay.
        config: of the kernels that are launched on these tables; `sizes` are its blocks of tokens.
    """

    def __init__(
        self, segments: Sequence[Segment], num_tokens: int, device: torch.device, sizes: Sequence[int],
        numbers: Sequence[int], tile: int, most: int | None = None, config: Sizes = BITS_16,
    ) -> None:  # fmt: skip
        self.config = config
        self.num_tokens, self.tile = num_tokens, tile
        self._places = {number: place for place, number in enumerate(numbers)}
        num_adapters = len(numbers)
        parts = cover(segments, num_tokens)
        self.num_parts = len(parts) if most is None else most
        self.counts = {
            size: sum(-(-(stop - start) // size) for _, start, stop, _ in parts)
            if most is None
            else num_tokens // size + most
            for size in sizes
        }
        """Number of blocks."""
        table = torch.from_numpy(self._flat(parts))
        self._table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
        rows, pairs, at = self._table.view(-1, 4), self._table.view(-1, 2), 0
        self.blocks: dict[int, torch.Tensor] = {}
        for size, count in self.counts.items():
            self.blocks[size] = rows[at : at + count]
            at += count
        self.uncut = rows[at : at + self.num_parts]
        at = 2 * (at + self.num_parts)
        self.ranges: dict[int, torch.Tensor] = {}
        for size in self.counts:
            self.ranges[size] = pairs[at : at + num_adapters]
            at += num_adapters + num_adapters % 2
        self.spans = pairs[at : at + -(-num_tokens // tile)]
        self.dropout = any(segment.dropout > 0 for segment in segments)
        self.launches: dict[Hashable, Any] = {}
        """Launches made on these tables, see launcher.py."""
        self.chunk_sizes: dict[tuple[tuple[int, ...], int], int] = {}
        """Chunks of tokens chosen for these tables, see kernels/sizes.py."""

    def write(self, segments: Sequence[Segment]) -> None:
        """Replace the segments by others with as many tokens, of the same adapters and rates or fewer; later launches read the
        new ones."""
        table = torch.from_numpy(self._flat(cover(segments, self.num_tokens)))
        self._table.copy_(table.pin_memory() if self._table.is_cuda else table, non_blocking=True)

    def _flat(self, parts: Sequence[tuple[int, int, int, float]]) -> np.ndarray:
        """All tables in a row; those that start at multiples of four or two numbers are filled up with zeros."""
        none, num_adapters = (-1, self.num_tokens, self.num_tokens, 0), len(self._places)
        owners = [self._places.get(adapter, -1) for adapter, _, _, _ in parts]
        rows = np.array(
            [(own, start, stop, dropout_threshold(p)) for own, (_, start, stop, p) in zip(owners, parts, strict=True)],
            np.int32,
        )
        tables, ranges = [], []
        for size, count in self.counts.items():
            of, starts = [], []
            for number, (_, start, stop, _) in enumerate(parts):
                starts.append(np.arange(start, stop, size, dtype=np.int32))
                of.append(np.full(len(starts[-1]), number))
            blocks, at = rows[np.concatenate(of)], np.concatenate(starts)
            blocks[:, 2] = np.minimum(at + size, blocks[:, 2])
            blocks[:, 1] = at
            tables += [blocks, np.full((count - len(blocks), 4), none, np.int32)]
            found = np.zeros((num_adapters + num_adapters % 2, 2), np.int32)
            for place in {own for own in owners if own >= 0}:
                own = np.flatnonzero(blocks[:, 0] == place)
                if len(own):
                    found[place] = own[0], own[-1] + 1
            ranges.append(found)
        tables += [rows, np.full((self.num_parts - len(parts), 4), none, np.int32)]
        tiles = np.arange(0, self.num_tokens, self.tile)
        spans = np.zeros((len(tiles) + len(tiles) % 2, 2), np.int32)
        spans[: len(tiles), 0] = np.searchsorted(rows[:, 2], tiles, side="right")
        spans[: len(tiles), 1] = np.searchsorted(rows[:, 1], np.minimum(tiles + self.tile, self.num_tokens))
        return np.concatenate([part.ravel() for part in (*tables, *ranges, spans)]).astype(np.int32, copy=False)


@dataclass(frozen=True, slots=True)
class GroupTables:
    """A group's offsets on the device, by place of the adapter among Layout.numbers; -1 is never looked up.

    rows: int32 [adapters, 2], (first row in the stacked A, padded rank over all layers).
    places: per layer int32 [adapters, 4], (column in S, offset in flat B, padded rank, 0).
    scalings: per layer float32 [adapters].
    row_scales: float32 [rows of the stacked A], the scaling of each row.
    owners: int32 [rows of the stacked A, 2], place of the adapter and column in S of each row.
    adapters: how many.
    """

    rows: torch.Tensor
    places: list[torch.Tensor]
    scalings: list[torch.Tensor]
    row_scales: torch.Tensor
    owners: torch.Tensor
    adapters: int


def make_group_tables(layout: Layout, scalings: Mapping[tuple[int, int], float], device: Any) -> GroupTables:
    """Tables of a group. scalings: by adapter and layer."""
    layers, num = range(len(layout.b_sizes)), len(layout.rows)
    at = {number: place for place, number in enumerate(layout.numbers)}
    rows = [[first, padded] for first, padded in layout.rows.values()]
    places = [[[0, 0, 0, 0] for _ in range(num)] for _ in layers]
    factors = [[0.0] * num for _ in layers]
    for (number, layer), place in layout.places.items():
        places[layer][at[number]] = [place.column, place.b_offset, place.padded, 0]
        factors[layer][at[number]] = scalings[number, layer]

    by_row = [0.0] * layout.num_rows
    owners = [[at[number], row] for number, (_, padded) in layout.rows.items() for row in range(padded)]
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
