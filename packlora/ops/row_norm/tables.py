"""Tables of what each program of the row norm's kernels does, block sizes, and which problems share a launch.

Tables of items depend on shapes alone. How a module's sums are cut depends on nothing but its own shape.

Shapes: N outputs, K inputs, r rank, R and Kp rank and K padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packlora.ops.row_norm.types import NormProblem

BUDGET_BYTES = 1 << 30
"""Bytes that kernels may keep in intermediate buffers for one batch of modules: mostly A in two halves."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tile sizes of cross_kernel: rows, ranks and inputs of a block, warps, stages, and whether sums are promoted.

    most_k: longest sum in one accumulator. finish_m: rows of a block of finish_kernel.
    """

    m: int
    r: int
    k: int
    warps: int
    stages: int
    promote: bool = True
    most_k: int = 1 << 30
    finish_m: int = 32


SIZES = {
    16: Sizes(64, 16, 128, 4, 4),
    32: Sizes(64, 32, 128, 4, 3),
    64: Sizes(128, 64, 64, 4, 4),
    128: Sizes(256, 128, 64, 8, 3, promote=False, most_k=384),
}
"""Tile sizes by block of ranks; the largest serves all larger ranks, and reads less from L2 for a product than square blocks
would.

A sum that is not promoted loses about 6e-8 of itself for each 8 of K, where its terms have one sign; most_k keeps the norm's
error under 1e-6.
"""
WIDE = 64
"""Ranks over this take the kernels of kernels/wide.py."""
GRAM_R, GRAM_K, GRAM_CHUNKS = 32, 64, 16
TAIL_M = 64
WIDE_TAIL_M, WIDE_TAIL_R, WIDE_FOLD_R = 128, 64, 32
FINGERPRINT = 4096
PROGRAMS, SHORTEST_K, GRAM_CHUNK, WIDE_GRAM_CHUNK = 264, 1024, 512, 256
"""K is cut until a module by itself fills a large GPU, in parts no shorter than this. How it is cut depends on nothing but the
module's own shape, so that a norm has the same bits alone and in any batch."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def rank_block(rank: int) -> int:
    """Ranks of a block: the smallest of SIZES that holds them all, else the largest."""
    return next((block for block in SIZES if rank <= block), 128)


def batches(problems: Sequence[NormProblem], budget_bytes: int | None = None) -> list[list[int]]:
    """Indices of problems that can be computed together."""
    budget = BUDGET_BYTES if budget_bytes is None else budget_bytes
    kinds: dict[Any, list[list[int]]] = {}
    used: dict[Any, int] = {}
    for index, problem in enumerate(problems):
        kind = kind_of(problem)
        own = _scratch(problem)
        if kind not in kinds or used[kind] + own > budget:
            kinds.setdefault(kind, []).append([])
            used[kind] = 0
        kinds[kind][-1].append(index)
        used[kind] += own
    return [indices for lists in kinds.values() for indices in lists]


def kind_of(problem: NormProblem) -> tuple[Any, ...]:
    """Properties that problems of one launch share: device, dtypes of W, A and B, block of ranks, and both alignments."""
    weight, A = problem.weight, problem.A
    assert isinstance(weight, torch.Tensor)
    aligned = (
        weight.data_ptr() % 16 == 0 and weight.stride(0) % 16 == 0 and weight.shape[1] % 16 == 0
        and weight.stride(0) >= weight.shape[1]  # descriptors know no row that is read again
        and A.data_ptr() % 16 == 0
    )  # fmt: skip
    aligned_B = problem.B.data_ptr() % 16 == 0 and len(A) % 16 == 0
    return weight.device, weight.dtype, A.dtype, problem.B.dtype, rank_block(len(A)), aligned, aligned_B


def _scratch(problem: NormProblem) -> int:
    rank, K = problem.A.shape
    return 4 * rank * K + 4 * rank * rank * (2 + cdiv(K, _gram_chunk(K, rank)))


