"""Requests to a run that trains which cannot be met, and faults in the middle of one: the run goes on as if there were none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_members import adapter, at_window, base, distance, job, losses, request, short_windows, tree_of

import packlora
from packlora import files
from packlora.adapters.files import CONFIG, WEIGHTS
from packlora.sweep import members, open_members
from packlora.sweep.changes import START

__all__ = ["base", "short_windows"]


def add(*jobs: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "add", "jobs": list(jobs)}


def clone(*overrides: str, name: str = "b", weights: bool = False) -> dict[str, Any]:
    return {"kind": "clone", "job": "a", "name": name, "overrides": list(overrides), "weights": weights}


def answers(out: Path) -> list[dict[str, Any]]:
    """In the order of their requests."""
    return [json.loads(path.read_text()) for path in sorted((out / "control").glob("answer-*"))]


def answer_of(base: str, folder: Path, ask: Callable[[], Any], **changes: Any) -> dict[str, Any]:
    """What became of the only request to a run, whose own job ended as ever."""
    result = packlora.train(tree_of(base, folder, "a", **changes), subscribers=[at_window(0, ask)])
    (answer,) = answers(folder / "out")
    assert result.jobs["a"].status == "done" and result.jobs["a"].step == 6
    return answer


# --- names of folders that are there ---------------------------------------------------------------------------------------


def a_file(at: Path, _: Path) -> None:
    at.write_text("mine")


def a_pipe(at: Path, _: Path) -> None:
    os.mkfifo(at)


def a_dangling_link(at: Path, elsewhere: Path) -> None:
    at.symlink_to(elsewhere / "nowhere")


def a_link_to_itself(at: Path, _: Path) -> None:
    at.symlink_to(at)


def a_link_to_a_folder(at: Path, elsewhere: Path) -> None:
    (elsewhere / "theirs" / START).mkdir(parents=True)
    at.symlink_to(elsewhere / "theirs")


def a_folder_with_a_file(at: Path, _: Path) -> None:
    at.mkdir()
    (at / START).write_text("mine")


def a_folder_with_a_link(at: Path, elsewhere: Path) -> None:
    at.mkdir()
    (at / START).symlink_to(elsewhere)


def test_a_job_of_the_name_of_something_in_the_output_folder_is_refused_and_that_stays(
    base: str, tmp_path: Path
) -> None:
    tree, out = tree_of(base, tmp_path, "a"), tmp_path / "out"
    kinds = [
        a_file,
        a_pipe,
        a_dangling_link,
        a_link_to_itself,
        a_link_to_a_folder,
        a_folder_with_a_file,
        a_folder_with_a_link,
    ]
    names = [f"b{number}" for number, _ in enumerate(kinds)]

    def ask() -> None:
        for name, there in zip(names, kinds, strict=True):
            there(out / name, tmp_path)
            request(out, add(job("b", tmp_path) | {"name": name}))
            request(out, clone(name=name))
            request(out, clone(name=name, weights=True))

    result = packlora.train(tree, subscribers=[at_window(0, ask)])
    assert result.status == "done" and list(result.jobs) == ["a"]
    for own, name in zip(answers(out), [name for name in names for _ in range(3)], strict=True):
        assert not own["accepted"] and f"{name} is there already; choose another name" in own["text"]
    assert all(os.path.lexists(out / name) for name in names)
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == [START]


def test_a_folder_that_cannot_be_listed_is_refused(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, out = os.listdir, tmp_path / "out"

    def listdir(path: Any = ".") -> list[str]:
        if str(path) == str(out / "b"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    def ask() -> None:
        (out / "b").mkdir()
        monkeypatch.setattr(os, "listdir", listdir)
        request(out, clone())

    answer = answer_of(base, tmp_path, ask)
    assert not answer["accepted"] and "b is there already; choose another name" in answer["text"]


def test_a_folder_that_was_made_for_a_job_whose_run_was_killed_before_it_was_recorded_is_taken(
    base: str, tmp_path: Path
) -> None:
    """Also where the adapter that it was to begin with was half written."""

    def ask() -> None:
        (tmp_path / "out" / "b" / f"{files.TEMPORARY}{START}").mkdir(parents=True)
        request(tmp_path / "out", clone())

    assert answer_of(base, tmp_path, ask)["accepted"]


def test_a_job_whose_folder_cannot_be_made_is_refused(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = files.make_folder

    def make(path: Path) -> None:
        if path.name == "b":
            raise OSError(122, "Disk quota exceeded", str(path))
        original(path)

    monkeypatch.setattr(files, "make_folder", make)
    answer = answer_of(base, tmp_path, lambda: request(tmp_path / "out", clone()))
    assert not answer["accepted"] and "Disk quota exceeded" in answer["text"]
    assert not (tmp_path / "out" / "b").exists()


# --- faults in the middle --------------------------------------------------------------------------------------------------


ERRORS: list[tuple[Exception, str]] = [
    (OSError(5, "Input/output error", "data"), "Input/output error"),
    (MemoryError(), "memory is used up"),
    (RuntimeError("a library's own words\nand more"), "RuntimeError: a library's own words"),
    (KeyError("x"), "KeyError: 'x'"),
    (RecursionError("maximum recursion depth exceeded"), "RecursionError: maximum"),
    (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), "surrogates not allowed"),
]


def test_whatever_goes_wrong_while_a_request_is_looked_at_is_its_refusal(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, out = tree_of(base, tmp_path, "a"), tmp_path / "out"
    asked = [add(job("c", tmp_path)), clone(name="c"), clone(name="c", weights=True)]
    wrong = [(error, said, one) for error, said in ERRORS for one in asked]
    errors = iter([error for error, _, _ in wrong])

    def broken(*_: Any) -> None:
        raise next(errors)

    def ask() -> None:
        monkeypatch.setattr(members, "prepare_more", broken)
        for _, _, one in wrong:
            request(out, one)

    result = packlora.train(tree, subscribers=[at_window(0, ask)])
    assert result.status == "done" and list(result.jobs) == ["a"]
    for own, (_, said, _) in zip(answers(out), wrong, strict=True):
        assert not own["accepted"] and "job 'c': " in own["text"] and said in own["text"] and "\n" not in own["text"]
    assert not (out / "c").exists()


def test_a_change_that_cannot_be_recorded_is_refused_and_not_made(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, out = tree_of(base, tmp_path, "a"), tmp_path / "out"
    asked: list[Any] = [{"kind": "stop", "job": "a"}, clone(), clone(weights=True)]
    errors = iter([OSError(28, "No space left on device")] * 3 + [ValueError("Out of range float values")] * 3)

    def broken(*_: Any) -> None:
        raise next(errors)

    def ask() -> None:
        monkeypatch.setattr("packlora.runtime.record.RunRecord.amend", broken)
        for one in asked * 2:
            request(out, one)

    result = packlora.train(tree, subscribers=[at_window(2, ask)])  # a step was taken, so the job could be stopped
    given = answers(out)
    assert len(given) == 6 and not any(own["accepted"] for own in given) and not (out / "b").exists()
    assert all("run.json cannot be written: " in own["text"] for own in given)
    assert result.status == "done" and list(result.jobs) == ["a"]
    packlora.train(tree | {"output_dir": str(tmp_path / "whole")})
    assert losses(out, "a") == losses(tmp_path / "whole", "a")


def test_a_start_that_is_gone_when_it_is_read_is_a_refusal_and_the_layers_are_as_they_were(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when it was looked at."""
    start, tree, original = tmp_path / "start", tree_of(base, tmp_path, "a"), members.make_job
    packlora.train({**tree, "output_dir": str(start)})

    def later(*args: Any) -> Any:
        (start / "a" / WEIGHTS).write_bytes(b"not what it was")
        return original(*args)

    def ask() -> None:
        monkeypatch.setattr(members, "make_job", later)
        request(tmp_path / "out", add(job("d", tmp_path) | {"adapter": {"init_from": str(start / "a")}}))

    answer = answer_of(base, tmp_path, ask)
    assert not answer["accepted"] and WEIGHTS in answer["text"]
    assert losses(tmp_path / "out", "a") == losses(start, "a")
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert list(record["jobs"]) == ["a"] and record["changes"] == []


