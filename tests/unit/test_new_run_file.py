"""`packlora init` and `packlora schema`: a first run file, and what editors know of run files. Neither loads torch."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from test_first_words import WITHOUT_TORCH
from test_run_file_limits import ODD, TREE, changed, places
from typer.testing import CliRunner
from waiting import SECONDS

import packlora
from packlora.cli import app
from packlora.commands.init import write_run_file
from packlora.commands.schema import run_file_schema
from packlora.config import BUILT_IN
from packlora.errors import InputError
from packlora.run_file import _parse_yaml, expanded, load_run, parse_run

ROOT = Path(__file__).parents[2]


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, cwd=cwd, timeout=SECONDS
    )


# --- init --------------------------------------------------------------------------------------------------------------


def test_init_writes_a_run_file_that_loads_with_all_of_its_comments_too(tmp_path: Path) -> None:
    data = tmp_path / "my data (1).jsonl"
    data.write_text('{"instruction": "a", "output": "b"}\n' * 3)
    done = command("init", data.name, "-o", "runs/first.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 rows: Alpaca's instructions" in done.stdout and done.stderr == ""
    file = tmp_path / "runs" / "first.yaml"
    run = load_run(file)
    (job,) = run.jobs
    assert job.name == "my-data-1" and Path(job.data.sources[0][0]).samefile(data)
    assert (job.train.global_batch_size, run.base_model) == (3, "smollm2-135m")
    plain = re.sub(r"^( *)# (\w+: )", r"\1\2", file.read_text(), flags=re.MULTILINE)
    assert plain.count("#") < file.read_text().count("#") - 7
    (tmp_path / "runs" / "plain.yaml").write_text(plain)
    every = load_run(tmp_path / "runs" / "plain.yaml")
    assert every.jobs[0].adapter.use_dora and every.jobs[0].train.eval_steps == 50 and every.dtype == "bfloat16"
    again = command("init", data.name, "-o", "runs/first.yaml", cwd=tmp_path)
    assert again.returncode == 2 and "exists; give another name with -o" in again.stderr


def test_init_leaves_no_file_that_it_could_not_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    data.write_text('{"instruction": "a", "output": "b"}\n' * 3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9, before[1]))  # as on a full disk
    try:
        with pytest.raises(InputError, match=r"cannot write .*run\.yaml: File too large"):
            write_run_file(data, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not out.exists()
    monkeypatch.setattr("packlora.commands.init.load_run", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_run_file(data, out)
    assert not out.exists()


def test_what_init_wrote_trains(
    tiny_base: Callable[[str], str], write_rows: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows("rows", 4)
    out = CliRunner().invoke(app, ["init", "rows.jsonl", "--base-model", tiny_base("llama")])
    assert out.exit_code == 0, out.output
    assert "prompts and completions" in out.output
    assert packlora.train("run.yaml", max_steps=1).status == "done"


@pytest.mark.parametrize(
    ("row", "trainer", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo", "the chosen one is preferred"),
        ({"chosen": "a b", "rejected": "a c"}, "dpo", "the chosen one is preferred"),
        ({"prompt": "a", "completion": "b", "label": False}, "kto", "the label true are desirable"),
        ({"prompt": "a", "completion": "b", "label": 3}, "sft", "prompts and completions"),
    ],
)
def test_init_names_the_trainer_that_takes_the_rows(
    row: dict[str, Any], trainer: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    assert said in write_run_file(tmp_path / "d.jsonl", tmp_path / "run.yaml")
    train = load_run(tmp_path / "run.yaml").jobs[0].train
    assert (train.trainer, train.learning_rate) == (trainer, BUILT_IN[train.trainer].learning_rate)
    # as docs/settings.md says: preferences are passed over once, after a longer warm-up
    assert (train.num_train_epochs, train.warmup_ratio) == ((3, 0.03) if trainer == "sft" else (1, 0.1))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no rows"), ('{"a": 1}\n', "line 1: found a"), (None, "does not exist"), ("{", "not valid JSON"),
        ('{"prompt": "a", "completion": ""}\n', "line 1: the completion is empty"),
        ('{"prompt": "a", "completion": "b", "label": true}\n', "kto compares .* takes at least 2"),
    ],
)  # fmt: skip
def test_init_refuses_what_is_no_data_and_writes_nothing(content: str | None, said: str, tmp_path: Path) -> None:
    data, out = tmp_path / "d.jsonl", tmp_path / "run.yaml"
    if content is not None:
        data.write_text(content)
    with pytest.raises(InputError, match=said) as caught:
        write_run_file(data, out)
    assert "job" not in str(caught.value), "there is none yet"
    assert not out.exists()


@pytest.mark.parametrize("name", ["${HOME}", "$${x}", "control", "Trackers", "run.json"])
def test_init_takes_a_data_file_whose_name_means_something_else_in_a_run_file(name: str, tmp_path: Path) -> None:
    data = tmp_path / f"{name}.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    write_run_file(data, tmp_path / "run.yaml")
    assert load_run(tmp_path / "run.yaml").jobs[0].data.path == str(data)


@pytest.mark.parametrize(("base", "name"), [("", "d"), ("null", "d"), ("a\nb", "d"), ("smollm2-135m", "a\tb")])
def test_init_leaves_no_run_file_that_cannot_be_read(base: str, name: str, tmp_path: Path) -> None:
    data = tmp_path / f"{name}.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(InputError, match=r"base_model: |data\.path: "):
        write_run_file(data, tmp_path / "run.yaml", base)
    assert not (tmp_path / "run.yaml").exists()


def test_init_writes_no_run_file_whose_name_is_that_of_data(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(InputError, match=r"-o .*x\.parquet: files that end in \.parquet are data"):
        write_run_file(data, tmp_path / "x.parquet")
    assert not (tmp_path / "x.parquet").exists()


MIXED = ('{"prompt": "a", "completion": "b"}', '{"prompt": "a", "chosen": "b", "rejected": "c"}')


@pytest.mark.parametrize(
    ("rows", "base", "said"),
    [
        (MIXED, "smollm2-135m", r"line 2: pairs of completions.* for trainer dpo, but .*line 1"),
        (MIXED[:1], "./nowhere", "there is no such folder"),
    ],
)
def test_init_refuses_what_no_run_trains(rows: tuple[str, ...], base: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    with pytest.raises(InputError, match=said):
        write_run_file(tmp_path / "d.jsonl", tmp_path / "run.yaml", base)
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(("words", "truncate"), [(20, "error"), (9000, "drop")])
def test_init_drops_samples_that_may_be_longer_than_its_limit(words: int, truncate: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "word " * words}))
    write_run_file(tmp_path / "d.jsonl", tmp_path / "run.yaml")
    assert load_run(tmp_path / "run.yaml").jobs[0].data.truncate == truncate


def test_init_into_a_file_s_folder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match="cannot write"):
        write_run_file(data, data / "run.yaml")


# --- schema ------------------------------------------------------------------------------------------------------------


def fits(value: Any, schema: dict[str, Any], whole: dict[str, Any]) -> bool:
    """As much of JSON Schema as is used here; what is not known is an error."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
             "null": type(None)}  # fmt: skip
    for key, rule in schema.items():
        if key in ("title", "description", "default", "$schema", "$defs"):
            continue
        if key == "$ref":
            good = fits(value, whole["$defs"][rule.rpartition("/")[2]], whole)
        elif key == "anyOf":
            good = any(fits(value, one, whole) for one in rule)
        elif key == "type":
            good = isinstance(value, kinds[rule]) and (rule == "boolean" or not isinstance(value, bool))
        elif key in ("enum", "const"):
            good = value in (rule if key == "enum" else [rule])
        elif key == "required":
            good = not isinstance(value, dict) or set(rule) <= value.keys()
        elif key == "properties":
            good = not isinstance(value, dict) or all(
                fits(value[k], one, whole) for k, one in rule.items() if k in value
            )
        elif key == "patternProperties":
            assert rule == {"^x-": {}}
            good = True
        elif key == "additionalProperties":
            known = schema.get("properties", {})
            others = (
                []
                if not isinstance(value, dict)
                else [k for k in value if k not in known and not str(k).startswith("x-")]
            )
            good = rule is True or (not others if rule is False else all(fits(value[k], rule, whole) for k in others))
        elif key == "items":
            good = not isinstance(value, list) or all(fits(one, rule, whole) for one in value)
        elif key == "pattern":
            good = not isinstance(value, str) or re.search(rule, value) is not None
        elif key in ("minLength", "maxLength", "minItems"):
            sized = isinstance(value, list if key == "minItems" else str)
            good = not sized or (len(value) <= rule if key == "maxLength" else len(value) >= rule)
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            good = not number or {
                "minimum": lambda v, r: v >= r, "maximum": lambda v, r: v <= r, "exclusiveMinimum": lambda v, r: v > r,
                "exclusiveMaximum": lambda v, r: v < r,
            }[key](value, rule)  # fmt: skip
        if not good:
            return False
    return True


