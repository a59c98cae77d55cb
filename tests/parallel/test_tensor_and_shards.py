"""Layers that are cut and rows that are shared in one run, and several sharded bases side by side: what one device gives,
broken off, gone on with on other layouts, and with a process that fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from test_replicas import heard, on_ranks
from test_tensor_train import five_jobs, same
from test_training import train
from torch.distributed.tensor import DTensor

import packlora
from packlora.base.load import read_model
from packlora.engine.passes import SingleDevice
from packlora.parallel import sharded
from packlora.parallel.sharded import Shards

Groups = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def tree(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Five different jobs, LoRA and DoRA with dropout and biases; of two steps each, two of them with held-out data."""
    out = five_jobs(tmp_path_factory.mktemp("both"), tokenizer, vocab_size=323)
    for job in out["jobs"]:
        job["train"] = job["train"] | {"max_steps": 2}
    return out | {"save_every": 1}


@pytest.fixture(scope="module")
def whole(tree: dict[str, Any]) -> Path:
    """The run on one device."""
    train(tree)
    return Path(tree["output_dir"])


def held(rank: int, tree: dict[str, Any], options: dict[str, Any]) -> tuple[str, float]:
    """A run, and the part of the base model that this process held of its weights in the end."""
    parts, filled = [], Shards._fill

    def fill(self: Shards, *args: Any) -> None:
        filled(self, *args)
        parts.append(
            sum({id(p): p.to_local().numel() for p in self.model.parameters() if isinstance(p, DTensor)}.values())
        )

    with mock.patch.object(Shards, "_fill", fill):
        status = packlora.train(tree, **options).status
    whole = read_model(tree["base_model"], None, torch.float32).parameters()
    return status, parts[-1] / sum(parameter.numel() for parameter in whole)


def test_four_processes_give_what_one_device_gives(
    tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    """Stopped after some steps and gone on with on the same layout; no process holds more than its quarter."""
    parallel = {"tensor": 2, "shard_base": True, "offload_base": True}
    asked = {**tree, "output_dir": str(tmp_path / "out"), "gradient_checkpointing": True, "parallel": parallel}
    assert ranks(4).run(heard, asked, "", 3, {})[0][0] == "interrupted"
    told = ranks(4).run(held, asked, {"resume": True})
    assert [status for status, _ in told] == ["done"] * 4
    assert max(part for _, part in told) < 1.1 / 4
    same(tmp_path / "out", whole)
    record = json.loads((tmp_path / "out" / "run.json").read_text())["schedule"]["layout"]
    assert (record["tensor"], record["tensor"] * record["shard"], len(record["groups"])) == (2, 4, 1)


def failing(rank: int, tree: dict[str, Any]) -> str:
    """A run in which the third process fails in a backward, where others wait for its rows and for its sums."""
    original, count = SingleDevice.backward, 0

    def backward(self: SingleDevice, pending: Any) -> Any:
        nonlocal count
        count += 1
        if rank == 2 and count == 2:
            raise ValueError("a fault")
        return original(self, pending)

    with mock.patch.object(SingleDevice, "backward", backward):
        try:
            return packlora.train(tree).status
        except (packlora.ProcessError, ValueError) as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.soak
def test_a_process_that_fails_ends_the_run_on_all(tree: dict[str, Any], ranks: Groups, tmp_path: Path) -> None:
    parallel = {"tensor": 2, "shard_base": True, "timeout_s": 5}
    asked = {**tree, "jobs": tree["jobs"][:1], "output_dir": str(tmp_path / "out"), "parallel": parallel}
    group = Ranks(4)  # of which processes may still wait
    try:
        told = group.run(failing, asked, seconds=60)
    finally:
        group.close()
    assert told[2] == "ValueError: a fault"
    assert all(text.startswith("ProcessError: process") for rank, text in enumerate(told) if rank != 2), told
    assert any("process 2 of 4 failed: ValueError: a fault" in text for text in told), told


def unsliced(rank: int, tree: dict[str, Any]) -> str:
    """A run whose processes read the rows of the first slice, whichever is theirs."""
    with mock.patch.object(sharded, "rows_of", lambda part, rows: (rows, *part[1:])):
        return on_ranks(rank, tree, {})[0]


@pytest.mark.soak
def test_wrong_rows_of_slices_are_refused(tree: dict[str, Any], ranks: Groups, tmp_path: Path) -> None:
    asked = {**tree, "output_dir": str(tmp_path / "out"), "parallel": {"tensor": 2, "shard_base": True}}
    assert all("its own logits differ by" in text for text in ranks(4).run(unsliced, asked))
