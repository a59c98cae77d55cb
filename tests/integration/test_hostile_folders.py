"""Output, base and adapter folders that somebody has changed: pipes, other objects, and what changes between two resumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from seeds import SOAK, some
from typer.testing import CliRunner
from waiting import SECONDS

import packlora
import packlora.runtime.run as train_module
from packlora.cli import app
from packlora.config.adapter_file import config_notes
from packlora.runtime import checkpoint

Base = Callable[..., str]


def make_tree(base: str, folder: Path) -> dict[str, Any]:
    """Two jobs of three steps."""
    jobs = []
    for name in ("a", "b"):
        data = folder / f"{name}.jsonl"
        rows = [{"prompt": WORDS[row], "completion": WORDS[row + 1]} for row in range(6)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        train = {"global_batch_size": 2, "learning_rate": 3e-3}
        jobs.append({"name": name, "data": {"path": str(data)}, "adapter": {"r": 2}, "train": train})
    return {
        "base_model": base, "output_dir": str(folder / "out"), "max_tokens_per_microbatch": 96, "device": "cpu",
        "save_every": 1, "save_total_limit": None, "jobs": jobs,
    }  # fmt: skip


@pytest.fixture
def begun(tiny_base: Base, tmp_path: Path) -> dict[str, Any]:
    """A run at step 2 of 3."""
    tree = make_tree(tiny_base("shallow"), tmp_path)
    packlora.train(tree, max_steps=2)
    return tree


@pytest.fixture
def in_time() -> Iterator[None]:
    """What waits for a pipe is interrupted."""

    def give_up(number: int, frame: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(SECONDS))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def record(tree: dict[str, Any]) -> dict[str, Any]:
    text = (Path(tree["output_dir"]) / "run.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]


# --- pipes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_time")
def test_pipes_in_the_place_of_what_a_run_wrote_do_not_hang(begun: dict[str, Any]) -> None:
    out = Path(begun["output_dir"])
    logs = (
        "metrics.jsonl",
        "evals.jsonl",
        "windows.jsonl",
        "microbatches.jsonl",
        "report.html",
        "a/trainer_state.json",
    )
    for name in logs:
        (out / name).unlink(missing_ok=True)
        os.mkfifo(out / name)
    assert packlora.train(begun, resume=True).status == "done"
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 6
    (out / "run.json").unlink()
    os.mkfifo(out / "run.json")
    with pytest.raises(packlora.InputError, match=r"run\.json cannot be read: it is not a plain file"):
        packlora.train(begun, resume=True)


# --- going back with a job left out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["b=1", "1"])
def test_a_job_that_is_left_out_is_not_sent_back_without_a_word(word: str, begun: dict[str, Any]) -> None:
    data = Path(begun["jobs"][1]["data"]["path"])
    before = record(begun)["saved"]
    data.rename(data.with_suffix(".aside"))
    with pytest.raises(packlora.InputError, match=r"job 'b' cannot be sent back, since .* does not exist"):
        packlora.train(begun, resume=True, resume_from=[word])
    assert record(begun)["saved"] == before
    result = packlora.train(begun, resume=True, resume_from=["a=1"])
    assert (result.jobs["a"].status, result.jobs["b"].step) == ("done", 2)
    assert checkpoint.steps(Path(begun["output_dir"]) / "b") == [1, 2]


@pytest.mark.parametrize("at", range(1, 7) if SOAK else (4,))
def test_going_back_to_the_beginning_can_be_broken_off_anywhere(
    at: int, begun: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After which --resume alone goes on."""
    assert packlora.train(begun, resume=True).status == "done"
    adapter = Path(begun["output_dir"]) / "a" / "adapter_model.safetensors"
    wanted, calls = adapter.read_bytes(), 0

    class BrokenOff(BaseException):
        pass

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Path, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += self.parent.name == "a"
            if calls == at:
                raise BrokenOff
            return original(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        with pytest.raises(BrokenOff):
            packlora.train(begun, resume=True, resume_from=["a=0"])
    assert packlora.train(begun, resume=True).status == "done"
    assert adapter.read_bytes() == wanted


def test_a_resumed_run_says_what_holds_now_and_nothing_that_held_once(
    begun: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    data = Path(begun["jobs"][1]["data"]["path"])
    aside = data.rename(data.with_suffix(".aside"))
    packlora.train(begun, resume=True, resume_from=["a=1"])
    said = " ".join(capfd.readouterr().out.split())
    assert "job 'b' is left out" in said and "job 'a' goes on from step 1" in said
    aside.rename(data)
    assert packlora.train(begun, resume=True).status == "done"
    said = " ".join(capfd.readouterr().out.split())
    assert "is left out" not in said and "goes on from step" not in said
    kept = record(begun)["warnings"]
    assert any("goes on from step 1" in text for text in kept) and not any("is left out" in text for text in kept)


# --- two at once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_ends_while_another_starts_in_its_folder_is_not_overwritten(
    resume: bool, tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process was stopped for a while just before it locks the folder."""
    tree, lock = make_tree(tiny_base("shallow"), tmp_path), train_module.lock_folder

    def late(folder: Path) -> Any:
        monkeypatch.setattr(train_module, "lock_folder", lock)
        assert packlora.train(tree).status == "done"
        return lock(folder)

    monkeypatch.setattr(train_module, "lock_folder", late)
    if resume:
        assert packlora.train(tree, resume=True).tokens == 0
    else:
        with pytest.raises(packlora.InputError, match="already holds a run"):
            packlora.train(tree)
    assert record(tree)["result"]["status"] == "done"


# --- adapters and bases ----------------------------------------------------------------------------------------------------


def test_a_job_does_not_begin_again_with_another_first_adapter(begun: dict[str, Any], tmp_path: Path) -> None:
    first = tmp_path / "first"
    shutil.copytree(Path(begun["output_dir"]) / "a", first)
    tree = {**begun, "output_dir": str(tmp_path / "next")}
    tree["jobs"] = [{**begun["jobs"][0], "adapter": {"init_from": str(first)}}]
    packlora.train(tree, max_steps=1)
    weights = first / "adapter_model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(weights).items()}, weights)
    said = rf"{re.escape(str(first))} is not the adapter that the run began with"
    with pytest.raises(packlora.InputError, match=said):
        packlora.train(tree, resume=True, resume_from=["0"])
    assert packlora.train(tree, resume=True).status == "done"  # from its checkpoint, for which it is not needed
    with pytest.raises(packlora.InputError, match=said):
        packlora.train(tree, resume=True, resume_from=["0"])


@pytest.mark.parametrize("text", some(["[]", "null", '"x"', "5"], 3))
def test_a_base_whose_configuration_is_no_object_is_refused_with_a_sentence(
    text: str, begun: dict[str, Any], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(begun["base_model"], other)
    (other / "config.json").write_text(text)
    merged = ["merge", f"{begun['output_dir']}/a", str(tmp_path / "merged"), "--base-model", str(other)]
    result = CliRunner().invoke(app, merged)
    assert result.exit_code == 2, result.output
    assert f"base_model {str(other)!r} (folder): cannot load the configuration" in result.stderr
    assert not (tmp_path / "merged").exists()


def test_keys_of_an_adapter_that_a_terminal_would_obey_are_spelt_out() -> None:
    (note,) = config_notes({"\x1b[2Jkey": "\x1b[31m" * 1000})
    assert note.isprintable() and len(note) < 600


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "x"}, "cannot load the configuration: Validation error for field 'hidden_size': TypeError: "),
        ({"hidden_act": "nope"}, "cannot load the model: KeyError: 'nope'"),
    ],
)
def test_what_is_wrong_with_a_base_stands_in_the_message(
    change: dict[str, Any], said: str, tiny_base: Base, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base("shallow"), base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(packlora.InputError) as caught:
        packlora.train(make_tree(str(base), tmp_path))
    assert said in str(caught.value)


@pytest.mark.parametrize("there", [True, False])
def test_merge_writes_where_a_link_leads(there: bool, begun: dict[str, Any], tmp_path: Path) -> None:
    """To another disk, perhaps."""
    (tmp_path / "large").mkdir()
    target, link = tmp_path / "large" / "merged", tmp_path / "link"
    if there:
        target.mkdir()
    link.symlink_to(target)
    result = CliRunner().invoke(app, ["merge", f"{begun['output_dir']}/a", str(link)])
    assert result.exit_code == 0, result.output
    assert link.is_symlink() and (target / "model.safetensors").exists()
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: x (os error 28)")]
)
def test_a_merge_that_does_not_fit_leaves_nothing_that_takes_up_space(
    error: Exception, begun: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"x")
        raise error

    monkeypatch.setattr("packlora.export.merged.save_file", full)
    result = CliRunner().invoke(app, ["merge", f"{begun['output_dir']}/a", str(tmp_path / "merged")])
    assert result.exit_code == 1, result.output
    assert f"cannot write {tmp_path / 'merged'}: No space left on device" in result.stderr
    assert not list(tmp_path.rglob(".tmp-*")) and not (tmp_path / "merged").exists()
