"""A run file of any content, however odd: accepted with a sensible meaning, or refused in a few short printable lines."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from packlora.cli import app
from packlora.config import Run
from packlora.errors import InputError
from packlora.run_file import load_run, parse_run

TREE: dict[str, Any] = {
    "base_model": "m", "output_dir": "out", "revision": "main", "max_tokens_per_microbatch": 64, "liger": "auto",
    "dtype": "float32", "device": "cpu", "seed": 1, "gradient_checkpointing": False, "trust_remote_code": False,
    "save_every": 1, "eval_every": 1, "schedule": {"method": "auto", "padding_multiple": 1, "time_limit_s": 10},
    "parallel": {"pipeline": 1, "tensor": 1, "expert": 1, "ep_implementation": "all_reduce", "sequence_parallel": False,
                 "shard_base": False},
    "jobs": [{
        "name": "first", "seed": 3,
        "data": {"path": [{"path": "a.jsonl", "weight": 2.0}], "eval_path": ["b.jsonl"], "system": "s", "on_bad_row": "skip",
                 "max_length": 2048, "truncate": "error", "streaming": False, "shuffle_buffer_size": None},
        "adapter": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["q"], "use_rslora": False,
                    "use_dora": False, "dora_dropout": "peft", "bias": "none", "rank_pattern": {"q": 4},
                    "alpha_pattern": {"q": 4.0}, "init_from": "c"},
        "train": {"global_batch_size": 8, "num_train_epochs": 1, "max_steps": -1, "learning_rate": 2e-4,
                  "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0, "loraplus_lr_ratio": 2.0,
                  "max_grad_norm": 1.0,
                  "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "shuffle": True, "drop_last": False,
                  "optim": "adamw_torch", "logging_steps": 1, "neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.0,
                  "lr_scheduler_kwargs": {}, "warmup_ratio": 0.0, "eval_steps": 1, "load_best_model_at_end": True,
                  "metric_for_best_model": "eval_loss",
                  "early_stopping_patience": 2, "early_stopping_threshold": 0.1},
    }],
}  # fmt: skip
TEXT = "base_model: m\noutput_dir: out\njobs:\n  - name: first\n    data: {path: a.jsonl}\n"


def places(node: Any = TREE, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of the run file, with the mappings and lists themselves."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [place for key, value in items for place in [(*at, key), *places(value, (*at, key))]]


def changed(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(TREE)
    node: Any = tree
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return tree


def recursive() -> list[Any]:
    out: list[Any] = []
    out.append(out)
    return out


ODD: dict[str, Any] = {
    "null": None, "true": True, "zero": 0, "one": 1, "negative": -1, "float": 0.5, "negative float": -0.5, "nan": float("nan"),
    "infinity": float("inf"), "huge": 10**30, "enormous": 10**400, "1e308": 1e308, "tiny": 5e-324, "empty text": "",
    "blank": " ", "text": "x", "control": "a\x1b[2Jb", "nul": "a\0b", "newline": "a\nb", "surrogate": "\ud800",
    "unicode": "\N{SNOWMAN}\u202e\U0001f600", "5000 characters": "x" * 5000, "a million characters": "x" * 10**6,
    "empty list": [], "list": [1], "empty mapping": {}, "mapping": {"a": 1}, "10000 items": [1] * 10**4,
    "list in itself": recursive(), "mapping of numbers": {1: 2}, "bytes": b"x", "set": {1}, "~": "~", "bad regex": "((",
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_any_value_at_any_key_is_taken_or_refused_in_few_short_printable_lines(odd: str) -> None:
    for place in places():
        try:
            run = parse_run(changed(place, ODD[odd]), "run.yaml")
        except InputError as error:
            message = str(error)
            assert len(message) < 25_000, place
            assert all(line.isprintable() for line in message.split("\n")), place
            assert any(str(part) in message for part in (*place, "job number")), (place, message)
        else:
            for text in (run.base_model, run.output_dir, run.revision or "x", run.jobs[0].data.sources[0][0]):
                assert text.strip()
                assert text.isprintable() or odd == "unicode"
                os.path.exists(text)  # no error
                assert len(text) < 4096


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("adapter.r", 10**12, "less than or equal to 65536"), ("adapter.lora_alpha", 1e308, "less than or equal to 1000000"),
        ("adapter.lora_alpha", 5e-324, "greater than or equal to 0.000001"),
        ("adapter.lora_alpha", float("nan"), "finite number"), ("adapter.lora_dropout", float("nan"), "finite number"),
        ("adapter.lora_dropout", 1, "less than 1"), ("adapter.lora_dropout", -0.1, "greater than or equal to 0"),
        ("adapter.alpha_pattern", {"q": float("nan")}, "finite number"), ("adapter.alpha_pattern", {"q": 1e308}, "to 1000000"),
        ("adapter.rank_pattern", {"q": 10**12}, "equal to 65536"), ("adapter.rank_pattern", {"(?i)q": 4}, "valid regular"),
        ("adapter.target_modules", "(" * 10000, "valid regular expression"),
        ("adapter.target_modules", "x{99999999999}", "valid regular expression"),
        ("adapter.target_modules", "x" * 10**5, "at most 10000"), ("adapter.target_modules", ["x"] * 10**5, "at most 10000"),
        ("train.adam_epsilon", 1e308, "less than or equal to 1"), ("train.max_grad_norm", 1e308, "less than or equal to 1"),
        ("train.max_steps", 10**30, "less than or equal to 1000000000"), ("train.weight_decay", 1e308, "less than or equal"),
        ("train.num_train_epochs", 1e308, "or equal to 1000000000"), ("data.max_length", 10**12, "equal to 2147483647"),
        ("data.path", "a\0b", r"has the character '\x00'"), ("data.path", "x" * 5000, "5000 characters long"),
        ("data.path", "x" * 256 + "/a.jsonl", "no file system has such a path"), ("data.path", "a/" * 2100, "no file system"),
        ("data.path", "a/" * 101, "101 folders in one another; at most 100"),
        ("data.path", [], "is a list of 0 paths; from 1 to 10000"), ("data.path", ["a"] * 10**5, "list of 100000 paths"),
        ("data.path", [{"path": "a", "weight": 1}, "b"], "a weight at number 0 and none at number 1"),
        ("data.eval_path", [], "is a list of 0 paths"), ("data.on_bad_row", "ignore", "'error' or 'skip'"),
        ("data.system", "", "at least 1 character"), ("data.system", 3, "valid string"),
        ("data.eval_path", "a\x1b[2Jb", r"has the character '\x1b'"), ("adapter.init_from", " ", "is empty"),
        ("name", ".lock", "which packlora itself uses"), ("name", ".LOCK", "which packlora itself uses"),
        ("train.warmup_ratio", 1, "less than 1"), ("train.loraplus_lr_ratio", 0, "greater than 0"),
        ("train.loraplus_lr_ratio", -1, "greater than 0"), ("train.loraplus_lr_ratio", float("nan"), "finite number"),
        ("train.loraplus_lr_ratio", 1e30, "less than or equal to 1000000"), ("train.loraplus_lr_ratio", "2", "valid number"),
        ("train.warmup_ratio", float("nan"), "finite number"),
        ("train.warmup_ratio", -0.1, "greater than or equal to 0"), ("train.eval_steps", -1, "greater than or equal to 0"),
        ("train.eval_steps", 10**30, "less than or equal to 1000000000"), ("train.eval_steps", 1.5, "valid integer"),
        ("train.early_stopping_patience", 0, "greater than or equal to 1"),
        ("train.early_stopping_patience", 10**12, "less than or equal to"),
        ("train.early_stopping_threshold", float("nan"), "finite number"),
        ("train.early_stopping_threshold", -1, "greater than or equal to 0"),
        ("train.load_best_model_at_end", 1, "should be true or false"),
        ("train.metric_for_best_model", "accuracy", "'eval_loss'"), ("train.lr_scheduler_kwargs", [], "should be a mapping"),
        ("train.lr_scheduler_type", "greedy", "'cosine_with_min_lr'"),
        ("train.shuffle", "yes", "should be true or false; found 'yes'"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_with_its_key_the_value_and_what_is_accepted(
    key: str, value: Any, accepted: str
) -> None:
    with pytest.raises(InputError) as caught:
        parse_run(changed(("jobs", 0, *key.split(".")), value), "run.yaml")
    line = str(caught.value).split("\n")[1]
    assert key.split(".")[0] in line
    assert key.split(".")[-1] in line
    assert accepted in line


@pytest.mark.parametrize(
    ("key", "value"),
    [("adapter.r", 1024), ("adapter.r", 65536), ("adapter.lora_alpha", 0.5), ("adapter.lora_alpha", 4096),
     ("adapter.lora_dropout", 0.999), ("adapter.target_modules", r"(?i).*(q|v)_proj"), ("train.max_grad_norm", 1e9),
     ("train.num_train_epochs", 1e6), ("train.num_train_epochs", 0.01), ("train.learning_rate", 1e-12),
     ("train.weight_decay", 10.0), ("adapter.rank_pattern", {"^model.layers.0.*q_proj": 4}), ("seed", None)],
)  # fmt: skip
def test_what_is_unusual_but_sensible_is_accepted(key: str, value: Any) -> None:
    assert parse_run(changed(("jobs", 0, *key.split(".")), value), "run.yaml").jobs[0].name == "first"


# --- YAML --------------------------------------------------------------------------------------------------------------


def load(tmp_path: Path, text: str, *overrides: str) -> Run:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode())
    return load_run(path, list(overrides))


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "text", ["1:30", "010", "-010", "1_000", "0b11", "0o17", "190:20:30", "1e", "+", "0x", "1__0", "2026-01-01"]
)
def test_what_only_yaml_1_1_calls_a_number_or_what_the_versions_read_differently_is_no_number(
    tmp_path: Path, text: str
) -> None:
    assert f"job 'first': train.max_steps: input should be a valid integer; found '{text}'" in refusal(
        tmp_path, TEXT + f"    train: {{max_steps: {text}}}\n"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("+7", 7),
        ("0x1F", 31),
        ("1e3", 1000.0),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("0.5e-1", 0.05),
        ("0", 0),
    ],
)
def test_numbers_on_which_the_versions_of_yaml_agree_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    assert load(tmp_path, TEXT + f"    train: {{weight_decay: {text}}}\n").jobs[0].train.weight_decay == value


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "y"])
def test_a_truth_value_is_true_or_false_and_other_words_are_texts(tmp_path: Path, word: str) -> None:
    assert f"should be true or false; found '{word}'" in refusal(tmp_path, TEXT + f"    train: {{shuffle: {word}}}\n")
    assert load(tmp_path, TEXT.replace("first", word)).jobs[0].name == word
    assert load(tmp_path, TEXT + "    train: {shuffle: False}\n").jobs[0].train.shuffle is False


def test_texts_that_yaml_1_1_would_read_as_numbers_or_dates_stay_texts(tmp_path: Path) -> None:
    run = load(tmp_path, TEXT.replace("name: first", "name: 2026-01-01") + "revision: 0123456\n")
    assert (run.jobs[0].name, run.revision) == ("2026-01-01", "0123456")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("jobs: " + "[" * 5000, "nested too deep"), ("a: " + "{a: " * 5000, "nested too deep"),
        ("".join(" " * n + "a:\n" for n in range(3000)), "nested too deep"), ("a: &a [*a]\n" + TEXT, "a: unknown key"),
        (TEXT + "adapter: &a {b: *a}\n", "adapter: unknown key"), ("seed: " + "9" * 5000 + "\n" + TEXT, "not valid YAML"),
        ("x" * (8 * 2**20 + 1), "larger than 8 MiB"), ("\x1b[2J: 1\n", "not valid YAML"), ("\0", "not valid YAML"),
        ('"\\e[2J": 1\n' + TEXT, "unknown key"),
        ('"\\ud800": 1\n' + TEXT, r"found '\ud800'"), ("? [a]\n: 1\n", "not valid YAML"),
        ("1: 2\n" + TEXT, "keys should be strings; found 1"),
        (TEXT + "seed: 1\n'seed': 2\n", "line 7: the key 'seed' stands here a second time"),
    ],
)  # fmt: skip
def test_a_strange_run_file_is_refused_in_printable_words(tmp_path: Path, text: str, said: str) -> None:
    start = time.process_time()
    message = refusal(tmp_path, text)
    assert said in message
    assert all(line.isprintable() for line in message.split("\n"))
    assert len(message) < 2000
    assert time.process_time() - start < 20


@pytest.mark.parametrize("value", ["!!bool x", "!!float ''", "!!timestamp x", "!!int x", "9" * 5000, "0x" + "f" * 5000])
def test_a_value_that_yaml_cannot_read_is_refused_with_its_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "run.yaml").write_text(TEXT + f"seed: {value}\n")
    with pytest.raises(InputError, match=r"cannot be read as (bool|float|timestamp|int)\n.*line 6, column 7"):
        load_run(tmp_path / "run.yaml")


def test_an_escape_that_is_no_character_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(TEXT + 'revision: "\\UFFFFFFFF"\n')
    with pytest.raises(InputError, match="is not valid YAML"):
        load_run(tmp_path / "run.yaml")


def test_a_run_file_in_another_encoding_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(TEXT.encode("utf-16"))
    with pytest.raises(InputError, match=r"run\.yaml: it is no UTF-8 text .*; save it as UTF-8"):
        load_run(tmp_path / "run.yaml")


def test_a_key_that_is_nothing_is_refused_as_one_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(TEXT + "null: 1\n")
    with pytest.raises(InputError, match=r"\n  keys should be strings; found None"):
        load_run(tmp_path / "run.yaml")


def test_a_run_file_with_a_byte_order_mark_and_windows_lines_is_read(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + TEXT.replace("\n", "\r\n")).jobs[0].name == "first"


def test_an_override_nested_too_deep_is_refused(tmp_path: Path) -> None:
    assert "--set seed: lists or mappings are nested too deep" in refusal(tmp_path, TEXT, "seed=" + "[" * 5000)


# --- paths -------------------------------------------------------------------------------------------------------------


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tree = changed(("base_model",), "~/base") | {"output_dir": "~/out"}
    tree["jobs"][0]["data"] = {"path": "~/a.jsonl", "eval_path": "~/b.jsonl"}
    tree["jobs"][0]["adapter"]["init_from"] = "~"
    run = parse_run(tree, "run.yaml")
    data, adapter = run.jobs[0].data, run.jobs[0].adapter
    assert [run.base_model, run.output_dir, data.path, data.eval_path, adapter.init_from] == [
        f"{tmp_path}/base", f"{tmp_path}/out", f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl", str(tmp_path),
    ]  # fmt: skip
    run.output_dir = "~/other"
    assert run.output_dir == f"{tmp_path}/other"
    assert load(tmp_path, TEXT, "output_dir=~/here").output_dir == f"{tmp_path}/here"


def test_a_tilde_inside_a_name_is_a_tilde(tmp_path: Path) -> None:
    assert load(tmp_path, TEXT, "output_dir=a~b/~c").output_dir == "a~b/~c"


@pytest.mark.parametrize("path", ["\0", "x" * 5000, "loop", "folder"])
def test_a_run_file_path_that_no_file_has_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot read the run file"):
        load_run(f"{tmp_path}/{path}")


def test_what_a_terminal_would_obey_is_spelt_out(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text('"\\e[2Jx": 1\n' + TEXT)
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml")])
    assert result.exit_code == 2
    assert r"\x1b[2Jx: unknown key" in result.stderr
    assert "\x1b" not in result.output
    assert str(InputError("a\x1b[2J\tb\r\nc \u202e\ud800")) == "a\\x1b[2J\\tb\\r\nc \\u202e\\ud800"
