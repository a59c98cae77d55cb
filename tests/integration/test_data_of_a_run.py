"""Data from several places through a whole run: what was read, left out and drawn is in run.json, and so at --resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packlora
from packlora.errors import InputError


def test_a_run_says_what_it_read_and_goes_on_with_the_same_samples(
    tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path
) -> None:
    one, two = write_rows("p-one", 6, 1), write_rows("p-two", 4, 2)
    with Path(two).open("a") as file:
        file.write(
            '{"prompt": "a"}\n{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}\n'
        )
    held = tmp_path / "held.csv"
    held.write_text("prompt,completion\nthe fox,over\n")

    def tree(weight: float = 1.0, steps: int = 2) -> dict[str, Any]:
        mixture = [{"path": one, "weight": 3.0}, {"path": two, "weight": weight}]
        return {
            "base_model": tiny_base("shallow"), "output_dir": str(tmp_path / "out"), "save_every": 1,
            "defaults": {"adapter": {"r": 2}, "data": {"on_bad_row": "skip", "eval_path": [str(held)]}},
            "jobs": [
                {"name": "files", "data": {"path": str(tmp_path / "p-*.jsonl")}, "train": {"max_steps": steps}},
                {"name": "mixture", "data": {"path": mixture}, "train": {"max_steps": steps, "global_batch_size": 4}},
            ],
        }  # fmt: skip

    packlora.train(tree(), max_steps=1)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    for name in ("files", "mixture"):
        said = record["jobs"][name]
        assert (said["samples"], said["eval_samples"], said["skipped"]) == (11, 1, 1)
        (row,) = said["skipped_rows"]
        assert row.startswith(f"{two}, line 5: found prompt without a completion")
        warned = "\n".join(text for text in record["warnings"] if repr(name) in text)
        assert "1 row was left out by on_bad_row, the first: " in warned and "ShareGPT's" in warned
    assert f"job 'mixture': {one} gives 8 of 11 samples, and has 6" in record["warnings"]
    assert f"job 'mixture': {two} gives 3 of 11 samples, and has 5" in record["warnings"]
    with pytest.raises(InputError, match=r"job 'mixture' data\.path changed"):
        packlora.train(tree(2.0), resume=True)
    assert packlora.train(tree(), resume=True).status == "done"
    again = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [job["data_hash"] for job in again["jobs"].values()] == [job["data_hash"] for job in record["jobs"].values()]
    with Path(one).open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(InputError, match="its data has changed"):
        packlora.train(tree(), resume=True)
