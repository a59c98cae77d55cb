"""What bench/studies/readme.py makes of result files that may or may not be there, and of figures that are not as hoped."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import result_files, sections
from benchmarks.tables import write as readme

ROOT = Path(__file__).parents[2]
Changed = Callable[[str, Callable[[dict[str, Any]], None]], None]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the result files, from which pages are made."""
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        shutil.copy(file, folder)
    monkeypatch.setattr(result_files, "ROOT", tmp_path)
    return folder


@pytest.fixture
def changed(results: Path) -> Changed:
    """Changes the copy of a result file."""

    def change(name: str, how: Callable[[dict[str, Any]], None]) -> None:
        content = json.loads((results / f"{name}.json").read_text())
        how(content)
        (results / f"{name}.json").write_text(json.dumps(content))

    return change


# --- four jobs of short samples on a small model -----------------------------------------------------------------------


def rows_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("| ")][1:]


def test_a_row_of_the_small_shape_takes_the_place_of_llama_60m_and_the_readme_stays_as_long(results: Path) -> None:
    page, small = (ROOT / "README.md").read_text(), results / "small-h200.json"
    content = json.loads(small.read_text())
    small.unlink()
    without = readme.with_overview(page)
    assert len(rows_of(readme.overview())) == 11
    assert "| Llama 60M, LoRA r 8" in without and "0.6B shape" not in without
    assert "The last two rows time whole optimizer steps." in without

    content["summary"]["train_06b_vs_peft_best"] = 2.02
    small.write_text(json.dumps(content))
    filled, rows = readme.with_overview(page), rows_of(readme.overview())
    assert len(rows) == 11
    assert "Llama 60M" not in filled
    (row,) = [row for row in rows if "0.6B shape" in row]
    assert row.startswith("| four jobs of short samples at once, 0.6B shape | | | | | 2.02x |"), "PEFT's fastest way"
    assert "The last three rows time whole optimizer steps." in filled
    assert len(filled.splitlines()) == len(without.splitlines())
    small.unlink()
    assert readme.with_overview(filled) == without, "and back"


def test_the_small_shape_has_its_figures_on_the_page_of_benchmarks(results: Path) -> None:
    small = results / "short-jobs-06b-h200.json"
    small.unlink(missing_ok=True)
    assert "Qwen3-0.6B's shape |" not in "\n".join(sections.short_jobs())
    content = json.loads((results / "short-jobs-h200.json").read_text())
    content["summary"] |= {
        "packlora_tokens_per_s": 98765.0,
        "throughput_vs_peft_rows": 2.02,
        "peft_rows_tokens_per_s": 7,
    }
    small.write_text(json.dumps(content))
    page = readme.filled((ROOT / "docs" / "benchmarks.md").read_text())
    section = page.split("## Four jobs of short samples\n")[1].split("\n## ")[0]
    assert "short-jobs-06b-h200.json" in section
    (row,) = [line for line in section.splitlines() if line.startswith("| Qwen3-0.6B's shape")]
    assert "| 98765 |" in row and "| 7 (2.02x) |" in row


# --- experts, images ---------------------------------------------------------------------------------------------------


def test_experts_are_shown_by_contender_and_one_that_failed_is_called_so(changed: Changed) -> None:
    lines = sections.experts()
    assert "| four jobs, DoRA, 8192 | 62 (9.9) | 73 (1.19; 14.0) |  |" in lines

    def broken(content: dict[str, Any]) -> None:
        row = next(row for row in content["rows"] if row["case"] == "1job lora_r16 T8192")
        for figures in (row["ms"], row["over_frozen"], row["gib"]):
            del figures["peft"]
        row["failed"], row["vs_peft"] = {"peft": "out of memory"}, None

    changed("experts-h200", broken)
    lines = sections.experts()
    (row,) = (line for line in lines if line.startswith("| one job, LoRA, 8192"))
    assert row.endswith("| failed |")
    assert "PEFT's time over packlora's, by tokens: 1.08x at 2048." in lines


