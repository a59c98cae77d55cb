"""Every layout of three and four processes on as many GPUs: with every kind of job the numbers of one GPU.

pytest tests/gpu/test_four_gpus.py -n 3 --dist worksteal -v
TWO_ON=cpu pytest tests/gpu/test_four_gpus.py      # the same table on processes of a CPU

Layouts and jobs are those of test_placement, runs on one GPU those of test_two_gpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_two_gpus
import torch
from ranks import Ranks
from test_placement import BOUND, EXPERT_LAYOUTS, LARGER, LARGER_EXPERTS, LAYOUTS, check
from test_two_gpus import DEVICE, Groups, meets

pytestmark = pytest.mark.skipif(DEVICE != "cpu" and torch.cuda.device_count() < 4, reason="needs four GPUs")
SECONDS = 90.0
"""After which a call of the processes is given up."""
dense, routed = test_two_gpus.dense, test_two_gpus.routed
CASES = [
    pytest.param(kind, layout, id=f"{kind} {name}")
    for kind, tables in (("dense", (LAYOUTS, LARGER)), ("routed", (EXPERT_LAYOUTS, LARGER_EXPERTS)))
    for table in tables
    for name, layout in table.items()
    if layout[0] in (3, 4)
]
"""Kinds of model, and layouts of three and four processes."""


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


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_layout_of_more_than_two_gives_the_numbers_of_one_gpu(
    kind: str, layout: Any, groups: Groups, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Stopped after a step, and gone on with on the same layout from its checkpoint."""
    found = check([layout, layout], request.getfixturevalue(kind), groups, tmp_path / "out")
    assert max(found.values()) < BOUND, sorted(found.items(), key=lambda own: -own[1])[:9]
