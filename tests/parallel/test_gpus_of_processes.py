"""Processes of a machine and its GPUs, told by stand-ins for torch.cuda: which GPU a process takes, and that there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import rows_into
from ranks import Ranks
from test_replicas import on_ranks
from test_training import config
from waiting import own_port

from packlora.parallel import join


@pytest.fixture
def own_ranks() -> Iterator[Ranks]:
    """Two processes that this test may take out of their process group."""
    made = Ranks(2)
    yield made
    made.close()


def on_gpus(rank: int, port: int, gpus: list[int], tree: dict[str, Any]) -> tuple[str, int, list[int], list[str]]:
    """A run on machines with so many GPUs, by rank: what it says, its status, GPUs and backends it took."""
    if dist.is_initialized():
        dist.destroy_process_group()
    taken: list[int] = []
    backends: list[str] = []
    join = dist.init_process_group

    def without_nccl(backend: str, **settings: Any) -> None:
        backends.append(backend)
        join("gloo", **settings)

    with (
        mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}),
        mock.patch.object(torch.cuda, "is_available", return_value=gpus[rank] > 0),
        mock.patch.object(torch.cuda, "device_count", return_value=gpus[rank]),
        mock.patch.object(torch.cuda, "set_device", taken.append),
        mock.patch.object(dist, "init_process_group", without_nccl),
    ):
        said, status, _ = on_ranks(rank, tree, {"max_steps": 1})
    return said, status, taken, backends


def test_every_process_needs_a_gpu_and_all_of_them_say_so(tiny_base: Any, own_ranks: Ranks, tmp_path: Path) -> None:
    tree = config(tiny_base(), tmp_path / "out", rows_into(tmp_path))

    def told(gpus: list[int], device: str) -> list[Any]:
        return own_ranks.run(on_gpus, own_port(), gpus, tree | {"device": device})

    nccl = ["cpu:gloo,cuda:nccl"]
    (said, status, taken, backends), other = told([1, 1], "auto")
    assert said == "process 1 of 2: " + (
        "this machine has 1 usable GPU, but 2 processes were started on it, and each needs its own; start 1 "
        "(--nproc-per-node), or set device: cpu"
    )
    assert (status, taken, backends) == (-1, [0], nccl)
    assert other == (said, -1, [], nccl), "the same words, no GPU, and the backend of the others"
    assert not (tmp_path / "out").exists()

    mixed = told([1, 0], "auto")
    assert [one[3] for one in mixed] == [nccl, ["gloo"]]
    assert {one[0] for one in mixed} == {
        "the processes of a run must have the same device: process 0 has cuda, process 1 has cpu"
    }
    assert {one[0] for one in told([1, 1], "cpu")} == {"done"}, "on the CPU nobody needs a GPU"


@pytest.mark.parametrize("local", [0, 1, 7])
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_the_backend_is_that_of_the_machine_and_not_of_the_process(
    local: int, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(join, "_store", lambda _: (dist.HashStore(), 0, 1))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: joined.append(backend))
    join.join(1.0, 1.0)
    assert joined == ["cpu:gloo,cuda:nccl" if gpus else "gloo"]
