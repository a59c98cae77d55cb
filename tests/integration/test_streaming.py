"""`streaming: true` from a run file: bounded memory, the documented order, exact resume, and numbers of the job alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import WORDS
from test_members import base, job, short_windows, tree_of
from test_training import adapter, distance

import packlora
from packlora.config import Run
from packlora.data import stream as module
from packlora.data.encode import Encoded, Sample
from packlora.data.rows import Row
from packlora.data.stream import Stream, shuffled
from packlora.engine.adapters import AdapterState
from packlora.events import Stepped
from packlora.runtime.prepare import prepare

assert callable(base) and callable(short_windows)  # fixtures
STREAM = {"streaming": True, "truncate": "drop", "on_bad_row": "skip"}


def write(path: Path, count: int, mark: str = "") -> str:
    """Rows of several lengths in one of the formats."""
    rows = [
        {"prompt": f"{WORDS[n % len(WORDS)]} {n}{mark}", "completion": WORDS[n % 7] * (1 + n % 3)} for n in range(count)
    ]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        lines = [f"{row['prompt']},{row['completion']}" for row in rows]
        path.write_text("\n".join(["prompt,completion", *lines]) + "\n")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
    return str(path)


def streamed(name: str, path: Any, folder: Path, **data: Any) -> dict[str, Any]:
    own = job(name, folder, max_steps=9, global_batch_size=3)
    return own | {"data": {"path": path, "eval_path": own["data"]["path"]} | STREAM | data}


def test_a_stream_gives_what_its_job_learns_alone_and_goes_on_to_the_bit(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three formats, several passes and files; beside a job with its data in memory; a bad row and a long one."""
    monkeypatch.setattr(module, "PROBE", 4)
    monkeypatch.setattr(module, "KEPT_BATCHES", 6)
    first = Path(write(tmp_path / "first.jsonl", 11))
    first.write_text("no row\n" + first.read_text() + json.dumps({"prompt": "x " * 90, "completion": "y"}) + "\n")
    paths = [str(first), write(tmp_path / "b.parquet", 7, "b"), write(tmp_path / "c.csv", 5, "c")]
    jobs = [streamed("a", paths, tmp_path, shuffle_buffer_size=6), job("b", tmp_path)]
    tree = tree_of(base, tmp_path, "", "float64", jobs=jobs)
    heard: list[Any] = []
    assert packlora.train(tree, subscribers=[heard.append]).status == "done"
    notes = [event.text for event in heard if type(event).__name__ == "Note"]
    (left,) = [text for text in notes if "left out by on_bad_row, the first: " in text]
    assert re.search(r"of the stream, over all passes, (1 row was|\d+ rows were) left out", left) and "line 1" in left
    (dropped,) = [text for text in notes if "dropped as too long" in text]
    assert re.search(r"of the stream, over all passes, (1 sample was|\d+ samples were) dropped", dropped)
    broken = tree | {"output_dir": str(tmp_path / "broken")}
    packlora.train(broken, max_steps=4)
    packlora.train(broken, resume=True)
    packlora.train(tree | {"jobs": jobs[:1], "output_dir": str(tmp_path / "alone")})
    ours = adapter(tmp_path / "out", "a")
    theirs = adapter(tmp_path / "broken", "a")
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert distance(ours, adapter(tmp_path / "alone", "a")) < 1e-10
    Path(paths[2]).write_text(Path(paths[2]).read_text() + "one,more\n")
    with pytest.raises(packlora.InputError, match="job 'a': its data has changed"):
        packlora.train(broken | {"jobs": jobs}, resume=True, resume_from=["a=2"])


def streaming(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, *others: dict[str, Any]
) -> tuple[dict[str, Any], Path]:
    """A run whose jobs of these names read one stream, and its file, which they come to the end of again and again."""
    monkeypatch.setattr(module, "PROBE", 4)
    path = Path(write(tmp_path / "rows.jsonl", 30))
    train = {"train": {"max_steps": 30, "global_batch_size": 2}}
    jobs = [*(streamed(name, str(path), tmp_path) | train for name in names), *others]
    return tree_of(base, tmp_path, "", "float32", jobs=jobs, save_every=0), path