def test_a_ratio_is_the_same_in_the_readme_and_on_the_page_of_benchmarks(changed: Changed) -> None:
    """Medians over rounds, which are not the quotients of the columns before them."""

    def moved(content: dict[str, Any]) -> None:
        for row in content["rows"]:
            row |= {key: 3.21 for key in ("vs_peft", "vs_peft_bnb") if row.get(key)}
        content["summary"] |= {key: 3.21 for key in ("one_job_vs_peft_bnb",) if key in content["summary"]}

    for name, section, case in (
        ("experts-h200", sections.experts, "on experts too"), ("quantised-h200", sections.four_bits, "in 4 bits"),
    ):  # fmt: skip
        changed(name, moved)
        (row,) = (row for row in readme.overview() if case in row)
        assert " 3.21x |" in row and "3.21x" in "\n".join(section())


def test_a_model_with_images_is_on_the_page_once_it_was_measured(results: Path) -> None:
    (results / "vlm-h200.json").unlink(missing_ok=True)
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert sections.vlm() == [] and "## A vision-language model" not in readme.filled(page)
    row = {
        "case": "step dora_r384 fp32", "r": 384, "regime": "fp32", "backward": True, "layers": 8, "T": 4096, "patches": 4096,
        "ms": {"frozen": 100.0, "packlora": 123.0}, "over_frozen": {"packlora": 1.23}, "failed": {"peft": "out of memory"},
        "gib": {"frozen": 10.0, "packlora": 12.34}, "vs_peft": None,
    }  # fmt: skip
    both = {
        "ms": row["ms"] | {"peft": 246.0},
        "over_frozen": {"packlora": 1.23, "peft": 2.46},
        "failed": {},
        "vs_peft": 2.0,
    }
    alone = row | both | {"backward": False, "regime": "bf16", "gib": row["gib"] | {"peft": 20.0}}
    content = json.loads((results / "experts-h200.json").read_text()) | {"rows": [alone, row], "summary": {}}
    (results / "vlm-h200.json").write_text(json.dumps(content))
    section = readme.filled(page).split("## A vision-language model\n")[1].split("\n## ")[0].splitlines()
    forward = "| forward alone, in eval mode, r 384, bf16 adapters | 100 (10.0) | 123 (1.23; 12.3) | 246 (2.46; 20.0) | 2.00 |"
    assert forward in section
    assert "| forward and backward, r 384, fp32 adapters | 100 (10.0) | 123 (1.23; 12.3) | failed | failed |" in section


# --- two GPUs ----------------------------------------------------------------------------------------------------------


def test_each_part_of_two_gpus_is_there_where_its_file_is(results: Path) -> None:
    (results / "pipeline-h200.json").rename(results / "stages")
    both = "\n".join(sections.two_gpus())
    (results / "replicas-h200.json").rename(results / "other")
    assert "Replicas" not in (tensor := "\n".join(sections.two_gpus())) and tensor in both
    (results / "tensor-parallel-h200.json").unlink()
    assert sections.two_gpus() == []
    (results / "other").rename(results / "replicas-h200.json")
    assert "Tensor parallelism" not in (replicas := "\n".join(sections.two_gpus())) and replicas in both
    (results / "stages").rename(results / "pipeline-h200.json")
    every = sections.two_gpus()
    assert "\n".join(every).startswith(replicas) and any(line.startswith("**Pipeline.**") for line in every)


def test_a_pipeline_is_shown_by_way_and_its_goal_is_held_or_missed(changed: Changed) -> None:
    def other(content: dict[str, Any]) -> None:
        content["rows"] = content["rows"][:1]
        content["rows"][0]["no_flush"] |= {"s": 2.0, "tokens": 5000, "bubble": 0.05}
        content["rows"][0]["one_job"] |= {"s": 3.0}
        content["rows"][0]["fsdp2"] = {"s": 4.0, "tokens": 5000}
        content["summary"] |= {
            "bubble_4jobs_2gpu": 0.05,
            "eager_no_flush_over_1f1b_2gpu": 1.4,
            "speedup_over_1f1b_2gpu": 2.2,
        }

    assert any("The goal of a bubble of at most 6% is missed" in line for line in sections.two_gpus())
    changed("pipeline-h200", other)
    lines = sections.two_gpus()
    assert "| 2 | of all jobs, without a flush | 2.00 | 2500 | 5.0% |" in lines
    assert "| 2 | of one job after the other, on a sharded base | 4.00 | 1250 |  |" in lines
    (line,) = (line for line in lines if "are 1.50 times as fast" in line and "at most 6% is met" in line)
    assert line.endswith("they are 2.20 times as fast, and 1.40 times in plain operations too.")