def accepted(value: Any) -> bool:
    whole = run_file_schema()
    return fits(value, whole, whole)


def test_whatever_a_run_file_may_say_fits_the_schema() -> None:
    whole, cases = run_file_schema(), 0
    for place in places():
        for odd in ODD:
            if odd in ("100000 items", "a million characters", "list in itself"):
                continue
            tree = changed(place, ODD[odd])
            try:
                parse_run(expanded(tree, "run"), "run")
            except InputError:
                continue
            cases += 1
            assert fits(tree, whole, whole), (place, odd)
    assert cases > 100
    for file in (ROOT / "examples").rglob("*.yaml"):
        assert fits(_parse_yaml(file.read_text(), file.name), whole, whole), file


@pytest.mark.parametrize(
    ("tree", "good"),
    [
        (TREE, True), ({**TREE, "x-a": 3, "defaults": {"train": {"max_steps": 3}}, "parallel": "auto", "plans": "chain"}, True),
        ({"base_model": "m", "output_dir": "o", "jobs": [{"name": "a"}],
          "defaults": {"data": {"path": ["a", {"path": "b"}]}}}, True),
        (changed(("jobs", 0, "seed"), "${SEED}"), True), (changed(("dtype",), "${DTYPE:-float32}"), True),
        (changed(("jobs", 0, "seed"), "3"), False), (changed(("dtype",), "int8"), False), ({**TREE, "a": 1}, False),
        (changed(("jobs", 0, "train", "learning_rate"), -1), False), (changed(("jobs", 0, "adapter", "rank"), 1), False),
        (changed(("jobs", 0, "data", "path"), [3]), False), ({**TREE, "defaults": {"name": "a"}}, False),
        ({"output_dir": "o", "jobs": []}, False), ({**TREE, "jobs": []}, False),
    ],
)  # fmt: skip
def test_the_schema_takes_what_is_right_and_marks_what_is_wrong(tree: Any, good: bool) -> None:
    assert accepted(tree) is good


def test_the_schema_is_printed_without_torch_and_describes_every_key(tmp_path: Path) -> None:
    done = command("schema", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    schema = json.loads(done.stdout)
    for part in [schema, *schema["$defs"].values()]:
        for key, value in part["properties"].items():
            described = "description" in value or "$ref" in value
            assert described, key
    assert schema["$defs"]["TrainConfig"]["properties"]["warmup_ratio"]["description"].startswith("Share of all steps")
