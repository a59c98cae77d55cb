"""What a run leaves on the disk and how it goes on from there: damaged, deleted, exchanged, or simply old."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS, tiny_model
from safetensors.torch import load_file
from steps import before_steps
from typer.testing import CliRunner

import packlora
from packlora.cli import app
from packlora.config import Run
from packlora.events import Note
from packlora.files import remove_leftovers
from packlora.runtime import checkpoint
from packlora.runtime.job import Job
from packlora.runtime.resume import check_output, starting_steps

Base = Callable[..., str]
Copy = Callable[[Path], dict[str, Any]]

STEPS = 6
FILES = ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "last_good.safetensors",
         "trainer_state.json", "manifest.json")  # fmt: skip


def make_tree(base: str, folder: Path) -> dict[str, Any]:
    """Two jobs of six steps; the first is evaluated at every second one."""
    generator = random.Random(5)
    jobs = []
    for name, adapter in (("a", {"r": 4, "lora_dropout": 0.1}), ("b", {"r": 2, "use_dora": True})):
        path = folder / f"{name}.jsonl"
        picks = [[generator.choice(WORDS) for _ in range(generator.randrange(3, 8))] for _ in range(2 * STEPS)]
        lines = [{"prompt": " ".join(words), "completion": words[0]} for words in picks]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = {"path": str(path)} | ({"eval_path": str(path)} if name == "a" else {})
        jobs.append(
            {"name": name, "data": data, "adapter": adapter, "train": {"global_batch_size": 2, "learning_rate": 3e-3}}
        )
    return {
        "base_model": base, "output_dir": str(folder / "out"), "max_tokens_per_microbatch": 96, "device": "cpu",
        "save_every": 2, "save_total_limit": None, "eval_every": 2, "jobs": jobs,
    }  # fmt: skip


def train(tree: dict[str, Any], **kwargs: Any) -> Any:
    return packlora.train(Run.model_validate(tree), **kwargs)


def refusal(tree: dict[str, Any], **kwargs: Any) -> str:
    """The message of a refused resume, which leaves every byte of the output folder as it is."""
    out = Path(tree["output_dir"])
    before = content(out)
    with pytest.raises(packlora.InputError) as caught:
        train(tree, resume=True, **kwargs)
    assert content(out) == before
    return str(caught.value)


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def adapter(out: Path, job: str) -> dict[str, torch.Tensor]:
    return load_file(out / job / "adapter_model.safetensors")


def same_bits(one: Path, two: Path, jobs: str = "ab") -> None:
    for job in jobs:
        a, b = adapter(one, job), adapter(two, job)
        assert all(torch.equal(a[key], b[key]) for key in a), job


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def numbers(out: Path) -> list[Any]:
    """The metrics without the times, in the order of jobs and steps."""
    keys = ("job", "step", "loss", "grad_norm", "lr", "tokens")
    return sorted([line[key] for key in keys] for line in lines(out / "metrics.jsonl"))


@pytest.fixture(scope="module")
def whole(tiny_base: Base, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that was never interrupted."""
    tree = make_tree(tiny_base("shallow"), tmp_path_factory.mktemp("whole"))
    assert train(tree).status == "done"
    return tree


@pytest.fixture(scope="module")
def begun(whole: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """-> a copy of the same run at step 4, with checkpoints of steps 2 and 4."""
    first = tmp_path_factory.mktemp("begun") / "out"
    train({**whole, "output_dir": str(first)}, max_steps=4)

    def copy(folder: Path) -> dict[str, Any]:
        shutil.copytree(first, folder / "out")
        return json.loads(json.dumps({**whole, "output_dir": str(folder / "out")}))  # type: ignore[no-any-return]

    return copy


def out_of(tree: dict[str, Any]) -> Path:
    return Path(tree["output_dir"])


def run_id(out: Path) -> str:
    return str(json.loads((out / "run.json").read_text())["id"])


# --- old checkpoints ---------------------------------------------------------------------------------------------------


def test_old_checkpoints_are_removed_and_folders_that_are_not_its_own_stay(begun: Copy, tmp_path: Path) -> None:
    tree = begun(tmp_path)
    out = out_of(tree)
    (out / "a" / "checkpoint-1").mkdir()  # somebody's: it has no manifest
    (out / "a" / "checkpoint-1" / "notes.txt").write_text("precious")
    shutil.copytree(out / "a" / "checkpoint-2", out / "b" / "checkpoint-3")  # of the other job
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(out / "a" / "checkpoint-2", tmp_path / "elsewhere" / "checkpoint-2")
    shutil.rmtree(out / "a" / "checkpoint-2")
    (out / "a" / "checkpoint-2").symlink_to(tmp_path / "elsewhere" / "checkpoint-2")
    del tree["save_total_limit"]  # 2, and save_every makes three
    assert train({**tree, "save_every": 1}, resume=True).status == "done"
    assert sorted(path.name for path in (out / "a").glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 2, 5, 6)]
    assert sorted(path.name for path in (out / "b").glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (3, 5, 6)]
    assert (out / "a" / "checkpoint-1" / "notes.txt").read_text() == "precious"
    assert len(list((tmp_path / "elsewhere" / "checkpoint-2").iterdir())) == len(FILES)
    assert not list(out.glob("**/.tmp-*"))


