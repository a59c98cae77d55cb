"""Importance correction between sampler and trainer: TRL's own ratios and metrics, and what a run does with them."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_rollouts import four_prompts, job, of_job, tree
from test_training import train

from packlora.data.encode import Sample
from packlora.rl.config import RolloutConfig
from packlora.rl.correction import corrections, told_of

LENGTHS = (5, 9, 2, 7)
MOST = 1.3


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return four_prompts(tmp_path)


def of_trl(mode: str, known: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    """Ratios and metrics by the blocks of the installed GRPOTrainer that compute them."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    module = ast.parse((Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text())
    condition = "self.use_vllm and self.vllm_importance_sampling_correction"
    blocks = [node for node in ast.walk(module) if isinstance(node, ast.If) and ast.unparse(node.test) == condition]
    own = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=None, vllm_importance_sampling_clip_max=MOST,
        accelerator=SimpleNamespace(gather=lambda value: value), _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    known = known | {
        "self": own, "torch": torch, "math": math, "nanmin": torch.min, "nanmax": torch.max, "tool_mask": None,
        "mode": "train", "device": "cpu",
    }  # fmt: skip
    for name in ("logps_diff", "min_importance_sampling_ratio"):
        (block,) = [one for one in blocks if any(f"{name} =" in ast.unparse(line) for line in one.body)]
        exec(compile(ast.Module([block], []), "grpo_trainer.py", "exec"), known)
    told = {name: values[0] for name, values in own._metrics["train"].items()}
    return known["vllm_importance_sampling_ratio"], told


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_ratios_and_their_metrics_are_those_of_trl(mode: str) -> None:
    draw = np.random.default_rng(3)
    trainer_NT = -1 - 2 * draw.random((len(LENGTHS), max(LENGTHS)))
    sampler_NT = trainer_NT + 0.25 * draw.standard_normal(trainer_NT.shape)
    mask_NT = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    wanted, metrics = of_trl(
        mode,
        {
            "old_per_token_logps": torch.from_numpy(trainer_NT), "sampling_per_token_logps": torch.from_numpy(sampler_NT),
            "completion_mask": torch.from_numpy(mask_NT).long(),
        },
    )  # fmt: skip
    config = RolloutConfig(reward="a.py:f", importance_sampling_mode=mode, importance_sampling_clip_max=MOST)
    batch = []
    for n, length in enumerate(LENGTHS):
        columns = corrections(trainer_NT[n, :length].tolist(), sampler_NT[n, :length].tolist(), config)
        own = wanted[n, 0] if mode.startswith("sequence") else wanted[n, :length]
        torch.testing.assert_close(torch.from_numpy(np.asarray(columns["correction"])), own, rtol=1e-10, atol=0)
        batch.append(Sample(np.zeros(length + 1, np.int32), np.arange(length + 1) > 0, columns=columns))
    told = told_of(batch)
    assert len(told) == 3
    for name, value in told.items():
        assert value == pytest.approx(metrics[name], rel=1e-10), name
    assert told["sampling/importance_sampling_ratio/max"] <= MOST


def test_a_run_corrects_by_what_is_in_the_file_and_goes_on_from_one_without(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    """The second step is taken again, from files in which tokens are twice as likely for the trainer as for the sampler."""
    most = {"capped": MOST, "free": 3.0, "off": None, "old": 3.0}
    jobs = [job(name, files, max_steps=2, max_grad_norm=1e9) for name in most]
    for own in jobs:
        own["rollout"]["importance_sampling_clip_max"] = most[own["name"]]
    asked = tree(tiny_base("llama"), tmp_path / "out", *jobs)
    train(asked)
    first = {name: of_job(tmp_path / "out", name)[-1] for name in most}
    for name, line in first.items():
        assert line["grad_norm"] == pytest.approx(first["off"]["grad_norm"], rel=1e-4)
        for part in ("min", "mean", "max") if name != "off" else ():
            assert line[f"sampling/importance_sampling_ratio/{part}"] == pytest.approx(1, abs=1e-4)
    for name in most:
        file = tmp_path / "out" / name / "rollouts" / "step-2.json"
        kept = json.loads(file.read_text())
        for one in kept["completions"]:
            one["sampled"] = [value - math.log(2) for value in one["logprobs"]]
            for key in ("sampled", "entropy") if name == "old" else ():
                del one[key]
        file.write_text(json.dumps(kept))
    train(asked, resume=True, resume_from=["1"])
    again = {name: of_job(tmp_path / "out", name)[-1] for name in most}
    for name, factor in {"capped": MOST, "free": 2.0, "off": 1.0, "old": 1.0}.items():
        assert again[name]["step"] == 2
        assert again[name]["grad_norm"] == pytest.approx(factor * first["off"]["grad_norm"], rel=1e-5), name
        assert again[name].get("sampling/importance_sampling_ratio/mean") == (
            None if name in ("off", "old") else pytest.approx(factor, rel=1e-12)
        )
    assert "entropy" in again["off"] and "entropy" not in again["old"]