def test_replicas_are_shown_by_number_of_gpus_and_what_was_missed_is_said(changed: Changed) -> None:
    def more(content: dict[str, Any]) -> None:
        rows, summary = content["rows"], content["summary"]
        four = copy.deepcopy([row for row in rows if row["part"] == "jobs"])
        for row in four:
            row["processes"] = 4
            row["jobs"] = {"s": [2.0, 1.0, 1.0, 1.0], "tokens": [110, 100, 100, 100]}
            row["bits_equal"]["xsum"] = False
        rows += [*four, {"part": "fsdp2", "processes": 4, "layers": 8, "failed": {"fsdp2": "no room"}}]
        own = {"efficiency_jobs": 0.96, "efficiency_samples": 0.5, "busy_efficiency_jobs": 0.97}
        summary |= {f"{key}_4": value for key, value in own.items()}
        summary |= {"one_of_4_tokens_per_s": 1000.0, "jobs_4_tokens_per_s": 3840.0, "samples_4_tokens_per_s": 2000.0}

    changed("replicas-h200", lambda content: content["summary"].update(efficiency_jobs_2=0.9))
    changed("replicas-h200", more)
    lines = sections.two_gpus()
    assert "Qwen3-0.6B's shape (28 layers)," in lines[0]
    assert "| 4 | each job whole on one | 3840 | 0.960 | 0.970 |" in lines
    assert "| 4 | every microbatch divided | 2000 | 0.500 | |" in lines
    two, four = (line for line in lines if "the goal for divided jobs" in line)
    assert "On 2 GPUs" in two and "0.95, is missed" in two and "have the bits" in two and "do not" not in two
    assert "On 4 GPUs" in four and "0.95, is met" in four and "do not have the bits" in four
    assert "1.100 times the fewest" in four and "2.000 times the shortest" in four
    assert any("sharded over 2 GPUs" in line and "takes 1.149 of the time" in line for line in lines)
    assert any("sharded over 4 GPUs" in line and line.endswith("a step failed.") for line in lines)


def test_of_tensor_parallelism_goals_held_and_missed_and_failures_are_named(changed: Changed) -> None:
    def other(content: dict[str, Any]) -> None:
        by_case = {row["case"]: row for row in content["rows"]}
        by_case["8B 4x2048 plain tp2"]["over_frozen"]["packlora"] = 1.05
        by_case["70B 4x2048 plain tp2"]["over_frozen"]["packlora"] = 1.07
        failed = by_case["70B 4x2048 sp tp2"]
        failed["over_frozen"], failed["ms"], failed["messages"] = {}, {}, {}

    changed("tensor-parallel-h200", other)
    lines = sections.two_gpus()
    (words,) = [line for line in lines if line.startswith("The goal at 4 x 2048 tokens is at most 1.06.")]
    held, missed = words.split("Held by: ")[1].split(" Missed by: ")
    assert held == "8B on 2 GPUs (1.050)."
    assert "70B on 2 GPUs (1.070)" in missed and "70B with sequence parallelism on 2 GPUs (failed)" in missed
    (row,) = [line for line in lines if line.startswith("| 70B, 4 x 2048 | 2 | yes |")]
    assert row.count("failed") == 6
    (row,) = [line for line in lines if line.startswith("| 8B, 4 x 2048 | 2 | no |")]
    assert row.endswith("| 1.050 | 1.157 | 1.395 | 1 | 1.007 |")
    assert any(line.startswith("With 1 x 2048 tokens the host decides") and "1.24 to 1.77" in line for line in lines)
