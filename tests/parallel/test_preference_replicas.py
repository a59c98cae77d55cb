"""Jobs with preferences on replicas: what one device gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from test_preference import alike, jobs, mixed  # noqa: F401 a fixture
from test_replicas import on_ranks
from test_training import steps, train


def test_two_replicas_give_what_one_device_gives(
    tiny_base: Callable[..., str],
    jobs: list[dict[str, Any]],  # noqa: F811
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
) -> None:
    tree = mixed(tiny_base("llama"), tmp_path / "whole", jobs, dtype="float64")
    train(tree)
    asked = tree | {"output_dir": str(tmp_path / "out"), "parallel": {"devices_per_job": 2}}
    told = ranks(2).run(on_ranks, asked, {})
    assert [status for status, _, _ in told] == ["done", "done"], told
    lines = [json.loads(line) for line in (tmp_path / "out" / "microbatches.jsonl").read_text().splitlines()]
    assert {line["rank"] for line in lines} == {0, 1}
    for job in tree["jobs"]:
        name = job["name"]
        alike(tmp_path / "out", tmp_path / "whole", name)
    keys = ("loss", "rewards/margins", "logps/chosen", "kl")
    ours, theirs = (
        {(line["job"], line["step"], key): line[key] for line in steps(tmp_path / name) for key in keys if key in line}
        for name in ("out", "whole")
    )
    assert {key for _, _, key in ours} == {*keys}
    assert ours == pytest.approx(theirs, rel=1e-10)