def test_a_job_that_finds_no_memory_is_refused_and_one_that_does_joins_later(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two layers has its adapter by then. It is tried twice."""
    original, count, out = members.attach_one, list[int](), tmp_path / "out"

    def full(*args: Any) -> Any:
        count.append(1)
        made = original(*args)
        if len(count) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return made

    monkeypatch.setattr(members, "attach_one", full)
    tree = tree_of(base, tmp_path, "a")
    asks = [at_window(at, lambda: request(out, clone("train.learning_rate=2e-2"))) for at in (0, 2)]
    result = packlora.train(tree, subscribers=asks)
    first, second = answers(out)
    assert not first["accepted"] and "out of memory on cpu as job 'b' joined" in first["text"]
    assert second["accepted"] and result.status == "done" and list(result.jobs) == ["a", "b"]
    for own in (
        tree["jobs"][0],
        tree["jobs"][0] | {"name": "b", "train": {**tree["jobs"][0]["train"], "learning_rate": 2e-2}},
    ):
        packlora.train({**tree, "jobs": [own], "output_dir": str(tmp_path / own["name"])})
        assert distance(adapter(out, own["name"]), adapter(tmp_path / own["name"], own["name"])) < 1e-10


def test_an_answer_that_cannot_be_written_costs_the_answer_alone(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    def ask() -> None:
        monkeypatch.setattr("packlora.sweep.control.write_json", broken)
        request(tmp_path / "out", {"kind": "stop", "job": "z"})

    assert packlora.train(tree_of(base, tmp_path, "a"), subscribers=[at_window(0, ask)]).status == "done"


# --- many at once ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hostile(tmp_path: Path) -> list[Any]:
    """Requests that no run takes."""
    data = tmp_path / "hostile"
    (data / "set").mkdir(parents=True)
    (data / "start").mkdir()
    files = {
        "empty.jsonl": "", "deep.jsonl": '{"prompt":' + "[" * 100_000 + "\n",
        "half.jsonl": '{"prompt":"\\ud800","completion":"a"}\n',
        "role.jsonl": '{"messages":[{"role":"\\ud800","content":"a"},{"role":"assistant","content":"b"}]}\n',
        "none.parquet": "PAR1" + "\0" * 50 + "PAR1",
    }  # fmt: skip
    for name, text in files.items():
        (data / name).write_text(text)
    os.mkfifo(data / "pipe.jsonl")
    os.mkfifo(data / "set" / "state.json")
    (data / "zero.jsonl").symlink_to("/dev/zero")
    (data / "loop.jsonl").symlink_to(data / "loop.jsonl")
    (data / "start" / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}))
    os.mkfifo(data / "start" / WEIGHTS)
    paths = [*files, "pipe.jsonl", "set", "zero.jsonl", "loop.jsonl", "**/*", "missing/set"]
    bomb = "[&a0 [x,x,x,x,x,x,x,x,x]" + "".join(
        f", &a{at} [{','.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 9)
    )  # 9**9 texts
    overrides = [
        "train.learning_rate=.nan", "train.learning_rate=1e300", "train.max_steps=" + "9" * 5000, "data=" + "[" * 5000,
        f"adapter.target_modules={bomb}]", "adapter.rank_pattern=&a {x: *a}", "data.system=!!binary aGFsbG8=",
        "data.system=!!python/object/apply:os.system [id]", 'sample_prompts=["\\ud800"]', "=1", "...=1", "name.x=1",
        ".".join(["a"] * 5000) + "=1", "adapter.target_modules=(a+)+$", "adapter.rank_pattern={'(': 2}", "data.max_length=2",
        "train.trainer=kto", "adapter.lora_alpha=1e-300", "seed=-1", "train.lr_scheduler_kwargs={min_lr: .inf}",
        "data.streaming=true", "train.num_train_epochs=1e300", "adapter.modules_to_save=[nope]",
        "data.eval_path=/nowhere.jsonl",
    ]  # fmt: skip
    names = ["..", "../a", "b" * 5000, "b\0", "", "run.json", ".lock", ".tmp-old-a", "CONTROL", "A", "sweep.json/x"]
    asked = [clone(f"data.path={data / path}") for path in paths] + [clone(own) for own in overrides]
    asked += [clone(name=name, weights=weights) for name in names for weights in (False, True)]
    asked += [
        add(job("c", tmp_path), job("c", tmp_path)), add(job("c", tmp_path), job("d", tmp_path) | {"seed": "${HOME}"}),
        add(job("c", tmp_path) | {"adapter": {"init_from": str(data / "start")}}),
        add(job("c", tmp_path) | {"adapter": {"init_from": str(tmp_path / "out" / "c" / START)}}),
        {"kind": "stop", "job": "x" * 10**6}, {"kind": "stop", "job": "../a"}, {"kind": ["add"]}, {"kind": "add", "jobs": []},
        {"kind": "add", "jobs": [None]}, {"kind": "stop", "job": "\ud800"}, {"kind": "stop"}, 5, None, [], "stop",
        {"kind": "clone", "job": "z", "name": "b"}, {"kind": "clone", "job": "a", "name": "b", "weights": "yes"},
    ]  # fmt: skip
    return asked


def test_hostile_requests_are_all_refused_and_cost_the_run_not_one_bit(
    hostile: list[Any], base: str, tmp_path: Path
) -> None:
    tree, out = tree_of(base, tmp_path, "a", "float32"), tmp_path / "out"

    def ask() -> None:
        (out / "control").mkdir()
        for number, tree in enumerate(hostile):
            (out / "control" / f"request-{number:016x}.json").write_text(json.dumps(tree))
        for number, raw in enumerate(
            [b"\xff\xfe", b'{"kind": "stop"', b"[" * 10**6, b" " * (8 * 2**20 + 1)], len(hostile)
        ):
            (out / "control" / f"request-{number:016x}.json").write_bytes(raw)

    result = packlora.train(tree, subscribers=[at_window(0, ask)])
    given = {int(path.name[7:23], 16): json.loads(path.read_text()) for path in (out / "control").glob("answer-*")}
    assert result.status == "done" and list(result.jobs) == ["a"]
    accepted = [hostile[number] for number, own in given.items() if own["accepted"]]
    assert not accepted and sorted(given) == list(range(len(hostile) + 4))
    assert all(len(own["text"]) < 5000 for own in given.values())
    packlora.train({**tree, "output_dir": str(tmp_path / "whole")})
    assert (out / "a" / WEIGHTS).read_bytes() == (tmp_path / "whole" / "a" / WEIGHTS).read_bytes()
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["a", "control"]


# --- what ends a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RuntimeError("a defect"), OSError(5, "Input/output error")], ids=["defect", "system"]
)
def test_whatever_ends_a_run_its_jobs_are_saved_as_they_are(
    error: Exception, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, out = tree_of(base, tmp_path, "ad", save_every=0), tmp_path / "out"
    original = open_members.OpenMembers.change

    def broken(*_: Any) -> None:
        raise error

    def at_once() -> None:
        monkeypatch.setattr(open_members.OpenMembers, "change", broken)
        request(out, {"kind": "stop", "job": "z"})

    with pytest.raises(type(error)) as caught:
        packlora.train(tree, subscribers=[at_window(2, at_once)])
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert "Kept: a: step 4 of 4, d: step 4 of 4. Then continue with --resume" in told
    assert json.loads((out / "run.json").read_text())["result"]["status"] == "interrupted"
    monkeypatch.setattr(open_members.OpenMembers, "change", original)
    assert packlora.train(tree, resume=True).status == "done"
    packlora.train({**tree, "output_dir": str(tmp_path / "whole")})
    for name in "ad":
        assert distance(adapter(out, name), adapter(tmp_path / "whole", name)) < 1e-12
