"""`packlora serve` on two GPUs as torchrun starts it: each model on a GPU of its own, with the numbers of one GPU.

pytest tests/gpu/test_serve_two_gpus.py
TWO_ON=cpu pytest tests/gpu/test_serve_two_gpus.py        # the same on two processes of a CPU
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_ranks import NAME, Process, client_of, story

from packlora.serve.command import listening

DEVICE = "cuda" if torch.cuda.device_count() > 1 else os.environ.get("TWO_ON", "")
pytestmark = pytest.mark.skipif(not DEVICE, reason="needs two GPUs")
pytest.importorskip("tinker")
DTYPES = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest relative distance of losses."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_gpus_train_and_sample_as_one_does_and_a_killed_rank_ends_both(
    dtype: str, tiny_base: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    found: dict[int, dict[str, Any]] = {}
    for ranks in (1, 2):
        free = listening("127.0.0.1", 0)
        port = free.getsockname()[1]
        free.close()
        words = ["--base", f"{NAME}={tiny_base('llama')}", "--state", str(tmp_path / str(ranks))]
        words += ["--set", f"device={DEVICE}", "--set", f"dtype={dtype}"]
        service = Process(None, ranks, words, port, tmp_path / f"said {ranks}")
        try:
            service.wait()
            with client_of(service.url) as client:
                found[ranks] = story(client)
                standing = service.status
            if ranks == 2:
                service.kill(1)
                assert service.process.wait(60) == 1 and "rank 1 (process " in service.said
        finally:
            service.end()
    assert [own["steps"] for own in standing["training"]] == [12, 12]
    for rank, line in enumerate(standing["ranks"]):
        assert f"{DEVICE}:{rank}" in line or DEVICE == "cpu"
        assert ": 1 models, load " in line
        assert int(line.rpartition(" ")[2]) > 0, "it has trained"
    np.testing.assert_allclose(found[2]["losses"], found[1]["losses"], rtol=DTYPES[dtype])
    assert found[2]["losses"][-1] < 0.5 * found[2]["losses"][0]
    for one, two in zip(found[1]["sampled"], found[2]["sampled"], strict=True):
        assert abs(one[1][0] - two[1][0]) < 0.1 or one[0][0] != two[0][0]
