"""Settings that are hardly meant are noted, base models that are none are refused, and a plan says how far it is."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from terminals import Tty
from typer.testing import CliRunner

import packlora
from packlora.base.load import load_skeleton
from packlora.cli import app
from packlora.commands.plan import make_plan
from packlora.config import Run
from packlora.errors import InputError
from packlora.parallel.sharded import empty_model
from packlora.runtime.prepare import prepare
from packlora.terminal import Activity

Make = Callable[..., Run]


@pytest.fixture
def make(tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path) -> Make:
    """(changes of the job's sections, changes of the top level) -> a run of one job with 12 samples."""

    def make(sections: dict[str, dict[str, Any]] | None = None, **top: Any) -> Run:
        job: dict[str, Any] = {
            "name": "first",
            "data": {"path": write_rows("rows", 12)},
            "train": {"global_batch_size": 4},
        }
        for section, changes in (sections or {}).items():
            job[section] = job.get(section, {}) | changes
        tree = {"base_model": tiny_base("llama"), "output_dir": str(tmp_path / "out"), "jobs": [job]}
        return Run.model_validate(tree | top)

    return make


# --- warnings ----------------------------------------------------------------------------------------------------------


def test_a_usual_run_has_no_warnings(make: Make, write_rows: Callable[..., str]) -> None:
    sections = {
        "train": {"warmup_steps": 2, "lr_scheduler_type": "linear"},
        "data": {"eval_path": write_rows("eval", 3)},
    }
    assert prepare(make(sections)).warnings == []


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"warmup_steps": 3, "lr_scheduler_type": "linear"},
         "warmup_steps 3 is no less than its 3 optimizer steps, so the learning rate never comes to 0.0002"),
        ({"warmup_steps": 100, "lr_scheduler_type": "cosine", "max_steps": 9}, "warmup_steps 100 is no less than its 9 "),
        ({"global_batch_size": 13},
         "global_batch_size 13 is more than its 12 samples, so every optimizer step takes all of them"),
    ],
)  # fmt: skip
def test_a_setting_that_is_hardly_meant_is_noted_with_its_numbers(make: Make, train: dict[str, Any], said: str) -> None:
    (warning,) = prepare(make({"train": train})).warnings
    assert warning.startswith(f"job 'first': {said}")


def test_a_batch_of_all_samples_and_a_warmup_of_all_but_one_step_are_not_noted(make: Make) -> None:
    assert prepare(make({"train": {"global_batch_size": 12}})).warnings == []
    assert prepare(make({"train": {"warmup_steps": 2, "lr_scheduler_type": "linear"}})).warnings == []


def test_held_out_samples_that_are_the_training_samples_are_noted_also_through_a_link(
    make: Make, tmp_path: Path
) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to("rows.jsonl")
    for path in (str(tmp_path / "rows.jsonl"), str(link), str(tmp_path / "out" / ".." / "rows.jsonl")):
        os.makedirs(tmp_path / "out", exist_ok=True)
        (warning,) = prepare(make({"data": {"eval_path": path}})).warnings
        assert warning.startswith("job 'first': eval_path is the training data itself")