def test_a_stray_beside_the_checkpoints_is_neither_removed_nor_taken_for_one(
    whole: dict[str, Any], begun: Copy, tmp_path: Path
) -> None:
    tree = begun(tmp_path)
    out = out_of(tree)
    strays = ["checkpoint-04", "checkpoint-9.bak", "checkpoint-", "my-checkpoint-9", "checkpoint-9 (copy)"]
    for name in strays:
        shutil.copytree(out / "a" / "checkpoint-2", out / "a" / name)
    before = content(out / "a" / "checkpoint-2")
    assert train({**tree, "save_every": 1, "save_total_limit": 1}, resume=True).status == "done"
    same_bits(out_of(whole), out)
    assert checkpoints(out / "a") == sorted([*strays, "checkpoint-6"])
    assert all(content(out / "a" / name) == before for name in strays)
    (
        out / "a" / "checkpoint-9"
    ).mkdir()  # somebody's, or one whose files are gone: it is not passed over without a word
    (out / "a" / "manifest.json").unlink()
    assert refusal(tree) == (
        f"job 'a': {out / 'a' / 'checkpoint-9' / 'manifest.json'} is missing, so nothing tells whether checkpoint-9 is whole; "
        "checkpoint-6 is whole: go on from it with --resume --from a=6"
    )


