"""A healthy job beside one that fails: its bits are those that it has beside a healthy one, also after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import change_steps
from test_training import config, same_bits, train

from packlora.engine.passes import SingleDevice
from packlora.runtime.job import Job

Rows = Callable[..., str]
Base = Callable[..., str]

QV = ["q_proj", "v_proj"]
UP_DOWN = r".*\.(up|down)_proj"
PAIRS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "all-linear beside q, v": ("llama", "float32", {"r": 4}, {"r": 4, "target_modules": QV}),
    "DoRA on up, down beside dropout": (
        "llama", "float32", {"r": 3, "use_dora": True, "target_modules": UP_DOWN}, {"r": 4, "lora_dropout": 0.1},
    ),
    "DoRA with dropout beside DoRA": (
        "qwen2", "float64", {"r": 4, "use_dora": True, "lora_dropout": 0.2}, {"r": 2, "use_dora": True, "target_modules": QV},
    ),
    "biases": (
        "qwen2", "bfloat16", {"r": 4, "bias": "all", "target_modules": ["q_proj"]},
        {"r": 4, "bias": "all", "target_modules": ["v_proj"]},
    ),
}  # fmt: skip
"""Family, dtype, the adapter that fails and the one beside it."""


def failing(job: Job, step: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A step whose loss is not finite, of job "bad" after its first one."""
    numbers = step()
    if job.name == "bad" and job.step == 1:
        numbers[0] = math.nan
    return numbers


@pytest.mark.parametrize(
    "pair",
    [name if name == "DoRA with dropout beside DoRA" else pytest.param(name, marks=pytest.mark.soak) for name in PAIRS],
)
def test_a_job_has_the_same_bits_beside_a_healthy_a_failing_and_a_failed_job(
    pair: str, tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbour fails at its second step, or never. The run that it fails in is stopped after the third and resumed: for
    what is left the neighbour has failed from the start."""
    family, dtype, bad, good = PAIRS[pair]
    jobs: list[dict[str, Any]] = [
        {"name": "bad", "adapter": bad, "train": {"global_batch_size": 2}},
        {"name": "good", "adapter": good, "train": {"global_batch_size": 2, "learning_rate": 3e-3}},
    ]
    for job in jobs:
        rows = write_rows(job["name"], 10, len(job["name"]))
        job["data"] = {"path": rows, "eval_path": rows}
    tree = config(tiny_base(family), tmp_path / "healthy", write_rows, jobs, dtype=dtype, eval_every=2, save_every=1)
    assert train(tree).exit_code == 0
    change_steps(monkeypatch, failing)
    broken = {**tree, "output_dir": str(tmp_path / "failing")}
    assert train(broken, max_steps=3).jobs["bad"].failure
    assert train(broken, resume=True).jobs["good"].status == "done"
    same_bits(tmp_path / "healthy", tmp_path / "failing", [{"name": "good"}])
    want, found = evaluations(tmp_path / "healthy"), evaluations(tmp_path / "failing")
    assert want == {step: found[step] for step in want}


def evaluations(out: Path) -> dict[int, float]:
    """Held-out losses of the healthy job by step."""
    lines = [json.loads(line) for line in (out / "evals.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval_loss"] for line in lines if line["job"] == "good"}


def test_a_held_out_loss_does_not_depend_on_which_other_jobs_are_evaluated(
    tiny_base: Base, write_rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every microbatch of an evaluation is one job's."""
    owners: list[set[int]] = []
    original = SingleDevice.evaluate

    def noted(executor: Any, parts: Any, *how: Any) -> Any:
        owners.append({part.adapter for part in parts})
        return original(executor, parts, *how)

    monkeypatch.setattr(SingleDevice, "evaluate", noted)
    jobs: list[dict[str, Any]] = [
        {"name": name, "data": {"path": (rows := write_rows(name, 3)), "eval_path": rows}, "adapter": {"r": 2}}
        for name in ("one", "two")
    ]
    train(config(tiny_base("shallow"), tmp_path / "out", write_rows, jobs, max_tokens_per_microbatch=2048), max_steps=1)
    assert owners == [{0}, {1}] * 2  # before the first step and after the last
