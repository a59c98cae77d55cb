"""`packlora train` as torchrun starts it on two GPUs, beside one GPU.

pytest tests/gpu/test_two_gpus.py -n 4
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import rows_into
from test_replicas import same_run
from test_training import config, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
ROOT = Path(__file__).parents[2]
LAYOUTS = [
    {"devices_per_job": 1}, {"devices_per_job": 2}, {"shard_base": True}, {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}, {"shard_base": True, "offload_base": True},
]  # fmt: skip


def torchrun(tree: dict[str, Any], folder: Path, processes: int = 2) -> tuple[int, str]:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "packlora",
        "train", str(file),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=env | {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def tree_of(base: str, folder: Path, **changes: Any) -> dict[str, Any]:
    return config(base, folder / "one", rows_into(folder), max_tokens_per_microbatch=70, device="cuda", **changes)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_two_gpus_give_the_adapters_of_one(parallel: dict[str, Any], tiny_base: Any, tmp_path: Path) -> None:
    tree = tree_of(tiny_base(), tmp_path, dtype="float64")
    train(tree)
    code, said = torchrun({**tree, "output_dir": str(tmp_path / "two"), "parallel": parallel}, tmp_path)
    assert code == 0, said
    same_run(tmp_path / "two", tmp_path / "one", 1e-10)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_half_precision_trains_on_two_gpus(parallel: dict[str, Any], tiny_base: Any, tmp_path: Path) -> None:
    """With the kernels, and graphs where there are any; losses are those of one GPU but for rounding."""
    tree = tree_of(tiny_base(), tmp_path, dtype="bfloat16")
    train(tree)
    code, said = torchrun({**tree, "output_dir": str(tmp_path / "two"), "parallel": parallel}, tmp_path)
    assert code == 0, said
    one, two = (
        {
            (line["job"], line["step"]): line["loss"]
            for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open())
        }
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for key, loss in one.items():
        assert math.isclose(two[key], loss, rel_tol=0.02), (key, two[key], loss)


@pytest.mark.parametrize("quantization", [None, "nf4", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_that_are_kept_on_the_host_are_trained_on_two_gpus(
    family: str, quantization: str | None, tiny_base: Any, tmp_path: Path
) -> None:
    """Also where embedding and output layer are one, and in codes; with the losses of one GPU but for rounding."""
    if quantization is not None:
        pytest.importorskip("bitsandbytes")
    tree = tree_of(tiny_base(family), tmp_path, dtype="float32", quantization=quantization)
    train(tree)
    parallel = {"shard_base": True, "offload_base": True}
    code, said = torchrun({**tree, "output_dir": str(tmp_path / "two"), "parallel": parallel}, tmp_path)
    assert code == 0, said
    same_run(tmp_path / "two", tmp_path / "one", 1e-3)


def test_a_third_process_is_refused_for_want_of_a_gpu(tiny_base: Any, tmp_path: Path) -> None:
    if torch.cuda.device_count() != 2:
        pytest.skip("counts on two GPUs")
    tree = tree_of(tiny_base(), tmp_path, dtype="float64") | {"output_dir": str(tmp_path / "two")}
    code, said = torchrun(tree, tmp_path, processes=3)
    assert code != 0 and "2 usable GPUs" in said, said