def test_all_checkpoints_are_kept_where_no_limit_is_set(whole: dict[str, Any]) -> None:
    for job in "ab":
        found = sorted(path.name for path in (out_of(whole) / job).glob("checkpoint-*"))
        assert found == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_checkpoint_that_cannot_be_written_costs_no_older_one(
    begun: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {**begun(tmp_path), "save_total_limit": 1}
    out = out_of(tree)
    original = checkpoint.write_json

    def full(path: Path, value: Any) -> None:
        if path.name == "trainer_state.json" and "checkpoint-6" in str(path):
            raise OSError(28, "No space left on device")
        original(path, value)

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(packlora.WriteError, match="No space left"):
        train(tree, resume=True)
    monkeypatch.undo()
    for job in "ab":
        assert checkpoint.check(out / job / "checkpoint-4", job, run_id(out), 4)
    assert train(tree, resume=True).status == "done"
    assert [path.name for path in (out / "b").glob("checkpoint-*")] == ["checkpoint-6"]


# --- damage ------------------------------------------------------------------------------------------------------------


def damages(folder: Path, name: str, other: Path, generator: random.Random) -> dict[str, Callable[[], Any]]:
    """Ways to spoil a file of a checkpoint; other: the same file of another step or job."""
    file = folder / name
    text = file.read_bytes()
    place = generator.randrange(len(text))
    flipped = bytearray(text)
    flipped[place] ^= 1 << generator.randrange(8)
    ways: dict[str, Callable[[], Any]] = {
        "flipped": lambda: file.write_bytes(bytes(flipped)),
        "cut": lambda: file.write_bytes(text[:place]),
        "empty": lambda: file.write_bytes(b""),
        "longer": lambda: file.write_bytes(text + b"\0"),
        "zeros": lambda: file.write_bytes(bytes(len(text))),
        "gone": file.unlink,
        "a folder": lambda: (file.unlink(), file.mkdir()),
        "a pipe": lambda: (file.unlink(), os.mkfifo(file)),
        "dangling": lambda: (file.unlink(), file.symlink_to("nowhere")),
    }
    if other.read_bytes() != text:
        ways["another's"] = lambda: shutil.copyfile(other, file)
    return ways


@pytest.mark.parametrize("name", FILES)
def test_every_damage_of_every_file_of_a_checkpoint_is_found_and_the_file_is_named(
    name: str, begun: Copy, tmp_path: Path
) -> None:
    generator = random.Random(name)
    out = out_of(begun(tmp_path))
    good, place, run = out / "a" / "checkpoint-4", tmp_path / "checkpoint-4", run_id(out)
    assert {path.name for path in good.iterdir()} == set(FILES)
    for other in (out / "a" / "checkpoint-2", out / "b" / "checkpoint-4"):
        for number in range(3):
            for way in damages(good, name, other / name, random.Random(0)):
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(good, place)
                assert checkpoint.check(place, "a", run, 4).step == 4
                damages(place, name, other / name, generator)[way]()
                if way == "flipped" and name == "manifest.json" and says_the_same(place / name, good / name):
                    continue
                with pytest.raises(checkpoint.Damaged) as caught:
                    checkpoint.check(place, "a", run, 4)
                told = str(caught.value)
                assert name in told or (name == "manifest.json" and str(place) in told), (way, number)


def says_the_same(file: Path, other: Path) -> bool:
    """Whether two JSON files differ in blanks at most."""
    try:
        return bool(json.loads(file.read_bytes()) == json.loads(other.read_bytes()))
    except ValueError:
        return False


def test_a_folder_of_another_job_step_or_run_is_refused(whole: dict[str, Any], begun: Copy, tmp_path: Path) -> None:
    tree = begun(tmp_path)
    out = out_of(tree)
    newest = out / "a" / "checkpoint-4"
    for source, said in (
        (out / "b" / "checkpoint-4", "is of job 'b'"),
        (out / "a" / "checkpoint-2", "is of step 2"),
        (out_of(whole) / "a" / "checkpoint-4", "is of another run"),
    ):
        shutil.rmtree(newest)
        shutil.copytree(source, newest)
        assert refusal(tree) == (
            f"job 'a': {newest} {said}; checkpoint-2 is whole: go on from it with --resume --from a=2"
        )


def test_a_damaged_newest_checkpoint_is_named_with_the_older_one_from_which_the_same_bits_come(
    whole: dict[str, Any], begun: Copy, tmp_path: Path
) -> None:
    tree = begun(tmp_path)
    out = out_of(tree)
    for job, name in (("a", "optimizer.safetensors"), ("b", "trainer_state.json")):
        file = out / job / "checkpoint-4" / name
        text = bytearray(file.read_bytes())
        text[-20] ^= 4
        file.write_bytes(text)
    said = refusal(tree).splitlines()
    for job, name, line in zip("ab", ("optimizer.safetensors", "trainer_state.json"), said, strict=True):
        assert line == (
            f"job {job!r}: {out / job / 'checkpoint-4' / name} does not hold what was written (its SHA-256 differs); "
            f"checkpoint-2 is whole: go on from it with --resume --from {job}=2"
        )
    result = train(tree, resume=True, resume_from=["a=2", "b=2"])
    assert result.status == "done"
    same_bits(out_of(whole), out)
    assert numbers(out) == numbers(out_of(whole))
    assert (out / "a" / "discarded-checkpoint-4").is_dir()
    notes = json.loads((out / "run.json").read_text())["warnings"]
    assert "job 'a' goes on from step 2, as --from says; what lay beyond is now discarded-checkpoint-4" in notes


def test_where_no_checkpoint_is_whole_the_job_can_be_begun_again(
    whole: dict[str, Any], begun: Copy, tmp_path: Path
) -> None:
    tree = begun(tmp_path)
    out = out_of(tree)
    for step in (2, 4):
        (out / "a" / f"checkpoint-{step}" / "manifest.json").unlink()
    assert refusal(tree) == (
        f"job 'a': {out / 'a' / 'checkpoint-4' / 'manifest.json'} is missing, so nothing tells whether checkpoint-4 is whole; "
        "no older checkpoint is whole; begin this job again with --resume --from a=0"
    )
    assert train(tree, resume=True, resume_from=["a=0"]).status == "done"
    same_bits(out_of(whole), out)
    assert numbers(out) == numbers(out_of(whole))


def test_from_goes_back_for_all_jobs_that_have_got_so_far_and_refuses_a_step_that_is_not_there(
    whole: dict[str, Any], begun: Copy, tmp_path: Path
) -> None:
    tree = begun(tmp_path)
    out = out_of(tree)
    for word, said in (
        ("3", "--from '3': job 'a' has no checkpoint of step 3; its checkpoints: 2, 4"),
        ("a=6", "--from 'a=6': job 'a' has no checkpoint of step 6; its checkpoints: 2, 4"),
        ("8", "--from '8': job 'a' has no checkpoint of step 8; its checkpoints: 2, 4"),
        ("c=2", "--from 'c=2': there is no job 'c'; there are a, b"),
        ("a=", "--from 'a=': give the step of a checkpoint, or JOB=STEP"),
        ("-2", "--from '-2': give the step of a checkpoint, or JOB=STEP"),
        ("²", "--from '²': give the step of a checkpoint, or JOB=STEP"),
    ):
        assert refusal(tree, resume_from=[word]) == said
    with pytest.raises(
        packlora.InputError, match=r"^--from 'b=2': job 'b' has left the run, so it cannot be sent back; there are a$"
    ):
        starting_steps(Run.model_validate(tree), ["b=2"], left=["b"])
    with pytest.raises(packlora.InputError, match="needs --resume"):
        train(tree, resume_from=["2"])
    shutil.rmtree(out / "b" / "checkpoint-4")  # b has only got to step 2
    (out / "b" / "manifest.json").unlink()
    train(tree, resume=True, resume_from=["4"], max_steps=4)
    assert not list(out.glob("*/discarded-*"))
    train(tree, resume=True, resume_from=["2"], max_steps=4)
    assert sorted(str(path.relative_to(out)) for path in out.glob("*/discarded-*")) == [
        "a/discarded-checkpoint-4", "b/discarded-checkpoint-4",
    ]  # fmt: skip
    train(tree, resume=True)
    same_bits(out_of(whole), out)
    assert numbers(out) == numbers(out_of(whole))


def test_the_command_takes_from_and_its_advice_to_go_on_does_not_repeat_it(begun: Copy, tmp_path: Path) -> None:
    from packlora import command_line

    tree = begun(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree))
    words = ["train", str(file), "--resume", "--from", "a=2", "--from=b=2", "--max-steps", "4"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    assert "optimizer steps left by --max-steps: a " in ran.output
    assert (out_of(tree) / "b" / "discarded-checkpoint-4").exists()
    assert command_line.without_resume(words) == ["train", str(file), "--max-steps", "4"]
    assert command_line.without_resume([*words, "--max-steps=5"], "--max-steps") == ["train", str(file)]
    refused = CliRunner().invoke(app, ["train", str(file), "--resume", "--from", "7"])
    assert refused.exit_code == 2


def test_a_job_that_has_got_further_than_its_run_file_now_asks_has_no_steps_left(begun: Copy, tmp_path: Path) -> None:
    tree = begun(tmp_path)
    for job in tree["jobs"]:
        job["train"]["max_steps"] = 3
    result = train(tree, resume=True)
    assert {(job.status, job.step, job.steps_left) for job in result.jobs.values()} == {("done", 4, 0)}


# --- what was deleted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["model deleted", "model damaged", "all but checkpoints deleted", "state damaged"])
def test_a_finished_adapter_is_restored_from_its_checkpoint(how: str, whole: dict[str, Any], tmp_path: Path) -> None:
    tree = {**whole, "output_dir": str(tmp_path / "out")}
    out, model = tmp_path / "out", tmp_path / "out" / "a" / "adapter_model.safetensors"
    shutil.copytree(out_of(whole), out)
    if how == "model deleted":
        model.unlink()
    elif how == "model damaged":
        model.write_bytes(model.read_bytes()[:-1] + b"?")
    elif how == "state damaged":
        (out / "a" / "trainer_state.json").write_text("[[")
    else:
        for path in (out / "a").iterdir():
            if path.is_file():
                path.unlink()
    result = train(tree, resume=True)
    assert (result.status, result.tokens) == ("done", 0)
    same_bits(out_of(whole), out)
    assert checkpoint.check(out / "a", "a", run_id(out)).step == STEPS
    if "all" not in how:
        notes = json.loads((out / "run.json").read_text())["warnings"]
        assert any("the finished adapter is written again from checkpoint-6" in note for note in notes)


def test_without_any_checkpoint_a_job_is_not_begun_again_without_a_word(
    whole: dict[str, Any], begun: Copy, tmp_path: Path
) -> None:
    tree = begun(tmp_path)
    out = out_of(tree)
    for folder in out.glob("*/checkpoint-*"):
        shutil.rmtree(folder)
    said = refusal(tree).splitlines()
    assert said[0] == (
        f"job 'a': {out / 'a'} has no checkpoint, but it had a checkpoint at step 4; going on would begin at step 1 and "
        "overwrite its adapter. Put the checkpoints back, take another output_dir, or begin again with --resume --from a=0"
    )
    assert train(tree, resume=True, max_steps=4).tokens == 0  # nothing is left to do, and nothing is overwritten
    shutil.rmtree(out / "b")  # not even the finished adapter
    assert "job 'b'" in refusal(tree, max_steps=4)
    assert train(tree, resume=True, resume_from=["0"]).status == "done"
    same_bits(out_of(whole), out)


def test_one_job_s_missing_data_does_not_stop_the_others(whole: dict[str, Any], begun: Copy, tmp_path: Path) -> None:
    tree = begun(tmp_path)
    out = out_of(tree)
    data = Path(tree["jobs"][0]["data"]["path"])
    aside = data.rename(tmp_path / "a.jsonl")
    try:
        before = content(out / "a")
        result = train(tree, resume=True)
        assert (result.status, result.exit_code) == ("failed", 1)
        assert list(result.jobs) == ["a", "b"]
        assert (result.jobs["a"].status, result.jobs["a"].step) == ("stopped", 4)
        assert result.jobs["a"].failure == f"{data} does not exist"
        assert result.jobs["b"].status == "done"
        assert content(out / "a") == before
        assert [line for line in numbers(out) if line[0] == "a"] == [
            line for line in numbers(out_of(whole)) if line[0] == "a"
        ][:4]
        notes = json.loads((out / "run.json").read_text())["warnings"]
        assert (
            f"job 'a' is left out, the others go on: {data} does not exist; --resume takes it up again when that is back"
            in notes
        )
    finally:
        aside.rename(data)
    assert train(tree, resume=True).status == "done"
    same_bits(out_of(whole), out, "a")
    assert [line[:2] for line in numbers(out)] == [line[:2] for line in numbers(out_of(whole))]
    assert json.loads((out / "run.json").read_text())["jobs"].keys() == {"a", "b"}


def test_another_path_at_which_nothing_is_is_refused_and_no_data_that_are_gone(begun: Copy, tmp_path: Path) -> None:
    tree = begun(tmp_path)
    before = [dict(job["data"]) for job in tree["jobs"]]
    for number, key in ((1, "path"), (0, "eval_path"), (1, "eval_path")):
        was = before[number].get(key, "null")
        for odd in (str(tmp_path / "slip.jsonl"), str(tmp_path / "slip-*.jsonl")):
            tree["jobs"][number]["data"] = before[number] | {key: odd}
            assert refusal(tree) == (
                f"job '{'ab'[number]}': data.{key} {odd} does not exist, and was {was} when the run was last trained; correct "
                "the path, or put the data there"
            )
        tree["jobs"][number]["data"] = before[number]


def test_data_that_are_gone_are_known_as_such_from_another_folder(
    begun: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path of the run file is then another text."""
    tree = begun(tmp_path)
    record = json.loads((out_of(tree) / "run.json").read_text())
    record["config"]["jobs"][0]["data"] |= dict.fromkeys(("path", "eval_path"), "rows/a.jsonl")
    (out_of(tree) / "run.json").write_text(json.dumps(record))
    tree["jobs"][0]["data"] = dict.fromkeys(("path", "eval_path"), str(tmp_path / "rows" / "a.jsonl"))
    assert train(tree, resume=True).jobs["a"].status == "stopped"


# --- logs --------------------------------------------------------------------------------------------------------------


def spoil(file: Path, way: str) -> None:
    text = file.read_text().splitlines(keepends=True)
    if way == "deleted":
        file.unlink()
    elif way == "cut":
        file.write_text("".join(text)[: len("".join(text)) // 3])
    elif way == "hole":
        file.write_text("".join(text[:1] + text[2:]))
    elif way == "twice":
        file.write_text("".join(text + text))
    elif way == "changed":
        file.write_text("".join(text).replace("0.", "1."))
    elif way == "foreign":
        odd = [
            '{"job": [1], "step": {}}',
            '{"job": "a", "step": "x"}',
            "{}",
            "[" * 20000,
            "9" * 5000,
            '{"job": "\\ud800"}',
            "\0",
        ]
        file.write_text("".join(text) + "\n".join(odd))


@pytest.mark.parametrize("way", ["deleted", "cut", "hole", "twice", "changed", "foreign"])
def test_metrics_and_evaluations_are_what_the_checkpoints_say_whatever_became_of_the_files(
    way: str, whole: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(out_of(whole), out)
    for name in ("metrics", "evals", "microbatches", "windows"):
        spoil(out / f"{name}.jsonl", way)
    assert train({**whole, "output_dir": str(out)}, resume=True).tokens == 0
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert (out / name).read_bytes() == (out_of(whole) / name).read_bytes()


def test_a_resumed_run_may_log_fewer_steps(whole: dict[str, Any], begun: Copy, tmp_path: Path) -> None:
    tree = begun(tmp_path)
    tree["jobs"][0]["train"]["logging_steps"] = 3
    assert train(tree, resume=True).status == "done"
    same_bits(out_of(tree), out_of(whole))
    assert numbers(out_of(tree)) == [own for own in numbers(out_of(whole)) if own[0] == "b" or own[1] % 3 == 0]


def test_logs_are_on_the_disk_before_the_checkpoint_is(whole: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    out, events, original, replace = tmp_path / "out", [], os.fsync, os.replace
    named: dict[int, str] = {}

    def fsync(handle: int) -> None:
        named.update({path.stat().st_ino: path.name for path in out.glob("*.jsonl")})
        events.append(named.get(os.fstat(handle).st_ino, ""))
        original(handle)

    def renamed(source: Any, target: Any) -> None:
        events.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    train({**whole, "output_dir": str(out), "jobs": whole["jobs"][:1]}, max_steps=2)
    upto = events[: events.index("checkpoint-2")]
    assert {"metrics.jsonl", "evals.jsonl", "microbatches.jsonl", "windows.jsonl"} <= set(upto)


# --- the base and run.json ---------------------------------------------------------------------------------------------


def test_another_base_model_of_the_same_shapes_is_refused(
    begun: Copy, whole: dict[str, Any], tiny_base: Base, tmp_path: Path
) -> None:
    tree = begun(tmp_path)
    base = tmp_path / "base"
    shutil.copytree(tiny_base("shallow"), base)
    tree["base_model"] = str(base)
    tuned = tiny_model("llama", num_hidden_layers=1)
    with torch.no_grad():
        tuned.model.layers[0].mlp.up_proj.weight[7, 3] += 1e-3  # a single weight
    tuned.save_pretrained(base)
    said = refusal(tree)
    assert said.startswith(f"base_model {base}: this is not the model that the run began with, its weights changed; ")
    tiny_model("llama", num_hidden_layers=1).save_pretrained(base)
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    assert "its config.json changed" in refusal(tree)
    (base / "config.json").write_text(
        json.dumps({**settings, "transformers_version": "4.0"})
    )  # who wrote it is no matter
    assert train(tree, resume=True).status == "done"
    same_bits(out_of(whole), out_of(tree))
    config = json.loads((out_of(tree) / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)


def test_data_that_was_moved_is_known_by_its_samples(begun: Copy, whole: dict[str, Any], tmp_path: Path) -> None:
    tree = begun(tmp_path)
    for job in tree["jobs"]:
        moved = shutil.copy(job["data"]["path"], tmp_path / f"moved-{job['name']}.jsonl")
        job["data"] = {key: str(moved) for key in job["data"]}
    moved = tree["jobs"][1]["data"]["path"]
    for more in ({"weight": 1.0}, {"max_samples": 3}):
        tree["jobs"][1]["data"]["path"] = [{"path": moved} | more]
        assert "job 'b' data.path changed; put that back (it was " in refusal(tree)
    tree["jobs"][1]["data"]["path"] = tree["jobs"][0]["data"]["path"]
    assert "job 'b': its data has changed since the run began" in refusal(tree)
    tree["jobs"][1]["data"]["path"] = [str(tmp_path / "moved-b.jsonl")]
    del tree["jobs"][0]["data"]["eval_path"]
    assert "job 'a': its data has changed since the run began" in refusal(tree)
    tree["jobs"][0]["data"]["eval_path"] = tree["jobs"][0]["data"]["path"]
    assert train(tree, resume=True).status == "done"
    same_bits(out_of(whole), out_of(tree))


def test_a_run_file_that_was_moved_with_what_it_names_goes_on(
    whole: dict[str, Any], tiny_base: Base, tmp_path: Path
) -> None:
    """Adapters, templates and code are known by what they hold, as data are; a slip, and other content, is refused."""
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(out_of(whole) / "a", here / "start", ignore=shutil.ignore_patterns("checkpoint-*"))
    (here / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    (here / "loss.py").write_text(
        "def loss(logp, rows):\n    return -logp\n\n\ndef other(logp, rows):\n    return -2 * logp\n"
    )
    rows = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in zip(WORDS, WORDS, strict=True)
    ]
    pairs = [{"prompt": a, "chosen": f" {b}", "rejected": f" {a}"} for a, b in zip(WORDS[:9], WORDS[9:], strict=True)]
    for name, lines in (("rows", rows), ("pairs", pairs)):
        (here / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = {"global_batch_size": 2, "max_steps": 3}
    jobs = [
        {"name": "a", "data": {"path": "rows.jsonl", "chat_template": "chat.jinja"}, "adapter": {"init_from": "start"},
         "train": {**steps, "objective": "loss.py:loss"}},
        {"name": "b", "data": {"path": "pairs.jsonl"}, "adapter": {"r": 4, "lora_dropout": 0.1},
         "train": {**steps, "trainer": "dpo", "reference": "start"}},
    ]  # fmt: skip
    run = {"base_model": tiny_base("shallow"), "device": "cpu", "save_every": 1, "jobs": jobs}
    (here / "run.yaml").write_text(json.dumps({**run, "output_dir": str(tmp_path / "out")}))
    for out, most in (("whole", None), ("parts", 1)):
        packlora.train(here / "run.yaml", overrides=[f"output_dir={tmp_path / out}"], max_steps=most)
    here.rename(there)
    asked = [f"output_dir={tmp_path / 'parts'}"]
    for key, other, said in (
        ("a.adapter.init_from", "no", "job 'a': adapter.init_from no does not exist, and was .*here/start when"),
        ("b.train.reference", "no", "job 'b': train.reference no does not exist, and was .*put the adapter there"),
        ("b.train.reference", "base", "job 'b' train.reference changed"),
        ("a.train.objective", "loss.py:other", "job 'a' train.objective changed"),
        ("a.data.chat_template", "chatml", "job 'a': its data has changed"),
    ):
        with pytest.raises(packlora.InputError, match=said):
            packlora.train(there / "run.yaml", overrides=[*asked, f"jobs.{key}={other}"], resume=True)
    assert packlora.train(there / "run.yaml", overrides=asked, resume=True).status == "done"
    same_bits(tmp_path / "whole", tmp_path / "parts")


ODD: list[Any] = [None, True, -1, 1.5, "x", [], ["x"], {}, {"x": 1}, [[[]]]]


def sentence(run: Run) -> str | None:
    """What is said against the output folder of a run, if anything is."""
    try:
        check_output(run, True)
    except packlora.InputError as error:
        return str(error)
    return None


def test_a_run_json_that_says_something_else_is_refused_with_a_sentence(begun: Copy, tmp_path: Path) -> None:
    tree = begun(tmp_path)
    file = out_of(tree) / "run.json"
    good = json.loads(file.read_text())
    texts = [b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"{}"]
    for path in (
        ("id",), ("created",), ("config",), ("config", "jobs"), ("config", "jobs", 0), ("config", "jobs", 0, "name"),
        ("config", "jobs", 0, "train"), ("config", "seed"), ("config", "max_tokens_per_microbatch"), ("versions",),
        ("versions", "torch"), ("warnings",), ("jobs",), ("jobs", "a"), ("jobs", "a", "data_hash"), ("schedule",),
        ("schedule", "budget"), ("model",), ("model", "fingerprint"), ("model", "fingerprint", "weights"), ("saved",),
        ("saved", "a"),
    ):  # fmt: skip
        for value in [*ODD, KeyError]:
            spoilt = json.loads(json.dumps(good))
            node = spoilt
            for key in path[:-1]:
                node = node[key]
            if value is KeyError:
                del node[path[-1]]
            else:
                node[path[-1]] = value
            texts.append(json.dumps(spoilt).encode())
    refused = 0
    for text in texts:
        file.write_bytes(text)
        said = sentence(Run.model_validate(tree))
        assert said is None or said.startswith(f"output_dir {file.parent}"), text[:200]
        refused += said is not None
    assert refused > 0.9 * len(texts)
    file.unlink()
    file.mkdir()
    with pytest.raises(packlora.InputError, match=r"run.json cannot be read"):
        train(tree, resume=True)


def test_a_run_of_an_earlier_version_is_refused_with_what_to_do(begun: Copy, tmp_path: Path) -> None:
    tree = begun(tmp_path)
    file = out_of(tree) / "run.json"
    record = json.loads(file.read_text())
    del record["id"]
    file.write_text(json.dumps(record))
    assert (
        "an earlier packlora wrote it, without checksums and seeds of jobs; continue the run with that one"
        in refusal(tree)
    )


# --- the output folder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_an_output_folder_that_is_deleted_during_a_run_is_said_and_ends_with_1(
    how: str, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    out = tmp_path / "out"

    def deleted(job: Job) -> None:
        if job.step == 2 and job.name == "a":
            out.rename(tmp_path / "gone")  # at once: checkpoints are being written
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
            if how == "replaced":  # another run began there
                out.mkdir()
                (out / ".lock").write_text("")

    before_steps(monkeypatch, deleted)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**whole, "output_dir": str(out)}))
    ran = CliRunner().invoke(app, ["train", str(file)])
    assert ran.exit_code == 1, ran.output
    assert f"packlora: {out} was deleted, moved or replaced while the run was writing to it" in ran.stderr
    assert [path.name for path in out.glob("*")] == ([".lock"] if how == "replaced" else [])


def test_a_memory_error_without_words_is_told_in_words(whole: dict[str, Any], monkeypatch: Any, tmp_path: Path) -> None:
    def lacking(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("packlora.runtime.placement.load_base", lacking)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**whole, "output_dir": str(tmp_path / "out")}))
    ran = CliRunner().invoke(app, ["train", str(file)])
    assert ran.exit_code == 1
    assert "memory is used up" in ran.stderr


def test_adapter_files_can_be_read_by_whom_the_umask_lets(whole: dict[str, Any], tmp_path: Path) -> None:
    for umask, wanted in ((0o022, 0o644), (0o027, 0o640)):
        before = os.umask(umask)
        try:
            out = tmp_path / f"out-{umask}"
            train({**whole, "output_dir": str(out), "jobs": whole["jobs"][:1]}, max_steps=2)
        finally:
            os.umask(before)
        modes = {path: path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
        assert len(modes) >= 15
        assert set(modes.values()) == {wanted}, modes


def test_a_lock_that_is_a_link_leaves_what_it_leads_to_alone(whole: dict[str, Any], tmp_path: Path) -> None:
    out, target = tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    target.write_text("precious")
    (out / ".lock").symlink_to(target)
    with pytest.raises(packlora.InputError, match=r"\.lock is not a plain file"):
        train({**whole, "output_dir": str(out)})
    assert target.read_text() == "precious"
    (out / ".lock").unlink()
    (out / ".lock").symlink_to(tmp_path / "nothing")
    with pytest.raises(packlora.InputError, match=r"\.lock is not a plain file"):
        train({**whole, "output_dir": str(out)})
    assert not (tmp_path / "nothing").exists()


class Crash(Exception):
    """The process ends here."""


def test_broken_off_at_any_file_operation_a_save_leaves_a_whole_checkpoint_as_the_newest(
    begun: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of one checkpoint, so that every save also removes."""
    tree = begun(tmp_path)
    folder, run = out_of(tree) / "a", run_id(out_of(tree))
    (job,) = [job for job in trainer_of(tree).jobs if job.name == "a"]
    assert job.step == 4
    job.step, left = 5, 0

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash
            return original(*args, **kwargs)

        return call

    for module, name in (
        (os, "replace"),
        (os, "fsync"),
        (os, "open"),
        (shutil, "rmtree"),
        (Path, "mkdir"),
        (Path, "touch"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    ran = 0
    while True:
        ran += 1
        left = ran
        with contextlib.suppress(Crash):
            checkpoint.save_checkpoint(folder, job, checkpoint.Snapshot.of(job), run, keep=1)
            break
        left = 0  # what follows counts on, but nothing is broken off
        newest = max(checkpoint.steps(folder))
        assert checkpoint.check(folder / f"checkpoint-{newest}", "a", run, newest)
    assert ran > 20
    left = 0
    remove_leftovers(folder)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["checkpoint-5"]


def trainer_of(tree: dict[str, Any]) -> Any:
    from packlora.data.reader import Reader
    from packlora.parallel.alone import OneProcess
    from packlora.runtime.session import Session

    return Session(Run.model_validate(tree), OneProcess(), True, None, [], Reader()).set_up()


def test_a_job_whose_first_adapter_is_gone_is_left_out_too(whole: dict[str, Any], tmp_path: Path) -> None:
    first = tmp_path / "first"
    shutil.copytree(out_of(whole) / "a", first, ignore=shutil.ignore_patterns("checkpoint-*"))
    jobs = json.loads(json.dumps(whole["jobs"]))
    jobs[0]["adapter"] = {"init_from": str(first)}
    tree = {**whole, "output_dir": str(tmp_path / "out"), "jobs": jobs}
    train(tree, max_steps=2)
    shutil.rmtree(first)
    result = train(tree, resume=True)
    assert (result.jobs["a"].status, result.jobs["a"].failure) == ("stopped", f"{first} does not exist")
    assert (result.jobs["b"].status, result.exit_code) == ("done", 1)
    for job in jobs:
        Path(job["data"]["path"]).rename(tmp_path / f"{job['name']}.jsonl")
    try:
        with pytest.raises(packlora.InputError, match=r"not a PEFT adapter folder|does not exist"):  # none is left
            train(tree, resume=True)
    finally:
        for job in jobs:
            (tmp_path / f"{job['name']}.jsonl").rename(job["data"]["path"])


def test_a_new_job_may_begin_with_a_folder_of_the_run_that_stays_as_it_is_and_no_other(
    begun: Copy, whole: dict[str, Any], tmp_path: Path
) -> None:
    """A resumed run finds the adapter that the job began with."""
    tree = begun(tmp_path)

    def joined(folder: str) -> dict[str, Any]:
        return {**tree["jobs"][1], "name": "z", "adapter": {"init_from": str(out_of(tree) / folder)}}

    for folder, limit in (("a", None), ("a/checkpoint-4", 2)):
        more = {**tree, "save_total_limit": limit, "jobs": [*tree["jobs"], joined(folder)]}
        assert refusal(more).startswith(
            f"job 'z': {out_of(tree) / folder} is of job 'a', which still trains in this run and will not leave it as it is; "
        )
    assert train(tree, resume=True).status == "done"
    same_bits(out_of(whole), out_of(tree))
    for folder in ("a", "a/checkpoint-4"):
        tree["jobs"] = [*tree["jobs"][:2], joined(folder)]
        shutil.copytree(out_of(tree), tmp_path / "copy")
        tree["output_dir"] = str(tmp_path / "copy")
        assert train(tree, resume=True).status == "done"
        shutil.rmtree(tmp_path / "copy")
        tree["output_dir"] = str(tmp_path / "out")


def test_an_adapter_that_would_go_on_by_other_settings_than_its_checkpoint_s_is_refused(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    """Settings that no shape of a tensor tells: what the folder of init_from says, and lora_dropout beside it, of which
    run.json records the key's default."""
    first = tmp_path / "first"
    shutil.copytree(out_of(whole) / "a", first, ignore=shutil.ignore_patterns("checkpoint-*"))
    tree = {**whole, "output_dir": str(tmp_path / "out"), "jobs": json.loads(json.dumps(whole["jobs"][:1]))}
    own = tree["jobs"][0]["adapter"] = {"init_from": str(first)}
    train(tree, max_steps=2)
    own["lora_dropout"] = 0.05
    with pytest.raises(
        packlora.InputError, match=r"checkpoint-2 was trained with lora_dropout 0\.1, and .* now say 0\.05; put back"
    ):
        train(tree, resume=True)
    del own["lora_dropout"]
    file = first / "adapter_config.json"
    said = file.read_text()
    for key, value in {
        "lora_alpha": 100,
        "use_rslora": True,
        "alpha_pattern": {"q_proj": 50},
        "lora_dropout": 0,
    }.items():
        file.write_text(json.dumps(json.loads(said) | {key: value}))
        with pytest.raises(
            packlora.InputError, match=rf"job 'a': .*checkpoint-2 was trained with {key} .*first now say "
        ):
            train(tree, resume=True)
    file.write_text(said)
    assert train(tree, resume=True).status == "done"


def test_a_job_that_failed_stays_failed_and_can_be_sent_back(
    begun: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    tree = begun(tmp_path)
    out = out_of(tree)

    def spoil(job: Job) -> None:
        if job.name == "a" and job.step == 5:
            next(iter(job.state.gradients.values())).fill_(float("inf"))

    before_steps(monkeypatch, spoil)
    assert train(tree, resume=True).jobs["a"].status == "failed"
    monkeypatch.undo()
    shutil.rmtree(out / "a" / "checkpoint-4")
    shutil.rmtree(out / "a" / "checkpoint-2")
    kept = content(out / "a")
    again = train(tree, resume=True)  # it needs no checkpoint
    assert (again.jobs["a"].status, again.jobs["a"].step, again.tokens) == ("failed", 5, 0)
    assert content(out / "a") == kept
    (out / "a" / "adapter_model.safetensors").write_bytes(b"")
    assert "has no checkpoint, but it had a checkpoint at step 4" in refusal(tree)
    assert train(tree, resume=True, resume_from=["a=0"]).jobs["a"].status == "done"


def test_the_undone_step_of_a_job_that_failed_stays_in_the_logs(begun: Copy, tmp_path: Path) -> None:
    tree = begun(tmp_path) | {"output_dir": str(tmp_path / "failed")}
    tree["jobs"][0]["train"] |= {"learning_rate": 1e30, "max_grad_norm": 0}
    failed = train(tree, max_steps=3).jobs["a"]
    before = numbers(tmp_path / "failed")
    assert failed.status == "failed" and [line[1] for line in before if line[0] == "a"][-1] == failed.step + 1
    train(tree, resume=True, max_steps=3)
    assert numbers(tmp_path / "failed") == before


@pytest.mark.parametrize("text", ["", "[]", "7", "[" * 100_000, '{"result": 3}', "{}", '{"result": {}}'])
def test_the_demo_goes_on_to_the_sentence_about_a_run_json_that_is_broken(text: str, tmp_path: Path) -> None:
    from packlora.commands.demo import CHECKOUT, EXAMPLE, _place

    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "run.json").write_text(text)
    run, resume = _place(CHECKOUT / EXAMPLE, tmp_path / "demo")
    assert resume
    assert "run.json cannot be read" in str(sentence(run))


# --- checkpoints that are too many, gone, or without a name ---------------------------------------------------------------


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_what_a_kill_in_the_last_rotation_left_is_removed_when_the_run_is_resumed(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    """Also of a job that has ended. Where the newest is not whole, nothing is."""
    out = tmp_path / "out"
    shutil.copytree(out_of(whole), out)
    (out / "b" / ".tmp-removed-checkpoint-1").mkdir()
    (out / "b" / "checkpoint-6" / "optimizer.safetensors").write_bytes(b"")
    assert train({**whole, "output_dir": str(out), "save_total_limit": 2}, resume=True).tokens == 0
    assert checkpoints(out / "a") == ["checkpoint-4", "checkpoint-6"]
    assert checkpoints(out / "b") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_an_older_checkpoint_is_not_taken_without_a_word_where_the_newest_is_gone(
    whole: dict[str, Any], begun: Copy, tmp_path: Path
) -> None:
    tree = begun(tmp_path)
    out = out_of(tree)
    shutil.rmtree(out / "a" / "checkpoint-4")
    assert train(tree, resume=True).status == "done"
    same_bits(out_of(whole), out)
    assert numbers(out) == numbers(out_of(whole))
    said = (
        f"job 'a': its newest checkpoint, {out / 'a' / 'checkpoint-4'}, is gone; it goes on from checkpoint-2, and takes the "
        "steps since then again"
    )
    assert json.loads((out / "run.json").read_text())["warnings"].count(said) == 1


def test_a_checkpoint_whose_replacement_was_broken_off_has_its_name_again(
    whole: dict[str, Any], begun: Copy, tmp_path: Path
) -> None:
    tree = begun(tmp_path)
    newest = out_of(tree) / "a" / "checkpoint-4"
    shutil.rmtree(newest.with_name("checkpoint-2"))
    shutil.copytree(newest, newest.with_name(".tmp-checkpoint-4"))
    newest.rename(newest.with_name(".tmp-old-checkpoint-4"))
    assert train(tree, resume=True).status == "done"
    same_bits(out_of(whole), out_of(tree))
    assert numbers(out_of(tree)) == numbers(out_of(whole))
    assert not list(out_of(tree).glob("**/.tmp-*"))


@pytest.mark.parametrize("times", [1, 10**9], ids=["once", "for good"])
def test_a_checkpoint_that_cannot_be_removed_ends_no_run_and_is_tried_again_and_told_once(
    times: int, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, original, failed = tmp_path / "out", shutil.rmtree, 0

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal failed
        if str(path).endswith("checkpoint-1") and failed < times and Path(path).exists():
            failed += 1
            return
        original(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    told: list[str] = []
    tree = {**whole, "output_dir": str(out), "save_every": 1, "save_total_limit": 1, "jobs": whole["jobs"][:1]}
    result = train(tree, subscribers=[lambda event: told.append(event.text) if isinstance(event, Note) else None])
    assert result.status == "done" and failed == min(times, failed)
    left = [".tmp-removed-checkpoint-1"] * (times > 1)
    assert checkpoints(out / "a") == [*left, "checkpoint-6"]
    assert [text for text in told if "removed" in text] == [
        f"job 'a': {out / 'a' / name} cannot be removed; the run does not need it any more" for name in left
    ]


def test_a_run_of_an_earlier_default_learning_rate_goes_on_with_what_it_recorded(begun: Copy, tmp_path: Path) -> None:
    tree = begun(tmp_path)
    record = tmp_path / "out" / "run.json"
    for job in tree["jobs"]:  # as where the default was 3e-3 when the run began
        del job["train"]["learning_rate"]
    assert Run.model_validate(tree).jobs[0].train.learning_rate == 2e-4
    train(tree, resume=True)
    assert [job["train"]["learning_rate"] for job in json.loads(record.read_text())["config"]["jobs"]] == [3e-3] * 2
    assert {line["lr"] for line in lines(tmp_path / "out" / "metrics.jsonl")} == {3e-3}


def test_a_learning_rate_that_the_run_file_gives_is_never_replaced_by_the_recorded_one(
    begun: Copy, tmp_path: Path
) -> None:
    tree = begun(tmp_path)
    tree["jobs"][1]["train"]["learning_rate"] = 2e-4
    said = refusal(tree)
    assert "job 'b' train.learning_rate changed; put that back (it was 0.003), or start a new run in" in said
    tree["seed"], tree["jobs"][0]["adapter"]["r"] = 7, 5
    assert (
        "seed, job 'a' adapter.r, job 'b' train.learning_rate changed; put that back (it was 0, 4, 0.003)"
        in refusal(tree)
    )
    tree["jobs"].reverse()
    assert "jobs (names or order) changed; put that back (it was 0, ['a', 'b']), or" in refusal(tree)
