"""plan, doctor and merge through the command line; training is in test_training.py, bad input in test_bad_input.py."""

from __future__ import annotations

import json
import os
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
    row = next(line.split() for line in out.output.splitlines() if line.startswith("auto "))
    assert int(row[1]) == len(lines)
    assert int(row[2]) + int(row[3]) == len(lines)
    windows = [json.loads(line) for line in (result.output_dir / "windows.jsonl").read_text().splitlines()]
    assert int(row[5]) == sum(line["bound"] for line in windows)
    record = json.loads((result.output_dir / "run.json").read_text())
    for name, job in record["jobs"].items():
        row = next(line for line in out.output.splitlines() if line.startswith(name))
        assert f"{job['trainable_parameters'] / 1e6:.2f} M" in row
        assert f" {job['steps']} " in row
        assert "█" in row
    assert "memory on" in out.output
    assert (
        "\npacked in turns: one, then two; what is left over of one turn shares a microbatch with the next\n"
        in out.output
    )


def test_plan_writes_its_figures_as_json_and_as_a_picture(run_file: Path, tmp_path: Path) -> None:
    figures, picture = tmp_path / "new" / "plan.json", tmp_path / "plan.png"
    command = ["plan", str(run_file), "--set", "parallel.pipeline=2", "--json", str(figures), "--plot", str(picture)]
    out = CliRunner().invoke(app, command)
    assert out.exit_code == 0, out.output
    plan = json.loads(figures.read_text())
    assert plan["stages"] == 2
    assert set(plan["methods"]) == {"solo", "auto"}
    own = plan["methods"]["auto"]
    assert own["microbatches"] == own["full"] + own["underfilled"] <= plan["methods"]["solo"]["microbatches"]
    assert own["tokens"] == plan["methods"]["solo"]["tokens"] == sum(job["tokens"] for job in plan["jobs"])
    assert own["tokens_per_second"] == pytest.approx(own["tokens"] / own["seconds"])
    assert 0 < own["bubble"] < 1
    assert sum(sum(job["lengths"]["histogram"]["counts"]) for job in plan["jobs"]) == 21
    assert picture.read_bytes().startswith(b"\x89PNG")
    for option, value in (
        ("--plot", "plan.nonsense"),
        ("--json", f"{run_file}/plan.json"),
        ("--set", "parallel.pipeline=3"),
    ):
        bad = CliRunner().invoke(app, ["plan", str(run_file), option, value])
        assert bad.exit_code == 2, option
        assert (
            Path(value).name.split("/")[-1] in bad.stderr or "parallel.pipeline is 3, but the model has" in bad.stderr
        )


def test_a_plan_of_jobs_by_themselves_shows_that_and_not_the_method_it_is_compared_with(run_file: Path) -> None:
    words = ["plan", str(run_file), "--set", "schedule.method=solo"]
    out = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert out.exit_code == 0, out.output
    run = Run.model_validate(json.loads(run_file.read_text()) | {"schedule": {"method": "solo"}})
    trained = len((packlora.train(run).output_dir / "microbatches.jsonl").read_text().splitlines())
    others = next(line.split()[1] for line in out.output.splitlines() if line.startswith("auto "))
    assert int(others) < trained, "the run file does not tell the methods apart"
    assert f"\nsolo needs {trained} microbatches, auto {others}; " in out.output
    assert "one + two" not in out.output


@pytest.mark.parametrize("kind", ["device", "folder"])
def test_a_plan_is_not_written_in_the_place_of_what_is_no_file(run_file: Path, tmp_path: Path, kind: str) -> None:
    odd, link = tmp_path / "odd", tmp_path / "link"
    (os.mkfifo if kind == "device" else os.mkdir)(odd)
    link.symlink_to(odd)
    before = odd.lstat().st_ino
    for words in ([str(run_file)], [json.loads(run_file.read_text())["base_model"], "--gpu", "24"]):
        for path in (odd, link):
            out = CliRunner().invoke(app, ["plan", *words, "--json", str(path)])
            assert out.exit_code == 2 and f"cannot write {path}: it is there and is no file" in out.stderr
    assert odd.lstat().st_ino == before and link.is_symlink()


def test_figures_of_a_plan_are_written_where_a_link_leads(run_file: Path, tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "file.json"
    link.symlink_to(file)
    assert CliRunner().invoke(app, ["plan", str(run_file), "--json", str(link)]).exit_code == 0
    assert link.is_symlink() and "methods" in json.loads(file.read_text())


def test_a_picture_without_a_kind_and_devices_beyond_all_sense_are_refused_at_once(run_file: Path) -> None:
    bad = CliRunner().invoke(app, ["plan", str(run_file), "--plot", str(run_file.with_name("plan"))])
    assert bad.exit_code == 2 and "plan: the name says the kind of picture" in bad.stderr
    assert CliRunner().invoke(app, ["plan", str(run_file), "--gpus", "1000000"]).exit_code == 2


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


def test_doctor_says_how_to_install_what_is_missing_and_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    from packlora.commands.doctor import OPTIONAL

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).output
    found = " ".join(said.split())
    assert "pip install 'packlora[NAME]', of these: quant (" in found
    for package, purpose in OPTIONAL.values():
        name = package.removeprefix("'packlora[").removesuffix("]'")
        assert purpose in found.partition(f" {name} (")[2].partition(")")[0]
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {package.strip("'")[9:-1] for package, _ in OPTIONAL.values() if "packlora" in package}
    assert named == extras.keys() - {"dev", "docs"}


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
