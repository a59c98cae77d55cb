"""Every layout of three and four processes on as many GPUs: with every kind of job the numbers of one GPU.

pytest tests/gpu/test_four_gpus.py -n 3 --dist worksteal
FOUR_ON=cpu pytest tests/gpu/test_four_gpus.py      # the same table on processes of a CPU

Layouts and jobs are those of test_placement; those of two processes are in test_two_gpus.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from test_placement import (
    BOUND,
    EXPERT_LAYOUTS,
    LARGER,
    LARGER_EXPERTS,
    LAYOUTS,
    check,
    dense_run,
    routed_run,
)
from test_two_gpus import meets

DEVICE = "cuda" if torch.cuda.device_count() > 3 else os.environ.get("FOUR_ON", "")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICE, reason="needs four GPUs")]
Groups = Callable[[int], Ranks]
Tree = dict[str, Any]
SECONDS = 90.0
"""After which a call of the processes is given up."""


def many(*tables: dict[str, tuple[int, Tree]]) -> dict[str, tuple[int, Tree]]:
    """Layouts of three and four processes."""
    return {name: own for table in tables for name, own in table.items() if own[0] in (3, 4)}


DENSE, EXPERTS = many(LAYOUTS, LARGER), many(EXPERT_LAYOUTS, LARGER_EXPERTS)


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    """Processes, each with a GPU, by their number; no case is charged with their start."""
    made: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in made:
            made[size] = Ranks(size, DEVICE)
            assert made[size].run(meets, DEVICE) == [size * (size + 1) / 2] * size
            made[size].run = partial(made[size].run, seconds=SECONDS)  # type: ignore[method-assign]
        return made[size]

    yield of
    for group in made.values():
        group.close()


@pytest.fixture(scope="module")
def dense(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return dense_run(tmp_path_factory.mktemp("dense"), tokenizer, DEVICE)


@pytest.fixture(scope="module")
def routed(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return routed_run(tmp_path_factory.mktemp("routed"), tokenizer, DEVICE)


@pytest.mark.parametrize("name", DENSE)
def test_a_layout_of_more_than_two_gives_the_numbers_of_one_gpu(
    name: str, dense: Tree, groups: Groups, tmp_path: Path
) -> None:
    """Stopped after a step, and gone on with on the same layout from its checkpoint."""
    found = check([DENSE[name], DENSE[name]], dense, groups, tmp_path / "out")
    assert max(found.values()) < BOUND, sorted(found.items(), key=lambda own: -own[1])[:9]


@pytest.mark.parametrize("name", EXPERTS)
def test_a_layout_of_experts_on_more_than_two_gives_the_numbers_of_one_gpu(
    name: str, routed: Tree, groups: Groups, tmp_path: Path
) -> None:
    found = check([EXPERTS[name], EXPERTS[name]], routed, groups, tmp_path / "out")
    assert max(found.values()) < BOUND, sorted(found.items(), key=lambda own: -own[1])[:9]
