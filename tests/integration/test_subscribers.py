"""Subscribers of real runs: what they hear, what one that fails costs, and how one ends a job or the run."""

from __future__ import annotations

import errno
import json
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS
from test_training import adapter, same_bits
from waiting import SECONDS

import packlora
from packlora.events import (
    CheckpointBegins,
    CheckpointSaved,
    Evaluated,
    Event,
    JobDone,
    MicrobatchDone,
    RunBegan,
    RunEnded,
    SavePointReached,
    Stepped,
    Stop,
    TrainingBegan,
    WindowPlanned,
)
from packlora.runtime import checkpoint

Base = Callable[..., str]

JOBS: list[dict[str, Any]] = [
    {"name": "a", "adapter": {"r": 4, "lora_dropout": 0.1}, "train": {"global_batch_size": 2, "learning_rate": 3e-3}},
    {"name": "b", "adapter": {"r": 2, "use_dora": True}, "train": {"global_batch_size": 3, "learning_rate": 3e-3}},
]
"""6 and 4 optimizer steps."""


class Counted:
    """Counts events by type, and looks at what is on the disk by then."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.result: Any = None
        self.logged: list[tuple[int, int]] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunBegan):
            self.out = event.output_dir
        if isinstance(event, CheckpointSaved):
            assert (event.folder / "manifest.json").exists()
            assert json.loads((self.out / "run.json").read_text())["saved"][event.job] == event.step
            steps = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
            self.logged.append((event.step, max(line["step"] for line in steps if line["job"] == event.job)))
        if isinstance(event, SavePointReached | RunEnded):
            assert (self.out / "report.html").exists()
        if isinstance(event, RunEnded):
            assert json.loads((self.out / "run.json").read_text())["result"]["status"] == event.result.status
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def counted() -> Counted:
    """Of the whole run."""
    return Counted()


@pytest.fixture(scope="module")
def whole(tiny_base: Base, tmp_path_factory: pytest.TempPathFactory, counted: Counted) -> dict[str, Any]:
    """A finished run of these jobs, with a checkpoint and an evaluation of "a" every second step."""
    folder = tmp_path_factory.mktemp("whole")
    jobs, draw = json.loads(json.dumps(JOBS)), random.Random(0)
    for job in jobs:
        path = folder / f"{job['name']}.jsonl"
        picks = [draw.choices(WORDS, k=draw.randrange(2, 12)) for _ in range(12)]
        path.write_text("".join(json.dumps({"prompt": " ".join(p), "completion": p[0]}) + "\n" for p in picks))
        job["data"] = {"path": str(path)}
    jobs[0]["data"]["eval_path"] = jobs[0]["data"]["path"]
    tree = {
        "base_model": tiny_base("shallow"), "output_dir": str(folder / "out"), "max_tokens_per_microbatch": 64, "save_every": 2,
        "eval_every": 2, "device": "cpu", "jobs": jobs,
    }  # fmt: skip
    counted.result = packlora.train(tree, subscribers=[counted])
    return tree


@pytest.fixture
def out(whole: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same run in a folder of its own."""
    return {**whole, "output_dir": str(tmp_path / "out")}


def lines(tree: dict[str, Any], log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(tree["output_dir"]) / f"{log}.jsonl").read_text().splitlines()]


def warnings(tree: dict[str, Any]) -> list[str]:
    found: list[str] = json.loads((Path(tree["output_dir"]) / "run.json").read_text())["warnings"]
    return found


