"""Jobs with preferences on several processes, replicas or a base in parts: what one device gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from seeds import SOAK
from test_preference import alike, jobs, mixed  # noqa: F401 a fixture
from test_replicas import on_ranks
from test_training import steps, train

from packlora.config import Run
from packlora.errors import InputError
from packlora.runtime.prepare import prepare

LAYOUTS = ({"devices_per_job": 2}, {"tensor": 2, "sequence_parallel": True}, {"shard_base": True})


def test_two_processes_give_what_one_device_gives(
    tiny_base: Callable[..., str],
    jobs: list[dict[str, Any]],  # noqa: F811
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
) -> None:
    tree = mixed(tiny_base("llama"), tmp_path / "whole", jobs, dtype="float64")
    train(tree)
    keys = ("loss", "rewards/margins", "logps/chosen", "kl")
    for parallel in LAYOUTS if SOAK else LAYOUTS[:2]:
        out = tmp_path / "-".join(parallel)
        told = ranks(2).run(on_ranks, tree | {"output_dir": str(out), "parallel": parallel}, {})
        assert [status for status, _, _ in told] == ["done", "done"], told
        lines = [json.loads(line) for line in (out / "microbatches.jsonl").read_text().splitlines()]
        assert {line["rank"] for line in lines} == ({0} if "tensor" in parallel else {0, 1})
        for job in tree["jobs"]:
            alike(out, tmp_path / "whole", job["name"])
        ours, theirs = (
            {(line["job"], line["step"], key): line[key] for line in steps(folder) for key in keys if key in line}
            for folder in (out, tmp_path / "whole")
        )
        assert {key for _, _, key in ours} == {*keys}
        assert ours == pytest.approx(theirs, rel=1e-10), parallel


def test_a_pipeline_is_refused_by_name(
    tiny_base: Callable[..., str],
    jobs: list[dict[str, Any]],  # noqa: F811
    tmp_path: Path,
) -> None:
    tree = mixed(tiny_base("llama"), tmp_path / "out", jobs, parallel={"pipeline": 2})
    with pytest.raises(InputError, match=r"job 'mixed': train\.trainer is dpo, .*; leave parallel\.pipeline out"):
        prepare(Run.model_validate(tree))
