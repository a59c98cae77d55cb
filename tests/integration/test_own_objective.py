"""A loss of a user's own, by the run file: copies of built-in losses give their numbers, and what cannot be used is refused
before training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import WORDS
from test_preference import evals, pairs
from test_training import adapter, distance, steps, train

from packlora.config import BUILT_IN, Run
from packlora.errors import InputError
from packlora.runtime.prepare import prepare

COPIES = """
import torch

def sft(logp, rows):
    return -logp

def dpo(logp, rows):
    group, gain = rows.column("group"), logp - rows.column("reference")
    chosen, rejected = (rows.per_sample(torch.where(group == n, gain, 0.0)) for n in (1, 2))
    margin = 0.3 * (chosen - rejected)
    return -torch.nn.functional.logsigmoid(margin), {"margin": margin}
"""
TRAIN: dict[str, Any] = {"global_batch_size": 4, "learning_rate": 1e-2, "max_steps": 3}


def rows(path: Path, **fields: Callable[[int], Any]) -> str:
    """Rows of completions with more fields."""
    draw = np.random.default_rng(4)
    lines = []
    for n in range(9):
        words = [WORDS[k] for k in draw.integers(0, len(WORDS), 9)]
        more = {name: value(n) for name, value in fields.items()}
        lines.append({"prompt": " ".join(words[:3]), "completion": " ".join(words[3 : 5 + n % 4])} | more)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def tree(base: str, out: Path, jobs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    common = {"base_model": base, "output_dir": str(out), "device": "cpu", "dtype": "float64", "eval_every": 2}
    return common | {"max_tokens_per_microbatch": 90, "jobs": jobs} | more


def job(name: str, path: str, head: bool = False, **own: Any) -> dict[str, Any]:
    targets = ["q_proj", "down_proj"] + ["lm_head"] * head
    lora = {"r": 4, "lora_dropout": 0.1, "target_modules": targets}
    return {"name": name, "data": {"path": path, "eval_path": path}, "adapter": lora, "train": TRAIN | own}


@pytest.mark.parametrize("head", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_copies_of_built_in_losses_give_their_numbers_beside_them_and_resumed(
    head: bool, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    """The copies log a metric of their own as well."""
    mine, texts, ours = tmp_path / "mine.py", rows(tmp_path / "rows.jsonl"), pairs(tmp_path / "pairs.jsonl")
    mine.write_text(COPIES)
    jobs = [
        job("sft", texts, head),
        job("my-sft", texts, head, objective=f"{mine}:sft"),
        job("dpo", ours, head, trainer="dpo", beta=0.3),
        job("my-dpo", ours, head, trainer="dpo", objective=f"{mine}:dpo"),
    ]
    asked = tree(tiny_base("shallow"), tmp_path / "out", jobs)
    train(asked)
    parts = asked | {"output_dir": str(tmp_path / "parts")}
    train(parts, max_steps=1)
    train(parts, resume=True)
    for name in ("sft", "dpo"):
        assert distance(adapter(tmp_path / "out", f"my-{name}"), adapter(tmp_path / "out", name)) < 1e-10
        for log in (
            lambda of: [line for line in steps(tmp_path / "out") if line["job"] == of],
            partial(evals, tmp_path / "out"),
        ):
            for found, wanted in zip(log(f"my-{name}"), log(name), strict=True):
                keys = [key for key in ("loss", "grad_norm", "eval_loss") if key in wanted]
                assert [found[key] for key in keys] == pytest.approx([wanted[key] for key in keys], rel=1e-10)
        whole, resumed = adapter(tmp_path / "out", f"my-{name}"), adapter(tmp_path / "parts", f"my-{name}")
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    theirs, mine_too = ([line for line in steps(tmp_path / "out") if line["job"] == name] for name in ("dpo", "my-dpo"))
    for one, two in zip(theirs, mine_too, strict=True):
        assert two["objective/margin"] == pytest.approx(one["rewards/margins"], rel=1e-9)
    assert "eval_objective/margin" in evals(tmp_path / "out", "my-dpo")[-1]


def test_fields_of_the_data_weigh_labels_and_samples(tiny_base: Callable[..., str], tmp_path: Path) -> None:
    """A weight of 2 for all labels is twice the loss; of 0 for one half of the rows it is the loss of the others."""
    mine = tmp_path / "mine.py"
    mine.write_text('def f(logp, rows):\n    return -rows.column("w") * logp\nf.weights = "row"\n')
    even = rows(tmp_path / "even.jsonl", w=lambda n: n % 2)
    jobs = [
        job("plain", rows(tmp_path / "plain.jsonl"), True, max_grad_norm=0),
        job("twice", rows(tmp_path / "two.jsonl", w=lambda n: 2.0), True, max_grad_norm=0, objective=f"{mine}:f"),
        job("even", even, True, objective=f"{mine}:f"),
    ]
    train(tree(tiny_base("shallow"), tmp_path / "out", jobs))
    first = {line["job"]: line for line in steps(tmp_path / "out") if line["step"] == 1}
    assert first["twice"]["loss"] == pytest.approx(2 * first["plain"]["loss"], rel=1e-12)
    assert first["twice"]["grad_norm"] == pytest.approx(2 * first["plain"]["grad_norm"], rel=1e-9)
    assert 0 < first["even"]["loss"] < first["plain"]["loss"]


def test_a_list_of_numbers_is_one_for_each_label_also_where_a_sample_is_cut(
    tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    mine, data = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    mine.write_text('def f(logp, rows):\n    return -rows.column("w") * logp\n')
    ids = list(range(5, 17))
    data.write_text(json.dumps({"input_ids": ids, "labels": [-100] * 4 + ids[4:], "w": list(range(8))}) + "\n")
    one = job("a", str(data), objective=f"{mine}:f")
    one["data"] |= {"max_length": 9, "truncate": "right"}
    (sample,) = prepare(Run.model_validate(tree(tiny_base("shallow"), tmp_path / "out", [one]))).jobs[0].encoded.samples
    assert sample.num_labels == 5 and sample.columns["w"].tolist() == [0, 1, 2, 3, 4]


REFUSED: dict[str, tuple[str, str]] = {
    "no file": ("", r"there is no file .*mine\.py"),
    "no function": ("def g(logp, rows):\n    return -logp\n", r"has no 'f'; it has g"),
    "does not run": ("import nothing_of_the_kind\n", r"mine\.py, line 1, failed: ModuleNotFoundError"),
    "not Python": ("def f(logp, rows)\n", r"mine\.py, line 1, failed: SyntaxError"),
    "raises": ("def f(logp, rows):\n    return logp / 0 + missing\n", r"mine\.py, line 2, failed: NameError"),
    "a number": ("def f(logp, rows):\n    return 3.0\n", r"it returned a float; it returns losses, a tensor"),
    "another shape": (
        "def f(logp, rows):\n    return -logp[1:]\n",
        r"have the shape \(\d+,\); they are one for each of",
    ),
    "no gradient": ("def f(logp, rows):\n    return -logp.detach()\n", r"do not depend on the log-probabilities"),
    "not finite": ("def f(logp, rows):\n    return -logp / 0\n", r"are not finite"),
    "waits": (
        "def f(logp, rows):\n    if logp.sum().item() > 0:\n        return logp\n    return -logp\n",
        r"mine\.py, line 2, reads a value of a tensor, which waits for the device",
    ),
    "another device": (
        "import torch\ndef f(logp, rows):\n    return -rows.per_sample(logp) / torch.tensor(rows.lengths)\n",
        r"mine\.py, line 3, has a tensor on another device than logp; make it with device=logp\.device$",
    ),
    "no field": (
        'def f(logp, rows):\n    return -rows.column("w") * logp\n',
        r"rows\.jsonl, line 6: the row has no numbers in a field 'w', which rows\.column\('w'\) in .*mine\.py, line 2 asks for",
    ),
    "text in a field": (
        'def f(logp, rows):\n    return -rows.column("text") * logp\n',
        r"line 1: .* no numbers in a field 'text'",
    ),
    "another number": (
        'def f(logp, rows):\n    return -rows.column("v") * logp\n',
        r"field 'v' has 2 numbers for \d+ label tokens",
    ),
    "rows that meet": (
        "def f(logp, rows):\n    return -logp * logp.detach().mean()\nf.weights = 'row'\n",
        r"a label's gradient depends on other labels; leave the attribute out",
    ),
    "weights": (
        "def f(logp, rows):\n    return -logp\nf.weights = 'all'\n",
        r"`weights` is 'all'; it is one of row, sample",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_used_is_refused_before_training(
    what: str, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    text, words = REFUSED[what]
    if text:
        (tmp_path / "mine.py").write_text(text)
    path = rows(tmp_path / "rows.jsonl", v=lambda n: [1.0, 2.0], said=lambda n: "x")
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    kept = [line | {"w": 1.0} if n != 5 else line for n, line in enumerate(lines)]
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in kept))
    asked = tree(tiny_base("shallow"), tmp_path / "out", [job("a", path, objective=f"{tmp_path / 'mine.py'}:f")])
    with pytest.raises(InputError, match=f"job 'a': .*{words}"):
        prepare(Run.model_validate(asked))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"objective": "reward.txt:f"}, "names a function in a file"),
        ({"objective": "reward.py"}, "names a function in a file"),
        ({"objective": "r.py:f", "trainer": "dpo", "beta": 0.2}, "beta is of a loss whose place objective takes"),
        ({"objective": "r.py:f", "label_smoothing_factor": 0.1}, "label_smoothing_factor is of a loss whose place"),
    ],
)
def test_keys_that_do_not_go_with_it_are_refused(keys: dict[str, Any], words: str) -> None:
    values = {"base_model": "x", "output_dir": "y", "jobs": [{"name": "a", "data": {"path": "z"}, "train": keys}]}
    with pytest.raises(ValueError, match=words):
        Run.model_validate(values)
    streamed = {"path": "z", "streaming": True, "truncate": "drop", "on_bad_row": "skip"}
    own = {"name": "a", "data": streamed, "train": {"objective": "r.py:f", "max_steps": 2}}
    with pytest.raises(ValueError, match="tried on all rows before training"):
        Run.model_validate(values | {"jobs": [own]})


def test_samples_have_the_fields_of_their_rows_where_a_built_in_loss_reads_them(
    tiny_base: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows(tmp_path / "rows.jsonl", importance=lambda n: n / 2)
    asked = tree(tiny_base("shallow"), tmp_path / "out", [job("a", path)])
    assert not any(sample.columns for sample in prepare(Run.model_validate(asked)).jobs[0].encoded.samples)
    monkeypatch.setitem(BUILT_IN, "sft", replace(BUILT_IN["sft"], reads_fields=True))
    samples = prepare(Run.model_validate(asked)).jobs[0].encoded.samples
    assert [float(sample.columns["importance"]) for sample in samples] == [n / 2 for n in range(9)]
    asked["jobs"][0]["data"] = {"path": path, "streaming": True, "truncate": "drop", "on_bad_row": "skip"}
    with pytest.raises(ValueError, match="tried on all rows before training"):
        Run.model_validate(asked)


def test_the_example_trains(tiny_base: Callable[..., str], tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "own_loss.py"
    path = rows(tmp_path / "rows.jsonl", advantage=lambda n: (-1) ** n * 0.5, logprobs=lambda n: -6.0)
    train(tree(tiny_base("shallow"), tmp_path / "out", [job("a", path, True, objective=f"{example}:loss")]))
    assert all(line["objective/ratio"] > 0 for line in steps(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved"])
def test_fields_are_read_from_files_of_every_kind(kind: str, tiny_base: Callable[..., str], tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    given = rows(tmp_path / "rows.jsonl", w=lambda n: n / 4, label=lambda n: n % 2)
    lines, path = [json.loads(line) for line in Path(given).read_text().splitlines()], tmp_path / f"other.{kind}"
    if kind == "jsonl":
        path = Path(given)
    elif kind == "json":
        path.write_text(json.dumps(lines))
    elif kind == "csv":
        cells = [",".join(map(str, line.values())) for line in lines]
        path.write_text("\n".join([",".join(lines[0]), *cells]) + "\n")
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), path)
    else:
        path.mkdir()
        table = pyarrow.Table.from_pylist(lines)
        with pyarrow.ipc.new_stream(str(path / "data.arrow"), table.schema) as stream:
            stream.write_table(table)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    mine = tmp_path / "mine.py"
    mine.write_text('def f(logp, rows):\n    return -rows.column("w") * rows.column("label") * logp\n')
    one = job("a", str(path), objective=f"{mine}:f")
    samples = prepare(Run.model_validate(tree(tiny_base("shallow"), tmp_path / "out", [one]))).jobs[0].encoded.samples
    found = {name: [float(sample.columns[name]) for sample in samples] for name in ("w", "label")}
    assert found == {"w": [n / 4 for n in range(9)], "label": [n % 2 for n in range(9)]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, [1.0, None], [[1.0]], {"a": 1}, "much", 10**400])
def test_a_field_that_is_no_finite_number_is_refused_with_its_line(
    value: Any, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text('def f(logp, rows):\n    return -rows.column("w") * logp\n')
    path = rows(tmp_path / "rows.jsonl", w=lambda n: value if n == 3 else 1.0)
    asked = tree(tiny_base("shallow"), tmp_path / "out", [job("a", path, objective=f"{mine}:f")])
    with pytest.raises(InputError, match=r"job 'a': .*rows\.jsonl, line 4: "):
        prepare(Run.model_validate(asked))


def test_a_run_is_not_resumed_with_another_loss(tiny_base: Callable[..., str], tmp_path: Path) -> None:
    mine, path = tmp_path / "mine.py", rows(tmp_path / "rows.jsonl")
    mine.write_text("def f(logp, rows):\n    return -logp\n")
    asked = tree(tiny_base("shallow"), tmp_path / "out", [job("a", path, objective=f"{mine}:f")])
    train(asked, max_steps=1)
    mine.write_text("def f(logp, rows):\n    return -2 * logp\n")
    with pytest.raises(InputError, match=r"job 'a': the file of train\.objective .* is not the one that the run began"):
        train(asked, resume=True)
    mine.write_text("def f(logp, rows):\n    return -logp\n")
    train(asked, resume=True)
    assert [line["step"] for line in steps(tmp_path / "out")] == [1, 2, 3]