def _gram_chunk(K: int, rank: int) -> int:
    shortest = WIDE_GRAM_CHUNK if rank > WIDE else GRAM_CHUNK
    return max(shortest, cdiv(cdiv(K, GRAM_CHUNKS), GRAM_K) * GRAM_K)


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Tables of a batch that depend on shapes only. offsets: the columns of a problem that are places in buffers; lengths:
    sizes of those buffers, in elements."""

    tables: dict[str, torch.Tensor]
    offsets: list[dict[str, int]]
    lengths: dict[str, int]


def make_items(shapes: Sequence[tuple[int, int, int]], block: int, split: bool, device: torch.device) -> Items:
    """shapes: (N, K, r) by problem."""
    size, is_wide = SIZES[block], block > WIDE
    BG, BT, TM = min(GRAM_R, block), min(GRAM_R, block), TAIL_M
    if is_wide:
        BG, BT, TM = block, WIDE_TAIL_R, WIDE_TAIL_M
    rows: dict[str, list[int]] = {name: [] for name in ("split", "gram", "fold", "cross", "tail", "finish", "bits")}
    ranges: list[int] = []
    at = dict.fromkeys(("rows", "split", "inverses", "gram", "G", "parts"), 0)
    offsets = []
    for p, (N, K, r) in enumerate(shapes):
        R, Kp = cdiv(r, block) * block, cdiv(K, 16) * 16
        offsets.append({**at, "R": R, "Kp": Kp})
        own = offsets[-1]
        if split:
            for row in range(R):
                rows["split"] += (p, row)
        gram = _gram_chunk(K, r)
        pieces, place = cdiv(K, gram), 0
        for first in range(0, r, BG):
            for col in range(first, r, BG):
                for chunk, k in enumerate(range(0, K, gram)):
                    rows["gram"] += (p, first, col, k, min(k + gram, K), place + chunk)
                if is_wide:
                    for i, j in itertools.product(range(0, BG, WIDE_FOLD_R), repeat=2):
                        rows["fold"] += (p, first + i, col + j, pieces, place)
                    place += pieces  # blocks lie one after the other
                else:
                    rows["fold"] += (p, first, col, pieces)
        wanted = cdiv(PROGRAMS, cdiv(N, size.m) * cdiv(r, block))
        chunk_k = cdiv(cdiv(K, min(wanted, cdiv(K, SHORTEST_K))), size.k) * size.k
        chunk_k = min(chunk_k, size.most_k)
        blocks, chunks, tails = cdiv(r, block), cdiv(K, chunk_k), cdiv(r, BT)
        own |= {"blocks": blocks, "chunks": chunks, "steps": chunk_k // size.k}
        for row in range(0, N, size.m):
            for number in range(blocks):
                for chunk in range(chunks):
                    end = min((chunk + 1) * chunk_k, K)
                    rows["cross"] += (p, row, number * block, chunk * chunk_k, end, number * chunks + chunk)
        for row in range(0, N, TM):
            for number in reversed(range(tails)):  # the longest first
                rows["tail"] += (p, row, number * BT, blocks * chunks + number)
        for row in range(0, N, size.finish_m):
            rows["finish"] += (p, row, blocks * chunks, blocks * chunks + tails)
        ranges.append(len(rows["bits"]) // 3)
        for kind, count in enumerate((r * K, N * r, 8 * N)):
            if kind == 2:
                ranges.append(len(rows["bits"]) // 3)
            for first in range(0, count, FINGERPRINT):
                rows["bits"] += (p, kind, first)
        ranges.append(len(rows["bits"]) // 3)
        at["rows"] += N
        at["split"] += 2 * R * Kp if split else 0
        at["inverses"] += R
        at["gram"] += place * BG * BG if is_wide else pieces * R * R
        at["G"] += 2 * R * R if is_wide else R * R
        at["parts"] += (blocks * chunks + tails) * N
    widths = {"split": 2, "gram": 6, "fold": 5 if is_wide else 4, "cross": 6, "tail": 4, "finish": 4, "bits": 3}
    tables = {name: device_table(rows[name], torch.int32, device).view(-1, width) for name, width in widths.items()}
    tables["ranges"] = device_table(ranges, torch.int32, device).view(-1, 3)
    return Items(tables, offsets, at)


def device_table(values: list[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The values as a tensor on the device; the host does not wait for the copy."""
    table = torch.tensor(values, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
