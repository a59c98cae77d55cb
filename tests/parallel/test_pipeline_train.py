"""`packlora.train` with `parallel: {pipeline: N}`: stages train what one device trains, and leave what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import rows_into
from ranks import Ranks
from test_replicas import lines, on_ranks, same_run
from test_tensor_train import BIASED, saved_base
from test_training import JOBS, adapter, config, distance, steps, train

Groups = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def tree(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Five different jobs of different lengths, two of them with held-out data, on a model of five layers."""
    folder = tmp_path_factory.mktemp("pipeline")
    base = saved_base(folder / "base", tokenizer, attention_bias=True, mlp_bias=True, num_hidden_layers=5)
    jobs = [BIASED, *JOBS]
    out = config(base, folder / "whole", rows_into(folder), jobs, dtype="float64", max_tokens_per_microbatch=120)
    for job in out["jobs"][:2]:
        job["data"]["eval_path"] = job["data"]["path"]
    return out | {"eval_every": 2}


@pytest.fixture(scope="module")
def whole(tree: dict[str, Any]) -> Path:
    """The run on one device; all checkpoints are kept."""
    train({**tree, "save_total_limit": None})
    return Path(tree["output_dir"])


def same(out: Path, whole: Path) -> None:
    """What same_run compares, and the fifth job's adapter."""
    same_run(out, whole, 1e-10)
    assert distance(adapter(out, "dora"), adapter(whole, "dora")) <= 1e-10


@pytest.mark.parametrize(("stages", "checkpointing"), [(2, True), (4, False)])
def test_a_run_gives_what_one_device_gives(
    stages: int, checkpointing: bool, tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    parallel = {"pipeline": stages}
    asked = {**tree, "output_dir": str(tmp_path / "out"), "gradient_checkpointing": checkpointing, "parallel": parallel}
    told = ranks(stages).run(on_ranks, asked, {})
    tokens = sum(line["tokens"] for line in steps(whole))
    assert told == [("done", tokens, [job["name"] for job in tree["jobs"]])] * stages
    same(tmp_path / "out", whole)
    record, alone = (json.loads((out / "run.json").read_text()) for out in (tmp_path / "out", whole))
    assert record["schedule"]["layout"]["pipeline"] == stages
    assert (record["jobs"], record["model"]["fingerprint"]) == (alone["jobs"], alone["model"]["fingerprint"])
    ran = lines(tmp_path / "out", "microbatches")
    assert sorted(line["index"] for line in ran) == list(range(len(ran)))
