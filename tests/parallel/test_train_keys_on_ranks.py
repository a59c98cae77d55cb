"""Other optimizers than AdamW, halves that are trained alone, and streams, on several processes: what one device gives, broken
off or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import rows_into
from ranks import Ranks
from test_replicas import on_ranks
from test_training import adapter, config, distance, steps, train

Groups = Callable[[int], Ranks]
ADAPTER = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1}
SGD = {"optim": "sgd", "learning_rate": 0.5, "weight_decay": 0.1, "neftune_noise_alpha": 5.0, "logging_steps": 2}


@pytest.fixture(scope="module")
def tree(tiny_base: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("optims")
    rows = rows_into(folder)
    olora = {"r": 3, "lora_dropout": 0.0, "init_lora_weights": "olora"}
    train(config(tiny_base(), folder / "first", rows, [{"name": "half", "adapter": olora, "train": {"max_steps": 1}}]))
    halved = {"init_from": str(folder / "first" / "half")}
    jobs = [
        {"name": "sgd", "adapter": ADAPTER, "train": SGD | {"global_batch_size": 3, "max_steps": 4}},
        {"name": "half", "adapter": halved, "train": {"weight_decay": 0.2, "learning_rate": 1e-2, "max_steps": 4}},
        {
            "name": "stream", "adapter": ADAPTER, "train": {"global_batch_size": 2, "max_steps": 4, "learning_rate": 1e-2},
            "data": {"path": rows("stream", 5, seed=3), "streaming": True, "truncate": "drop", "on_bad_row": "skip"},
        },
        {"name": "fact", "adapter": ADAPTER, "train": {"global_batch_size": 4, "optim": "adafactor", "max_steps": 3}},
    ]  # fmt: skip
    return config(tiny_base(), folder / "whole", rows, jobs, dtype="float64", max_tokens_per_microbatch=70)


@pytest.fixture(scope="module")
def whole(tree: dict[str, Any]) -> Path:
    train(tree)
    return Path(tree["output_dir"])


@pytest.mark.parametrize(
    ("parallel", "jobs"),
    [
        ({"devices_per_job": 2}, 4),
        pytest.param({"devices_per_job": 1}, 4, marks=pytest.mark.soak),
        ({"tensor": 2}, 3),
        pytest.param({"pipeline": 2}, 3, marks=pytest.mark.soak),
    ],
)
def test_two_processes_give_what_one_device_gives(
    parallel: dict[str, Any], jobs: int, tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    asked = {**tree, "jobs": tree["jobs"][:jobs], "output_dir": str(tmp_path / "out"), "parallel": parallel}
    ranks(2).run(on_ranks, asked, {"max_steps": 2})
    assert [status for status, *_ in ranks(2).run(on_ranks, asked, {"resume": True})] == ["done"] * 2
    names = [job["name"] for job in asked["jobs"]]
    for name in names:
        assert distance(adapter(tmp_path / "out", name), adapter(whole, name)) <= 1e-10, name
    ours, theirs = (
        {(line["job"], line["step"]): line["loss"] for line in steps(out)} for out in (tmp_path / "out", whole)
    )
    assert ours == pytest.approx({key: loss for key, loss in theirs.items() if key[0] in names})
    assert {step for name, step in ours if name == "sgd"} == {2, 4}


@pytest.mark.parametrize("key", ["tensor", "pipeline"])
def test_an_optimizer_that_takes_no_slices_is_refused_there(key: str, tree: dict[str, Any]) -> None:
    (said, *_) = on_ranks(0, {**tree, "parallel": {key: 2}}, {})
    assert f"job 'fact' has train.optim: adafactor, which parallel.{key} does not take; use one of adamw_torch" in said
