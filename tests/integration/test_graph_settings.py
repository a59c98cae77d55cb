"""`cuda_graphs` in a run file: what is asked for and cannot be is told before anything is written, and it may change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import packlora
from packlora.cli import app
from packlora.runtime.checkpoint import steps


@pytest.fixture
def tree(tiny_base: Callable[..., str], write_rows: Callable[..., str], tmp_path: Path) -> dict[str, Any]:
    return {
        "base_model": tiny_base(), "output_dir": str(tmp_path / "out"), "device": "cpu", "save_every": 1,
        "jobs": [{"name": "a", "data": {"path": write_rows("a", 4)}, "adapter": {"r": 2}, "train": {"global_batch_size": 2}}],
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_graphs_that_cannot_be_are_bad_input_and_leave_no_trace(
    changes: dict[str, Any], tree: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**tree, **changes, "cuda_graphs": True}))  # which is YAML
    result = CliRunner().invoke(app, ["train", str(file)])
    assert result.exit_code == 2 and "cuda_graphs: true cannot be met: there are none on cpu" in result.stderr
    assert not Path(tree["output_dir"]).exists()
    assert packlora.train(tree).status == "done"


def test_a_run_that_is_sent_back_loses_no_checkpoint_where_its_graphs_cannot_be(tree: dict[str, Any]) -> None:
    packlora.train(tree)
    folder = Path(tree["output_dir"], "a")
    before, record = steps(folder), (folder.parent / "run.json").read_bytes()
    with pytest.raises(packlora.InputError, match="there are none on cpu"):
        packlora.train({**tree, "cuda_graphs": True}, resume=True, resume_from=["a=1"])
    assert steps(folder) == before and (folder.parent / "run.json").read_bytes() == record


def test_graphs_may_be_left_off_when_a_run_goes_on(tree: dict[str, Any]) -> None:
    packlora.train(tree, max_steps=1)
    assert packlora.train({**tree, "cuda_graphs": False}, resume=True).status == "done"
