"""`packlora tune` on a GPU: sizes of kernels, plans and the output layer are measured, remembered, and train as before.

make gpu
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import packlora
from packlora.config import Run
from packlora.plans import kernel_sizes
from packlora.plans.identity import cache_path
from packlora.runtime.head_cost import known_head
from packlora.runtime.prepare import prepare
from packlora.tune.plans import tune


def test_what_is_measured_is_remembered_and_trains_to_the_same_loss(
    tiny_base: Any, write_rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACKLORA_CACHE", str(tmp_path / "cache"))
    job = {
        "name": "job", "data": {"path": write_rows("job", 40)}, "adapter": {"r": 8, "lora_alpha": 16},
        "train": {"max_steps": 3, "global_batch_size": 4},
    }  # fmt: skip
    tree = {
        "base_model": tiny_base("llama"), "output_dir": str(tmp_path / "out"), "device": "cuda", "dtype": "bfloat16",
        "max_tokens_per_microbatch": 256, "jobs": [job],
    }  # fmt: skip

    def loss(folder: str) -> float:
        packlora.train(tree | {"output_dir": str(tmp_path / folder)})
        *_, last = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return float(json.loads(last)["loss"])

    before, device = loss("before"), torch.device("cuda", 0)
    staged = Run.model_validate(tree | {"parallel": {"pipeline": 2}})
    try:
        measured = tune(staged, device, progress=False, minutes=0.5, budget_s=0.1)
        assert measured and all(item.plan is not None for item in measured), capsys.readouterr().out
        for folder in ("plans", "kernels"):
            assert cache_path(device, folder).exists(), list((tmp_path / "cache").rglob("*"))
        head = known_head(staged, prepare(staged).shape, device)
        assert head is not None and 0 < head < 100
        assert loss("after") == pytest.approx(before, rel=2e-2)
    finally:
        monkeypatch.undo()
        kernel_sizes.forget(device)