def test_where_a_stream_is_gone_what_the_jobs_have_learnt_is_saved_and_the_run_goes_on_when_it_is_back(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, path = streaming(base, tmp_path, monkeypatch, "a", job("b", tmp_path))
    assert packlora.train(tree | {"output_dir": str(tmp_path / "whole")}).status == "done"
    away = path.with_suffix(".away")

    def take_away(event: Any) -> None:
        if isinstance(event, Stepped) and (event.job, event.step) == ("a", 3):
            path.rename(away)

    with pytest.raises(packlora.InputError, match=r"rows\.jsonl does not exist\. Kept: a: step (\d+) of \1, b: "):
        packlora.train(tree, subscribers=[take_away])
    assert json.loads((tmp_path / "out" / "run.json").read_text())["result"]["status"] == "interrupted"
    away.rename(path)
    assert packlora.train(tree, resume=True).status == "done"
    for name in "ab":
        ours, theirs = (adapter(tmp_path / folder, name) for folder in ("out", "whole"))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_job_in_the_middle_of_its_step_is_not_saved_when_the_run_ends(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters have moved and its number of steps has not."""
    tree, path = streaming(base, tmp_path, monkeypatch, "ab")

    def take_away(event: Any) -> None:
        if isinstance(event, Stepped) and (event.job, event.step) == ("a", 3):
            path.unlink()

    monkeypatch.setattr(AdapterState, "is_stepping", property(lambda state: state.adapter.name == "b"))
    with pytest.raises(packlora.InputError, match=r"Kept: a: step (\d+) of \1, b: step 0 of [1-9]"):
        packlora.train(tree, subscribers=[take_away])


def test_without_shuffling_a_stream_is_the_file_over_and_over(base: str, tmp_path: Path) -> None:
    """It learns to the bit what the file learns, in memory and in file order, where epochs are whole global batches."""
    path = write(tmp_path / "rows.jsonl", 12)
    plain = job("d", tmp_path, max_steps=9, global_batch_size=3, shuffle=False)  # dropout would know samples by number
    plain["data"]["path"] = path
    own = streamed("b", path, tmp_path) | {"adapter": plain["adapter"], "train": plain["train"]}
    packlora.train(tree_of(base, tmp_path, "", "float32", jobs=[plain]))
    packlora.train(tree_of(base, tmp_path, "", "float32", jobs=[own], output_dir=str(tmp_path / "streamed")))
    ours, theirs = adapter(tmp_path / "streamed", "b"), adapter(tmp_path / "out", "d")
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def sample_of(row: Row) -> Sample:
    return Sample(np.full(4, int(row.text or 0), np.int32), np.arange(4) > 0)


def some_stream(tmp_path: Path, rows: int, buffer: int, seed: int = 3) -> tuple[Stream, list[int]]:
    """With a list that counts what is encoded."""
    path = tmp_path / "numbers.jsonl"
    path.write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(rows)))
    made: list[int] = []

    def encode(some: Any) -> Encoded:
        made.append(len(some))
        return Encoded([sample_of(row) for row in some])

    return Stream("a", [str(path)], seed, buffer, encode, 20, 5), made


def values(stream: Stream, numbers: Any) -> list[int]:
    return [int(stream[number].ids[0]) for number in numbers]


def test_every_pass_has_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    stream, _ = some_stream(tmp_path, 100, 30)
    passes = [values(stream, range(start, start + 100)) for start in (0, 100, 200)]
    assert all(sorted(own) == list(range(100)) for own in passes)
    assert passes[0] != passes[1] != passes[2] != sorted(passes[2])
    assert max(row - place for place, row in enumerate(passes[0])) < 30, "no row comes before the buffer reaches it"
    assert values(some_stream(tmp_path, 100, 30)[0], range(100)) == passes[0]
    assert values(some_stream(tmp_path, 100, 30, seed=4)[0], range(100)) != passes[0]
    assert values(some_stream(tmp_path, 100, 0)[0], range(150)) == [*range(100), *range(50)]
    rows = iter([Row(str(n), text=str(n)) for n in range(9)])
    assert sorted(int(row.text or 0) for row in shuffled(rows, 50, 1)) == list(range(9))


def test_memory_is_bounded_and_what_was_let_go_is_read_again(tmp_path: Path) -> None:
    stream, made = some_stream(tmp_path, 1000, 50)
    want = values(stream, range(3000))
    assert len(stream._held) <= 21
    assert sum(made) <= 3000 + 3 * 64
    other, _ = some_stream(tmp_path, 1000, 50)
    assert values(other, range(2500, 2600)) == want[2500:2600], "as of a resumed run"
    assert len(other._held) <= 21
    assert values(stream, [700, 701]) == want[700:702]
    assert values(stream, [2, 2999]) == [want[2], want[2999]]


def test_data_larger_than_the_memory_that_is_used(base: str, tmp_path: Path) -> None:
    """Preparing a run reads a small part of the file."""
    path = tmp_path / "large.jsonl"
    line = json.dumps({"prompt": "one two", "completion": "three"}) + "\n"
    path.write_text(line * 20_000)
    read = 0
    original: Callable[..., Any] = module.rows_of

    def counting(*args: Any) -> Any:
        nonlocal read
        for row in original(*args):
            read += 1
            yield row

    module.rows_of = counting
    try:
        tree = tree_of(base, tmp_path, "", "float32", jobs=[streamed("a", str(path), tmp_path)])
        prepared = prepare(Run.model_validate(tree))
    finally:
        module.rows_of = original
    assert read < 1500
    assert prepared.jobs[0].longest == 60, "the microbatch's, as nobody knows the longest"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"content": ""}, "has no rows|no sample"),
        (
            {"content": "no row\n" * 5},
            "a whole pass over the data has no sample within its limits, the first row: .*line 1",
        ),
        (
            {"content": 3 * (json.dumps({"prompt": "a;" * 99, "completion": "b"}) + "\n")},
            "no sample within its limits; 3 are too long: raise max_length or max_tokens_per_microbatch",
        ),
        ({"suffix": ".json"}, "is read whole, not row by row; write it as .jsonl to stream it"),
    ],
)
def test_a_stream_without_samples_is_refused_before_training(
    changed: dict[str, str], said: str, base: str, tmp_path: Path
) -> None:
    path = tmp_path / f"rows{changed.get('suffix', '.jsonl')}"
    path.write_text(changed.get("content", "[]"))
    with pytest.raises(packlora.InputError, match=said):
        packlora.train(tree_of(base, tmp_path, "", "float32", jobs=[streamed("a", str(path), tmp_path)]))
    assert not (tmp_path / "out").exists()
