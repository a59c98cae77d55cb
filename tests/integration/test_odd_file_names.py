"""Data files whose names are no text, or move a terminal: train, plan and eval read them by a pattern, and speak of them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from terminals import Tty, is_tame
from test_training import Base

import packlora
from packlora import cli

NAMES = [b"a\xff.jsonl", b"b\x1b]0;pwned\x07.jsonl", b"c\x1b[2J\rd.jsonl", "e\u202ef.jsonl".encode(), b"g\ng.jsonl"]


def test_names_of_files_reach_neither_a_terminal_nor_stop_a_run(
    tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    for name in NAMES:
        rows = [{"instruction": "the fox", "output": "dog"}] * 2
        (data / os.fsdecode(name)).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                "base_model": tiny_base("llama"), "output_dir": str(out), "device": "cpu", "max_tokens_per_microbatch": 96,
                "jobs": [{"name": "a", "data": {"path": f"{data}/*.jsonl"}, "train": {"max_steps": 1, "global_batch_size": 2}}],
            }
        )
    )  # fmt: skip
    said, told = Tty(), Tty()
    monkeypatch.setattr(sys, "stdout", said)
    monkeypatch.setattr(sys, "stderr", told)
    for words in (["train", str(tmp_path / "run.yaml")], ["plan", str(tmp_path / "run.yaml")],
                  ["eval", str(out / "a"), f"{data}/*.jsonl"]):  # fmt: skip
        for stream in (said, told):
            stream.seek(0)
            stream.truncate()
        with pytest.raises(SystemExit) as ended:
            cli.app(words)
        assert not ended.value.code
        text = re.sub(r"\s", "", said.getvalue() + told.getvalue())
        assert is_tame(said.getvalue()) and is_tame(told.getvalue())
        assert "a\\udcff.jsonl" in text and "b\\x1b]0;pwned" in text and "instruction" in text
    warnings = json.loads((out / "run.json").read_text())["warnings"]
    assert sum("a\\udcff.jsonl" in text for text in warnings) == 1
    assert packlora.train(str(tmp_path / "run.yaml"), resume=True).status == "done"
