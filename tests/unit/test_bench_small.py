"""`python -m benchmarks small`: every case is there in every mode, each side counts in its best one, no failure flatters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import small, small_models, small_train
from benchmarks.modes import MODES
from benchmarks.options import Options
from benchmarks.run import run_bench
from benchmarks.small_train import OneShape, Way
from benchmarks.tables import every_mode, result_files
from benchmarks.tables import write as readme
from packlora.data.encode import Sample
from packlora.plans.timing import Timing, Timings

REQUIRED = (
    "compiled_8x06b_2048_vs_peft_best", "compiled_17b_2048_vs_peft_best", "train_06b_tokens_per_s", "train_06b_vs_peft_best",
    "train_8b_vs_peft_best", "worst_wall_vs_peft",
)  # fmt: skip
GPU = Options(torch.device("cuda"))
WALL = {"eager": (9.0, 8.0), "compiled": (4.0, 3.0), "reduce-overhead": (2.0, 2.5)}
"""Of packlora and PEFT."""


def timed_rows() -> list[dict[str, Any]]:
    """As `run` makes them: in every case packlora's best mode takes 2 ms, PEFT's 2.5."""
    rows = []
    for case in (*small_models.model_cases(GPU), *small_models.layer_cases(GPU)):
        own, peer = WALL[case.mode]
        times = {"frozen": 1.0, "packlora": own, "peft_bf16": peer}
        made = {name: Timing(name, [ms / 2], [1.0], wall_ms=[ms]) for name, ms in times.items()}
        row = {"part": case.part, "case": case.label, "of": case.of, "mode": case.mode, "dora": case.dora}
        rows.append({**row, **Timings(made).row(), "compile_s": {}})
    return rows


def trained_row(case: small_train.TrainCase) -> dict[str, Any]:
    def way(seconds: list[float], tokens: int = 100) -> Way:
        return Way(lambda steps: (0.0, 0), 1, seconds, [tokens] * len(seconds))

    ways = {
        "packlora": way([3.0, 1.0, 1.0, 1.0]),
        "peft_rows": way([2.0] * 4),
        "peft_compiled": way([10.0] + [0.5] * 3, 25),
    }
    ways["peft_packed"] = Way(lambda steps: (0.0, 0), 1, error="broke")
    return small_train.row_of(case, ways)


def all_rows() -> list[dict[str, Any]]:
    return [*timed_rows(), *map(trained_row, small_train.cases(GPU))]


# --- cases and figures -------------------------------------------------------------------------------------------------


def test_all_cases_of_models_and_layers_are_there_in_every_mode() -> None:
    models, layers = small_models.model_cases(GPU), small_models.layer_cases(GPU)
    assert len({case.of for case in models}) == 8
    assert len({case.of for case in layers if case.dora}) == 19
    assert len({case.of for case in layers if not case.dora}) == 38
    labels = [case.label for case in small.cases(GPU)]
    assert len(set(labels)) == len(labels), "rows of a run that is taken up again are found by label"
    for case in (*models, *layers):
        assert f"{case.of} {case.mode}" == case.label and case.mode in MODES


def test_each_side_counts_in_its_best_mode_on_the_wall() -> None:
    rows = all_rows()
    summary = small.summary(rows)
    assert all(isinstance(summary[key], float) for key in REQUIRED)
    assert (
        summary["worst_wall_vs_peft"] == summary["compiled_17b_2048_vs_peft_best"] == 1.25
        and summary["wall_cases"] == 65
    )
    of = "model 1.7B 1x2048 lora_r16"
    by_mode = {row["mode"]: row for row in rows if row.get("of") == of}
    by_mode["eager"]["wall_ms"] |= {"packlora": 0.5, "peft_bf16": 1.0}
    assert small.summary(rows)["compiled_17b_2048_vs_peft_best"] == 0.5, "packlora compiled, PEFT in any mode"
    assert small.against_peft(rows, of) == 2.0
    by_mode["compiled"]["wall_ms"]["peft_bf16"] = 0.25
    assert small.summary(rows)["worst_wall_vs_peft"] == 0.5
    assert small.summary(rows)["worst_wall_vs_peft_case"] == of


def test_a_mode_that_fails_leaves_the_others_and_a_case_that_fails_leaves_no_minimum() -> None:
    rows = all_rows()
    own = [row for row in rows if row.get("of") == "dora 4096x4096 T8192 r16 p0"]
    assert len(own) == 3
    del own[2]["wall_ms"]["packlora"]
    assert small.summary(rows)["worst_wall_vs_peft"] == 2.5 / 4
    for row in own[:2]:
        del row["wall_ms"]["packlora"]
    summary = small.summary(rows)
    assert summary["worst_wall_vs_peft"] is None and summary["wall_cases"] == 64
    assert small.summary([row for row in all_rows() if row.get("of") != own[0]["of"]])["worst_wall_vs_peft"] is None
    only = [row for row in rows if row["part"] == "layers"]
    assert set(REQUIRED) <= set(small.summary(only)) and small.summary(only)["worst_wall_vs_peft"] is None


def test_rates_are_of_the_counted_units_and_a_start_is_what_all_units_took_beyond_them() -> None:
    row = trained_row(small_train.TrainCase("0.6B", None, "06b"))
    assert row["tokens_per_s"] == {"packlora": 100.0, "peft_rows": 50.0, "peft_compiled": 50.0}
    assert row["start_s"] == {"packlora": 2.0, "peft_rows": 0.0, "peft_compiled": 9.5}
    with_start = row["with_start_tokens_per_s"]
    assert with_start == {"packlora": 400 / 6, "peft_rows": 50.0, "peft_compiled": pytest.approx(400 / 17.5)}
    assert row["failed"] == {"peft_packed": "broke"}
    summary = small_train.summary([row])
    assert summary["train_06b_vs_peft_best"] == 2.0 and summary["train_06b_tokens_per_s"] == 100.0
    assert summary["train_06b_with_start_vs_peft_best"] == pytest.approx(4 / 3)
    assert summary["train_06b_with_start_peft_best"] == "peft_rows"


def test_batches_of_one_shape_hold_each_token_of_the_stream_once() -> None:
    samples = [Sample(np.arange(5 * n, 5 * n + 5, dtype=np.int32), np.ones(5, bool)) for n in range(8)]

    class Data:
        def __init__(self) -> None:
            self.samples = samples

        def global_batch(self, step: int) -> list[int]:
            return [2 * step, 2 * step + 1]

    one = OneShape.__new__(OneShape)
    one.data, one.rows, one.width = Data(), 2, 3  # type: ignore[assignment]
    batches = one.batches(range(1, 3))
    assert [tuple(batch.shape) for batch in batches] == [(2, 3)] * 3
    assert torch.cat(batches).flatten().tolist() == list(range(10, 28)), "two tokens are left over"


# --- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_the_whole_runs_at_toy_sizes(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "small.json"
    code = run_bench("small", out, quick=True, device="cpu")
    printed = capsys.readouterr()
    content = json.loads(out.read_text())
    assert code == 0, printed.err
    assert content["name"] == "small-cpu" and content["summary"]
    assert all(key.startswith("part_") for key in content["summary"])
    by_part = {part: [row for row in content["rows"] if row["part"] == part] for part in ("models", "layers", "train")}
    assert {part: len(rows) for part, rows in by_part.items()} == {"models": 2, "layers": 4, "train": 1}
    for row in (*by_part["models"], *by_part["layers"]):
        assert row["failed"] == {} and {"packlora", "peft_bf16"} <= set(row["ms"])
        assert ("packlora" in row["compile_s"]) == (row["mode"] == "compiled")
        assert "packlora" in row["notes"]
    (row,) = by_part["train"]
    assert row["failed"] == {} and row["start_s"]["peft_compiled"] > 0
    assert set(row["tokens_per_s"]) == {"packlora", "peft_packed", "peft_rows", "peft_compiled"}
    assert row["predicted_tokens_per_s"] > 0
    lead = row["warmup"]["packlora"] - row["warmup"]["peft_rows"]
    assert lead > 0
    units = row["unit_tokens"]
    assert units["peft_packed"] == units["peft_rows"], "the same samples"
    assert len(units["packlora"][lead:]) == len(units["peft_rows"]) and min(units["packlora"]) > max(
        units["peft_rows"][1:]
    )
    assert all(line in printed.out for line in small.table(content["rows"]))


# --- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_parts_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(result_files, "ROOT", tmp_path)
    assert every_mode.every_mode() == [], "no file, no section"
    assert every_mode.every_mode in readme.SECTIONS and every_mode.every_mode.__name__ in readme.TITLES
    rows = all_rows()

    def page(rows: list[dict[str, Any]]) -> str:
        content = {"commit": "0123456789", "date": "2026-01-01", "device": "a device", "rows": rows}
        (folder / "small-h200.json").write_text(json.dumps({**content, "summary": small.summary(rows)}))
        return "\n".join(every_mode.every_mode())

    whole = page(rows)
    assert "| 1.7B 1x2048 lora r16 | 1.0 / 1.0 / 1.0 | 9.0 / 4.0 / 2.0 | 8.0 / 3.0 / 2.5 | 1.25 |" in whole
    assert "Of 57 cases of one layer, each side in its best mode on the wall, PEFT is ahead in 0." in whole
    assert "| Qwen3-0.6B's shape | packlora | 100 | 67 | 2.0 |  |" in whole
    assert "| Qwen3-0.6B's shape | PEFT, packed | failed | | | |" in whole
    part = page([row for row in rows if row["part"] == "train"])
    assert "PEFT, rows cut" in part and "of one layer" not in part and "1.7B" not in part
    (slow, *_) = {row["of"] for row in rows if row["part"] == "layers"}
    for row in rows:
        if row.get("of") == slow:
            row["wall_ms"]["packlora"] *= 2
    behind = page(rows)
    assert "PEFT is ahead in 1:" in behind and f"| {slow} | " in behind and " | 0.62 |" in behind
