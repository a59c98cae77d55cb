"""Models whose configurations name many experts."""

from __future__ import annotations

from pathlib import Path

import transformers
from conftest import TINY

from packlora.base.load import load_skeleton
from packlora.config import Run


def test_as_many_experts_as_doge_s_configuration_names_are_no_reason_to_refuse_it(tmp_path: Path) -> None:
    config = transformers.DogeConfig(**TINY)
    assert config.num_experts == 16384
    config.save_pretrained(tmp_path)
    tree = {"base_model": str(tmp_path), "output_dir": "x", "jobs": [{"name": "x", "data": {"path": "x"}}]}
    assert load_skeleton(Run.model_validate(tree)).config.model_type == "doge"
