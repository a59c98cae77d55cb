"""Chunks of an output layer's rows by their owners: sums over an owner's rows do not depend on who else is there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from packlora.ops.cross_entropy.linear_cross_entropy import ROWS_WITH_EQUAL_BITS, chunk_rows, most_rows


def chunk_rows_of_owners(sizes: Sequence[int], V: int, dtype: torch.dtype, budget: int) -> list[int]:
    """Rows of each chunk, as of chunk_rows, where the rows of each owner are cut as if there were no others, and small pieces
    share a chunk. sizes: rows of each owner, one after the other."""
    most, out = most_rows(V, dtype, budget), list[int]()
    for piece in itertools.chain.from_iterable(chunk_rows(size, V, dtype, budget) for size in sizes):
        if out and (out[-1] + piece <= most or out[-1] < ROWS_WITH_EQUAL_BITS):
            out[-1] += piece
        else:
            out.append(piece)
    if len(out) > 1 and out[-1] < ROWS_WITH_EQUAL_BITS:
        out[-2:] = [sum(out[-2:])]
    return out
