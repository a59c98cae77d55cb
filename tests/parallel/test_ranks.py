"""The processes that parallel tests run in: what they answer, and that nothing is waited for in vain."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, Ranks


def total(rank: int, factor: float) -> float:
    found = torch.tensor([factor * (rank + 1)], dtype=torch.float64)
    dist.all_reduce(found)
    return float(found)


def one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("of rank 1")
    dist.barrier()


def one_dies(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_answers(size: int, ranks: Callable[[int], Ranks]) -> None:
    assert ranks(size).run(total, 0.5) == [0.5 * sum(range(1, size + 1))] * size


@pytest.mark.parametrize(
    ("function", "says"), [(one_raises, "rank 1: .*ValueError: of rank 1"), (one_dies, "rank 1: .*7")]
)
def test_one_that_fails_fails_the_call_and_not_the_next(
    function: Callable[[int], None], says: str, ranks: Callable[[int], Ranks]
) -> None:
    with pytest.raises(RankFailed, match=f"(?s){says}"):
        ranks(2).run(function)
    assert ranks(2).run(total, 1.0) == [3.0, 3.0]