def test_a_subscriber_hears_what_the_logs_hold_and_the_files_are_there_by_then(
    whole: dict[str, Any], counted: Counted
) -> None:
    number = Counter(type(event) for event in counted.events)
    for kind, log in (
        (Stepped, "metrics"), (Evaluated, "evals"), (MicrobatchDone, "microbatches"), (WindowPlanned, "windows"),
    ):  # fmt: skip
        assert number[kind] == len(lines(whole, log)) > 0
    told = [(event.job, event.step, event.loss, event.grad_norm, event.lr) for event in counted.of(Stepped)]
    logged = [
        (line["job"], line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines(whole, "metrics")
    ]
    assert told == logged
    assert (number[RunBegan], number[TrainingBegan], number[RunEnded]) == (1, 1, 1)
    assert isinstance(counted.events[0], RunBegan) and isinstance(counted.events[-1], RunEnded)
    assert counted.events[-1].result is counted.result
    assert [(job.name, job.step, job.num_steps) for job in counted.events[0].jobs] == [("a", 0, 6), ("b", 0, 4)]
    assert counted.events[0].config["jobs"][0]["name"] == "a"
    assert {(event.job, event.step) for event in counted.of(JobDone)} == {("a", 6), ("b", 4)}
    begun = [(event.job, event.step) for event in counted.of(CheckpointBegins)]
    assert begun == [(event.job, event.step) for event in counted.of(CheckpointSaved)]
    assert set(begun) == {("a", 2), ("a", 4), ("a", 6), ("b", 2), ("b", 4)}
    assert counted.logged and all(saved <= logged for saved, logged in counted.logged)  # training goes on meanwhile


class HeldBack:
    """A subscriber: the checkpoint of a's second step is not written before its third step is told.

    Args:
        written: called before it is written, then.
        told: called when the third step is told.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, written: Callable[[], None], told: Callable[[], None] = lambda: None
    ) -> None:
        self.third, self.waited, self.told = threading.Event(), list[bool](), told
        original = checkpoint.write_folder

        def write_folder(path: Path, write: Any) -> None:
            if (path.parent.name, path.name) == ("a", "checkpoint-2"):
                self.waited.append(self.third.wait(SECONDS))
                written()
            original(path, write)

        monkeypatch.setattr(checkpoint, "write_folder", write_folder)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped) and (event.job, event.step) == ("a", 3):
            self.third.set()
            self.told()


def writers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("checkpoints")]


@pytest.mark.parametrize("optim", ["adamw_torch", pytest.param("sgd", marks=pytest.mark.soak)])
def test_training_goes_on_while_a_checkpoint_is_written_which_holds_its_own_step(
    optim: str, out: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [{**job, "train": {**job["train"], "optim": optim}} for job in out["jobs"]]
    tree = {**out, "jobs": jobs, "save_total_limit": 10}
    packlora.train({**tree, "output_dir": str(tmp_path / "quick")})
    held_back = HeldBack(monkeypatch, lambda: None)
    assert packlora.train(tree, subscribers=[held_back]).status == "done"
    assert held_back.waited == [True]
    assert not writers()
    folders = sorted(path.relative_to(tmp_path / "quick") for path in (tmp_path / "quick").glob("?/checkpoint-*"))
    assert len(folders) == 5
    for folder in folders:
        ours, wanted = tmp_path / "out" / folder, tmp_path / "quick" / folder
        tensors = sorted(path.name for path in wanted.glob("*.safetensors"))
        assert tensors == sorted(path.name for path in ours.glob("*.safetensors")) != []
        for name in tensors:
            assert (ours / name).read_bytes() == (wanted / name).read_bytes(), (folder, name)
        state = json.loads((ours / "trainer_state.json").read_text())
        assert state["global_step"] == max(line["step"] for line in state["log_history"]) == int(folder.name[11:])
        checkpoint.check(ours, folder.parent.name, json.loads((tmp_path / "out" / "run.json").read_text())["id"])


def test_an_interruption_while_a_checkpoint_is_written_ends_when_it_is_there(
    out: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = list[bool]()

    def late() -> None:
        time.sleep(0.2)
        locked.append((tmp_path / "out" / ".lock").exists())

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packlora.train(out, subscribers=[HeldBack(monkeypatch, late, interrupt)])
    assert locked == [True]
    assert not writers() and not (tmp_path / "out" / ".lock").exists()
    assert [path.name for path in (tmp_path / "out" / "a").iterdir()] == ["checkpoint-2"]
    monkeypatch.undo()
    assert packlora.train(out, resume=True).status == "done"


def test_a_checkpoint_that_fails_while_training_goes_on_ends_the_run_with_the_newest_steps_saved(
    out: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        packlora.WriteError, match=r"'a': step 2 cannot be written.* Kept: a: step ([34]) of \1, b: step"
    ):
        packlora.train(out, subscribers=[HeldBack(monkeypatch, full)])
    monkeypatch.undo()
    (job,) = {path.name for path in (tmp_path / "out" / "a").glob("checkpoint-*")}
    assert job in ("checkpoint-3", "checkpoint-4")
    assert packlora.train(out, resume=True).status == "done"


def test_a_subscriber_that_raises_costs_a_warning_and_no_bit_and_the_next_one_hears_everything(
    whole: dict[str, Any], out: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    counted, calls = Counted(), 0

    def raises(event: Event) -> None:
        nonlocal calls
        if isinstance(event, Stepped):
            calls += 1
            raise RuntimeError("no network")

    capsys.readouterr()
    assert packlora.train(out, subscribers=[raises, counted]).status == "done"
    assert calls == 1
    assert len(counted.of(Stepped)) == 10
    same_bits(Path(whole["output_dir"]), Path(out["output_dir"]), JOBS)
    (warning,) = [text for text in warnings(out) if "RuntimeError: no network" in text]
    assert "raises failed at Stepped" in warning
    assert capsys.readouterr().out.count("RuntimeError: no network") == 1


def test_a_run_that_a_subscriber_interrupts_is_resumed_from_its_checkpoints(
    whole: dict[str, Any], out: dict[str, Any]
) -> None:

    def interrupts(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 3:
            raise KeyboardInterrupt

    first, second = Counted(), Counted()
    with pytest.raises(KeyboardInterrupt):
        packlora.train(out, subscribers=[first, interrupts])
    assert packlora.train(out, resume=True, subscribers=[second]).status == "done"
    same_bits(Path(whole["output_dir"]), Path(out["output_dir"]), JOBS)
    begun = second.of(RunBegan)[0]
    steps = {job.name: job.step for job in begun.jobs}
    told = [event for event in first.events if isinstance(event, Stepped | Evaluated)]
    assert begun.earlier == tuple(event for event in told if 0 < steps[event.job] >= event.step)
    assert 0 < len(begun.earlier) < len(told)  # "a" has no checkpoint, and the third step of "b" is in none


def test_a_subscriber_stops_the_run_which_saves_and_goes_on_to_the_same_bits_and_each_step_is_told_once(
    whole: dict[str, Any], out: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    counted = Counted()

    def enough(event: Event) -> Stop | None:
        return (
            Stop(reason="enough for today")
            if isinstance(event, Stepped) and (event.job, event.step) == ("a", 3)
            else None
        )

    result = packlora.train(out, subscribers=[counted, enough])
    assert (result.status, result.signal, result.exit_code) == ("interrupted", None, 0)
    assert "enough: enough for today: finishing the present microbatch, then saving" in capsys.readouterr().out
    steps = {name: job.step for name, job in result.jobs.items()}
    assert steps["a"] == 3
    for name, step in steps.items():
        assert (Path(out["output_dir"]) / name / f"checkpoint-{step}" / "manifest.json").exists()
    again = packlora.train(out, resume=True, subscribers=[counted])
    assert again.status == "done"
    same_bits(Path(whole["output_dir"]), Path(out["output_dir"]), JOBS)
    first, second = counted.of(RunBegan)
    assert first.run == second.run
    assert {job.name: job.step for job in second.jobs} == steps
    told_first = counted.events[: counted.events.index(second)]
    assert second.earlier == tuple(event for event in told_first if isinstance(event, Stepped | Evaluated))
    assert first.earlier == ()
    told = Counter((event.job, event.step) for event in counted.of(Stepped))
    assert told == Counter((line["job"], line["step"]) for line in lines(whole, "metrics"))
    assert Counter((event.job, event.step) for event in counted.of(Evaluated)) == Counter(
        (line["job"], line["step"]) for line in lines(whole, "evals")
    )


@pytest.mark.parametrize("kind", [Stepped, pytest.param(Evaluated, marks=pytest.mark.soak), MicrobatchDone])
def test_a_subscriber_stops_one_job_with_its_adapter_and_no_bit_of_the_other_changes(
    kind: type, whole: dict[str, Any], out: dict[str, Any]
) -> None:
    """Asked for at its second step, at the evaluation after it, or in the middle of it."""
    counted = Counted()

    def rule(event: Any) -> Stop | None:
        if not isinstance(event, kind):
            return None
        own = event.batches.get("a") == 1 if isinstance(event, MicrobatchDone) else (event.job, event.step) == ("a", 2)
        return Stop("a", "it is good enough") if own else None

    result = packlora.train(out, subscribers=[rule, counted])
    assert (result.status, result.jobs["a"].status, result.jobs["a"].step) == ("done", "done", 2)
    assert result.jobs["b"].step == 4
    assert result.jobs["a"].eval_after is not None
    same_bits(Path(whole["output_dir"]), Path(out["output_dir"]), JOBS[1:])
    (done,) = [event for event in counted.of(JobDone) if event.job == "a"]
    assert done.stopped is not None and done.stopped.endswith("rule: it is good enough")
    assert any("job 'a' ends at step 2 of 6, as asked by" in text for text in warnings(out))
    kept = {name: tensor.clone() for name, tensor in adapter(Path(out["output_dir"]), "a").items()}

    again = packlora.train(out, resume=True)  # it stays ended
    assert (again.tokens, again.jobs["a"].step, again.jobs["a"].status) == (0, 2, "done")
    assert all(tensor.equal(kept[name]) for name, tensor in adapter(Path(out["output_dir"]), "a").items())
    sent_back = packlora.train(out, resume=True, resume_from=["a=2"])  # unless it is sent on
    assert sent_back.jobs["a"].step == 6
    same_bits(Path(whole["output_dir"]), Path(out["output_dir"]), JOBS)


def test_a_job_that_was_stopped_while_the_run_was_stopped_stays_ended(out: dict[str, Any]) -> None:
    def both(event: Event) -> Stop | None:
        return Stop("a") if isinstance(event, Stepped) and (event.job, event.step) == ("a", 3) else None

    def run(event: Event) -> Stop | None:
        return Stop() if isinstance(event, Stepped) and (event.job, event.step) == ("a", 3) else None

    assert packlora.train(out, subscribers=[both, run]).status == "interrupted"
    result = packlora.train(out, resume=True)
    assert (result.status, result.jobs["a"].step, result.jobs["b"].step) == ("done", 3, 4)
    for path in Path(out["output_dir"]).glob("a/checkpoint-*"):
        shutil.rmtree(path)
    again = packlora.train(out, resume=True)  # its finished adapter tells it alone
    assert (again.tokens, again.jobs["a"].step, again.jobs["a"].status) == (0, 3, "done")


def test_the_end_is_the_last_event_also_where_it_is_answered_with_a_stop(
    out: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    counted = Counted()
    ends = [lambda event: Stop() if isinstance(event, RunEnded) else None, counted]
    assert packlora.train(out, max_steps=1, subscribers=ends).status == "done"
    assert isinstance(counted.events[-1], RunEnded)
    assert "finishing the present microbatch" not in capsys.readouterr().out


def test_an_evaluation_that_an_interruption_put_off_ends_a_job_where_it_would_have_ended(
    whole: dict[str, Any], out: dict[str, Any]
) -> None:
    def rule(event: Event) -> Stop | None:
        return Stop("a") if isinstance(event, Evaluated) and (event.job, event.step) == ("a", 2) else None

    def interrupts(event: Event) -> Stop | None:
        return Stop() if isinstance(event, Stepped) and (event.job, event.step) == ("a", 2) else None

    assert packlora.train(out, subscribers=[interrupts]).jobs["a"].step == 2
    assert not [line for line in lines(out, "evals") if line["step"] == 2]

    def breaks_off(event: Event) -> None:
        if isinstance(event, Stepped):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packlora.train(out, resume=True, subscribers=[rule, breaks_off])
    result = packlora.train(out, resume=True)  # without the rule: what it has asked for is on the disk
    assert (result.status, result.jobs["a"].step, result.jobs["b"].step) == ("done", 2, 4)
    same_bits(Path(whole["output_dir"]), Path(out["output_dir"]), JOBS[1:])


def test_a_job_that_a_subscriber_ended_is_done_also_when_its_data_is_gone(out: dict[str, Any], tmp_path: Path) -> None:
    tree = json.loads(json.dumps(out))
    shutil.copy(tree["jobs"][0]["data"]["path"], tmp_path / "rows.jsonl")
    tree["jobs"][0]["data"] = {"path": str(tmp_path / "rows.jsonl")}

    def rule(event: Event) -> Stop | None:
        return Stop("a") if isinstance(event, Stepped) and (event.job, event.step) == ("a", 2) else None

    assert packlora.train(tree, subscribers=[rule]).status == "done"
    (tmp_path / "rows.jsonl").unlink()
    result = packlora.train(tree, resume=True)
    assert (result.status, result.jobs["a"].status, result.jobs["a"].failure) == ("done", "done", None)


def test_a_job_to_end_that_is_not_there_is_said(out: dict[str, Any]) -> None:
    assert packlora.train(out, max_steps=1, subscribers=[lambda event: Stop("c")]).status == "done"
    assert [text for text in warnings(out) if "'c'" in text] == [
        "no job 'c' could end, as asked by <lambda>: there is none"
    ]


async def awaited(event: Event) -> None: ...


class Awaited:
    async def __call__(self, event: Event) -> None: ...


@pytest.mark.parametrize(
    ("subscribers", "said"),
    [
        ([{}], "subscribers are functions of one event; got dict"),
        (None, "subscribers are a list of functions of one event; got NoneType"),
        (print, "subscribers are a list of functions of one event; got builtin_function_or_method"),
        ({"a": print}, "subscribers are a list of functions of one event; got dict"),
        ("", "subscribers are a list of functions of one event; got str"),
        ([awaited], "subscribers are called and not awaited; awaited is async"),
        ([Awaited()], "subscribers are called and not awaited; Awaited is async"),
    ],
)
def test_a_subscriber_that_cannot_be_called_is_refused_before_anything_is_done(
    subscribers: Any, said: str, out: dict[str, Any]
) -> None:
    with pytest.raises(packlora.InputError, match=said):
        packlora.train(out, subscribers=subscribers)
    assert not Path(out["output_dir"]).exists()


def test_subscribers_may_come_one_after_the_other(out: dict[str, Any]) -> None:
    counted = Counted()
    packlora.train(out, max_steps=1, subscribers=(subscriber for subscriber in [counted]))  # type: ignore[arg-type]
    assert len(counted.of(Stepped)) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"overrides": "keep_outputs=true"},
            "overrides is a list of texts of the form dotted.key=value; got 'keep_outputs",
        ),
        ({"overrides": [1]}, r"overrides is a list of texts of the form dotted.key=value; got \[1\]"),
        (
            {"resume_from": "a=2", "resume": True},
            "resume_from is a list of texts of the form STEP or JOB=STEP; got 'a=2'",
        ),
        (
            {"resume_from": [2], "resume": True},
            r"resume_from is a list of texts of the form STEP or JOB=STEP; got \[2\]",
        ),
        *(
            ({"max_steps": odd}, "max_steps is a number of optimizer steps, at least 1")
            for odd in (0, -1, "3", 1.5, True)
        ),
    ],
)
def test_arguments_that_are_none_are_refused_before_anything_is_done(
    given: dict[str, Any], said: str, out: dict[str, Any]
) -> None:
    with pytest.raises(packlora.InputError, match=said):
        packlora.train(out, **given)
    assert not Path(out["output_dir"]).exists()


def test_a_run_nested_without_end_is_refused(out: dict[str, Any]) -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(packlora.InputError, match="nested too deep"):
        packlora.train({**out, "keep_outputs": deep})
