"""Layout of a group of layers: rows of the stacked A, columns of S, blocks of the flat B's.

A group is one or several frozen layers that read the same x. For one adapter the A's of all layers are stacked, so S of a
token is one row `[S_layer0 | S_layer1 | ...]` of its own adapter; S is [T, width], width that of the widest adapter. Ranks
are padded to a multiple of `align` with zeros (16 for the kernels, whose products need it; 1 for plain torch products).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one adapter on one layer: rank, padded rank, first column in S (and row in the adapter's stacked A), and first
    element in the layer's flat B."""

    rank: int
    padded: int
    column: int
    b_offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """rows: (first row in the stacked A, padded rank over all layers) by adapter; places: by (adapter, layer)."""

    rows: dict[int, tuple[int, int]]
    places: dict[tuple[int, int], Place]
    num_rows: int
    width: int
    b_sizes: tuple[int, ...]
    max_padded: tuple[int, ...]
    """Largest padded rank of each layer."""
    sizes: tuple[int, ...]
    """N of each layer."""
    widths: dict[int, tuple[int, ...]]
    """Padded ranks of each adapter on the layers that it targets, in order."""
    b_shapes: tuple[tuple[int, ...], ...]
    """Shape of each layer's B: flat, or [N, padded] where only one adapter has a B there."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Adapters of the group in rising order: the rows of tables on the device. Numbers themselves may be large, where
        adapters come and go."""
        return tuple(self.rows)

    def b_block(self, B: torch.Tensor, number: int, index: int) -> torch.Tensor:
        """B, or dB, of one adapter on one layer in that of the layer: [N, padded]."""
        if B.ndim == 2:
            return B
        place, N = self.places[number, index], self.sizes[index]
        return B[place.b_offset : place.b_offset + N * place.padded].view(N, place.padded)

    def a_blocks(self, A_RK: torch.Tensor, number: int) -> tuple[torch.Tensor, ...]:
        """A, or dA, of one adapter by layer that it targets, in the stacked one: [padded, K] each."""
        (first, padded), widths = self.rows[number], self.widths[number]
        own = A_RK if padded == self.num_rows else A_RK[first : first + padded]
        return (own,) if len(widths) == 1 else own.split_with_sizes(widths)


def make_layout(ranks: Sequence[Mapping[int, int]], sizes: Sequence[int], align: int) -> Layout:
    """Lay out a group.

    Args:
        ranks: per layer, by adapter number.
        sizes: N of each layer.
        align: what padded ranks are multiples of.
    """
    rows: dict[int, tuple[int, int]] = {}
    widths: dict[int, tuple[int, ...]] = {}
    places: dict[tuple[int, int], Place] = {}
    b_sizes, largest, first = [0] * len(sizes), [0] * len(sizes), 0
    for number in sorted({number for by_adapter in ranks for number in by_adapter}):
        column = 0
        for layer, by_adapter in enumerate(ranks):
            rank = by_adapter.get(number, 0)
            if rank:
                padded = -(-rank // align) * align
                places[number, layer] = Place(rank, padded, column, b_sizes[layer])
                b_sizes[layer] += sizes[layer] * padded
                largest[layer] = max(largest[layer], padded)
                column += padded
        rows[number] = (first, column)
        widths[number] = tuple(place.padded for (owner, _), place in places.items() if owner == number)
        first += column
    width = max((padded for _, padded in rows.values()), default=0)
    alone = [size == N * padded for size, N, padded in zip(b_sizes, sizes, largest, strict=True)]
    b_shapes = tuple(
        (N, padded) if only and padded else (size,)
        for only, size, N, padded in zip(alone, b_sizes, sizes, largest, strict=True)
    )
    return Layout(rows, places, first, width, tuple(b_sizes), tuple(largest), tuple(sizes), widths, b_shapes)
