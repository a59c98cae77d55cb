"""plan, doctor and merge through the command line; training is in test_training.py, bad input in test_bad_input.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import packlora
from packlora.cli import app
from packlora.config import Run


@pytest.fixture
def run_file(tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path) -> Path:
    tree: dict[str, Any] = {
        "base_model": tiny_base("llama"), "output_dir": str(tmp_path / "out"), "max_tokens_per_microbatch": 128,
        "jobs": [
            {"name": "one", "data": {"path": write_rows("one", 12, 1)}, "adapter": {"r": 4}, "train": {"max_steps": 5}},
            {"name": "two", "data": {"path": write_rows("two", 9, 2)}, "adapter": {"r": 2, "use_dora": True}},
        ],
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_plan_shows_what_training_then_does_and_trains_nothing(run_file: Path) -> None:
    out = CliRunner().invoke(app, ["plan", str(run_file)], env={"COLUMNS": "200"})
    assert out.exit_code == 0, out.output
    run = Run.model_validate(json.loads(run_file.read_text()))
    assert not Path(run.output_dir).exists()
    result = packlora.train(run)
    lines = (result.output_dir / "microbatches.jsonl").read_text().splitlines()
    assert f"at most 128 tokens: {len(lines)} (greedy" in out.output
    record = json.loads((result.output_dir / "run.json").read_text())
    for name, job in record["jobs"].items():
        row = next(line for line in out.output.splitlines() if line.startswith(name))
        assert f"{job['trainable_parameters'] / 1e6:.2f} M" in row
        assert f" {job['steps']} " in row
    assert "memory on" in out.output


def test_merge_writes_a_plain_model_and_refuses_a_filled_folder(run_file: Path, tmp_path: Path) -> None:
    run = Run.model_validate(json.loads(run_file.read_text()))
    result = packlora.train(run)
    adapter, merged = str(result.jobs["two"].folder), tmp_path / "merged"
    out = CliRunner().invoke(app, ["merge", adapter, str(merged), "--dtype", "bfloat16"])
    assert out.exit_code == 0, out.output
    assert AutoModelForCausalLM.from_pretrained(merged, dtype="auto").dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(merged).eos_token == "</s>"
    again = CliRunner().invoke(app, ["merge", adapter, str(merged)])
    assert again.exit_code == 2
    wrong = CliRunner().invoke(app, ["merge", str(tmp_path), str(tmp_path / "other")])
    assert wrong.exit_code == 2


def test_doctor_names_versions_and_devices_and_finds_nothing_missing() -> None:
    out = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert out.exit_code == 0, out.output
    for expected in (
        torch.__version__.partition("+")[0],
        "peft",
        "transformers",
        "memory",
        "smollm2-135m",
        "can train on",
    ):
        assert expected in out.output