def test_an_end_at_which_generation_goes_on_is_noted_once_where_it_is_learnt(
    make: Make, tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    """A chat tokenizer beside a base that stops at the end of a text alone."""
    base = tmp_path / "base"
    shutil.copytree(tiny_base("llama"), base)
    settings = json.loads((base / "generation_config.json").read_text())
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a dog"}\n' * 8)

    def notes(ends: Any, *jobs: dict[str, Any]) -> list[str]:
        (base / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": ends}))
        run = make(base_model=str(base), **({"jobs": list(jobs)} if jobs else {}))
        assert load_skeleton(run).generation_config.eos_token_id == ends
        assert empty_model(str(base), None, torch.float32).generation_config.eos_token_id == ends
        return prepare(run).warnings

    end, chats = settings["eos_token_id"][-1], {"path": str(tmp_path / "rows.jsonl")}
    assert notes(settings["eos_token_id"]) == notes(end) == []
    assert notes(2, {"name": "one", "data": {"path": str(text)}}) == []
    for ends, told in ((2, "at 2;"), ([2, 7], "at 2, 7;"), (None, "at no token;")):
        jobs = ({"name": name, "data": chats, "train": {"global_batch_size": 4}} for name in ("one", "two"))
        (note,) = notes(ends, *jobs)
        assert f"'<|im_end|>' (token {end})" in note and told in note and f"add {end} to eos_token_id" in note


def test_the_notes_of_a_run_are_recorded(make: Make, tmp_path: Path) -> None:
    packlora.train(make({"train": {"global_batch_size": 99}}))
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert any("global_batch_size 99 is more than its 12 samples" in text for text in record["warnings"])


# --- base models that are none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "file", "loop", "zero"])
def test_a_base_model_that_is_no_folder_is_refused_at_once(make: Make, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "base"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "file":
        path.write_text("{}")
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    with pytest.raises(InputError, match=f"base_model '{path}' is not a folder"):
        prepare(make(base_model=str(path)))


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "num_local_experts"])
def test_a_configuration_of_a_million_layers_is_refused_at_once(make: Make, tmp_path: Path, key: str) -> None:
    run = make()
    shutil.copytree(run.base_model, tmp_path / "tall")
    config = json.loads((tmp_path / "tall" / "config.json").read_text())
    (tmp_path / "tall" / "config.json").write_text(json.dumps(config | {key: 10**6}))
    start = time.process_time()
    with pytest.raises(InputError, match=f"its configuration has {key} 1000000, more than 10+; this is no model"):
        prepare(make(base_model=str(tmp_path / "tall")))
    assert time.process_time() - start < 20


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}])
def test_a_tokenizer_whose_longest_length_is_no_number_is_refused(make: Make, tmp_path: Path, value: Any) -> None:
    shutil.copytree(make().base_model, tmp_path / "odd")
    file = tmp_path / "odd" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": value}))
    with pytest.raises(InputError, match=r"the tokenizer's model_max_length is .*, not a number"):
        prepare(make(base_model=str(tmp_path / "odd")))


# --- a plan says how far it is -----------------------------------------------------------------------------------------


def test_a_plan_says_what_is_read_encoded_and_planned_and_how_much_of_it(make: Make) -> None:
    heard: list[tuple[str, int, int]] = []
    make_plan(make(), told=lambda text, done=0, total=0: heard.append((text, done, total)))
    texts = list(dict.fromkeys(text for text, _, _ in heard))
    assert texts[:3] == [
        "job first: reading rows.jsonl, rows",
        f"laying out {make().base_model}",
        "job first: encoding samples",
    ]
    assert ("job first: encoding samples", 11, 12) in heard
    for method in ("solo", "auto"):
        assert (f"planning microbatches, {method}: samples", 12, 12) in heard


def test_a_plan_of_a_million_epochs_is_made_of_its_first_windows(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packlora.commands.plan.SAMPLES_SHOWN", 500)
    heard: list[tuple[int, int]] = []
    plan = make_plan(
        make({"train": {"num_train_epochs": 1e6}}), told=lambda text, done=0, total=0: heard.append((done, total))
    )
    assert plan.methods[-1].tokens == pytest.approx(plan.prepared.jobs[0].data.tokens, rel=0.02)
    assert max(done for done, total in heard if total) < 1000


class Closed(Tty):
    tried = 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise BrokenPipeError(32, "Broken pipe")


def test_on_a_terminal_one_line_moves_and_is_wiped_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(100.0, 0.01)
    monkeypatch.setattr("packlora.terminal.time.monotonic", lambda: next(now))
    stream = Tty()
    with Activity(stream) as told:
        told("reading \x1b[2J", 1)
        told("reading \x1b[2J", 2)  # too soon to be of use
        told("encoding", 3000, 4000)
    assert stream.getvalue() == "\r\x1b[2Kreading \\x1b[2J 1\r\x1b[2Kencoding 3,000 of 4,000\r\x1b[2K"


def test_elsewhere_only_what_takes_long_is_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("packlora.terminal.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with Activity(stream) as told:
        for number in range(25):
            told("encoding", number, 25)
            now[0] += 1
    assert stream.getvalue() == "packlora: encoding 10 of 25\npacklora: encoding 20 of 25\n"


def test_nobody_who_reads_does_not_stop_the_work() -> None:
    stream = Closed()
    with Activity(stream) as told:
        told("encoding", 1)
    assert stream.tried == 2  # the line, and to wipe it


def test_a_plan_leaves_stdout_to_its_figures(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(make().model_dump_json())  # JSON is YAML
    result = CliRunner().invoke(app, ["plan", str(file)])
    assert result.exit_code == 0, result.output
    assert "packed together" not in result.stdout  # one job
    assert "microbatches of at most 4096 tokens" in result.stdout
    assert result.stderr == ""
