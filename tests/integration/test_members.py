"""Jobs that join and leave while a run trains: their numbers, those of the others, and what becomes of them in a run that is
broken off and resumed."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import WORDS, tiny_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from seeds import SOAK, some
from test_preference import judged, pairs
from test_training import adapter, distance
from typer.testing import CliRunner
from waiting import SECONDS, wait_for

import packlora
from packlora.adapters.attach import adapted_layers
from packlora.cli import app
from packlora.commands.control import add_jobs, clone_job, stop_job
from packlora.engine.passes import SingleDevice
from packlora.events import Event, JobJoined, MicrobatchDone, Stepped, Stop, WindowPlanned
from packlora.files import lock_folder
from packlora.schedule.planner import Planner
from packlora.sweep import members
from packlora.sweep.control import Add, Clone, Control, Refusal, StopJob, ask

ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 3, "target_modules": ["q_proj", "down_proj"]},
    "b": {"r": 2, "use_dora": True, "lora_dropout": 0.1, "target_modules": ["v_proj"]},
    "c": {"r": 5, "use_dora": True, "lora_dropout": 0.2, "bias": "all"},  # on layers that had no adapter
    "d": {"r": 4, "lora_dropout": 0.0, "target_modules": ["k_proj", "up_proj"]},
}
LOGS = ("evals.jsonl", "metrics.jsonl")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """qwen2, which has biases."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("qwen2", num_hidden_layers=1, hidden_size=32, intermediate_size=48).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packlora.runtime.windows.Planner", partial(Planner, window_rounds=2))


def job(name: str, folder: Path, rows: int = 12, **train: Any) -> dict[str, Any]:
    path = folder / f"{name}.jsonl"
    picks = [[WORDS[(at * 5 + len(name) + turn) % len(WORDS)] for turn in range(2 + at % 5)] for at in range(rows)]
    path.write_text("".join(json.dumps({"prompt": " ".join(p), "completion": name + p[0]}) + "\n" for p in picks))
    settings = {"global_batch_size": 2, "learning_rate": 1e-2, "num_train_epochs": 1} | train
    data = {"path": str(path), "eval_path": str(path)}
    return {"name": name, "data": data, "adapter": ADAPTERS[name[0]], "train": settings, "seed": 7}


def tree_of(base: str, folder: Path, names: str, dtype: str = "float64", **changes: Any) -> dict[str, Any]:
    return {
        "base_model": base, "device": "cpu", "dtype": dtype, "max_tokens_per_microbatch": 60, "save_every": 2,
        "save_total_limit": None, "output_dir": str(folder / "out"), "jobs": [job(name, folder) for name in names],
    } | changes  # fmt: skip


def at_window(number: int, action: Callable[[], Any]) -> Callable[[Event], Any]:
    """A subscriber that does something while the window whose first round is `number` trains, once in all sessions."""
    done: list[int] = []

    def heard(event: Event) -> Any:
        if isinstance(event, WindowPlanned) and event.window == number and not done:
            done.append(1)
            return action()
        return None

    return heard


class InThreads:
    """Calls of commands in threads of their own; the run goes on when their requests are there. `answers` gives theirs."""

    def __init__(self, out: Path) -> None:
        self.out, self.answers, self.threads = out, dict[str, str](), list[threading.Thread]()

    def call(self, name: str, command: Callable[..., str], *arguments: Any) -> None:
        def called() -> None:
            try:
                self.answers[name] = command(self.out, *arguments)
            except packlora.InputError as error:
                self.answers[name] = str(error)

        before = len(Control(self.out).asked())
        thread = threading.Thread(target=called)
        thread.start()
        self.threads.append(thread)
        wait_for(lambda: len(Control(self.out).asked()) > before or not thread.is_alive())

    def join(self) -> None:
        for thread in self.threads:
            thread.join(SECONDS)


def alone(tree: dict[str, Any], own: dict[str, Any], folder: Path) -> Path:
    packlora.train({**tree, "jobs": [own], "output_dir": str(folder)})
    return folder


def losses(out: Path, name: str) -> list[Any]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [[line["step"], line["loss"], line["tokens"]] for line in lines if line["job"] == name]


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float64", 1e-10), pytest.param("float32", 1e-5, marks=pytest.mark.soak)]
)
def test_jobs_that_join_stop_and_are_cloned_have_the_numbers_of_the_same_jobs_alone(
    dtype: str, bound: float, base: str, tmp_path: Path
) -> None:
    tree, out = tree_of(base, tmp_path, "ab", dtype), tmp_path / "out"
    more = tmp_path / "more.yaml"
    c = job("c", tmp_path, global_batch_size=3)
    c["data"]["path"] = "c.jsonl"  # beside the file
    more.write_text(json.dumps({"jobs": [c]}))
    calls, heard = InThreads(out), list[Event]()

    def ask() -> None:
        calls.call("add", add_jobs, more)
        calls.call("stop", stop_job, "b")
        calls.call("clone", clone_job, "a", "a-2", ["train.learning_rate=2e-2", "adapter.r=6"])
        calls.call("weights", clone_job, "a", "a-3", ["train.learning_rate=5e-3"], True)
        calls.call("twice", clone_job, "a", "A", [])
        calls.call("unknown", stop_job, "z")
        calls.call("key", clone_job, "a", "a-4", ["train.rate=1"])
        calls.call("file", clone_job, "a", "a-5", ["data.path=nowhere.jsonl"])
        calls.call("named", clone_job, "a", "a-6", ["name=z"], True)

    result = packlora.train(tree, subscribers=[at_window(2, ask), heard.append])
    calls.join()
    assert calls.answers["add"] == "job 'c' joined at round 4, for 4 optimizer steps"
    assert calls.answers["stop"].startswith("job 'b' ends at step 4; its adapter is saved to ")
    assert calls.answers["clone"] == "job 'a-2' joined at round 4, for 6 optimizer steps"
    assert calls.answers["weights"] == "job 'a-3' joined at round 4, for 6 optimizer steps"
    assert "refused: jobs: the name 'A' is used twice (also as 'a')" in calls.answers["twice"]
    assert calls.answers["unknown"].startswith("refused: there is no job 'z'; running: a")
    assert "job 'a-4': train.rate: unknown key" in calls.answers["key"]
    assert "nowhere.jsonl" in calls.answers["file"]
    assert calls.answers["named"] == "refused: --set name=z: the new job is called 'a-6'; leave that out"
    assert not (out / "a-6").exists()
    assert {name: (own.status, own.step) for name, own in result.jobs.items()} == {
        "a": ("done", 6), "b": ("done", 4), "c": ("done", 4), "a-2": ("done", 6), "a-3": ("done", 6),
    }  # fmt: skip
    assert [event.job for event in heard if isinstance(event, JobJoined)] == ["c", "a-2", "a-3"]
    rounds = [event.round for event in heard if isinstance(event, MicrobatchDone)]
    assert rounds == sorted(rounds) and rounds[-1] == 9
    assert not any("b" in event.batches for event in heard if isinstance(event, MicrobatchDone) and event.round >= 4)
    record = json.loads((out / "run.json").read_text())
    joined = {change["join"]["name"]: change["join"] for change in record["changes"] if "join" in change}
    assert list(record["jobs"]) == ["a", "b", "c", "a-2", "a-3"]
    names = {"a": tree["jobs"][0], **joined}
    for name, own in names.items():
        by_itself = alone(tree, own, tmp_path / f"alone-{name}")
        assert distance(adapter(out, name), adapter(by_itself, name)) < bound, name
        for ours, theirs in zip(losses(out, name), losses(by_itself, name), strict=True):
            assert ours[::2] == theirs[::2] and abs(ours[1] - theirs[1]) < bound
    by_itself = alone(tree, tree["jobs"][1], tmp_path / "alone-b")
    shutil.copytree(by_itself / "b" / "checkpoint-4", tmp_path / "at4" / "b")
    assert distance(adapter(out, "b"), adapter(tmp_path / "at4", "b")) < bound
    state = json.loads((out / "b" / "trainer_state.json").read_text())
    assert (state["stopped"], state["max_steps"]) == ("packlora stop", 4)


def test_a_clone_with_the_weights_is_the_job_as_it_stands_by_its_own_method(base: str, tmp_path: Path) -> None:
    """Its first evaluation is the last one of the job, and the half that the job's steps leave alone is left alone by its own.
    Interrupted, moved and resumed."""
    tree, first = tree_of(base, tmp_path, "d", eval_every=2, max_tokens_per_microbatch=200), tmp_path / "out"
    (half,) = tree["jobs"]
    half["adapter"] = half["adapter"] | {"init_lora_weights": "olora"}
    paths = {"path": pairs(tmp_path / "pairs.jsonl"), "eval_path": pairs(tmp_path / "held.jsonl", 4, 1)}
    said = {"path": judged(tmp_path / "said.jsonl"), "eval_path": judged(tmp_path / "asked.jsonl", 4, 6)}
    train = half["train"] | {"max_steps": 8}
    dpo = {**half, "name": "a", "data": paths, "adapter": ADAPTERS["a"], "train": train | {"trainer": "dpo"}}
    kto = {**half, "name": "b", "data": said, "adapter": ADAPTERS["b"], "train": train | {"trainer": "kto"}}
    tree["jobs"] = [half, dpo, kto]
    names = [job["name"] for job in tree["jobs"]]
    asking = InThreads(first)

    def clone() -> None:
        for name in names:
            asking.call(name, clone_job, name, f"{name}-2", [], True)

    begins = [at_window(2, clone), at_window(4, Stop)]
    assert packlora.train(tree, subscribers=begins).status == "interrupted"
    asking.join()
    assert all("joined at round 4" in text for text in asking.answers.values()), asking.answers
    out = first.rename(tmp_path / "moved")
    assert packlora.train({**tree, "output_dir": str(out)}, resume=True).status == "done"
    lines = [json.loads(line) for line in (out / "evals.jsonl").read_text().splitlines()]
    told = {(line["job"], line["step"]): {key: line[key] for key in line if key.startswith("eval_")} for line in lines}
    for name in names:
        assert told[f"{name}-2", 0] == pytest.approx(told[name, 4], rel=1e-12) and told[name, 0] != told[name, 4]
    assert told["a-2", 0]["eval_rewards/margins"] != 0 and told["b-2", 0]["eval_rewards/chosen"] != 0
    start, end = load_file(out / "d-2" / "start" / "adapter_model.safetensors"), adapter(out, "d-2")
    for key, tensor in start.items():
        dim = int("lora_B" in key)
        halves = zip(tensor.chunk(2, dim), end[key].chunk(2, dim), strict=True)
        assert [torch.equal(before, after) for before, after in halves] == [False, True], key


def test_a_clone_of_a_clone_is_held_to_the_reference_of_the_first_job(base: str, tmp_path: Path) -> None:
    """Also where that was an adapter, or the new job is to learn preferences and the first one did not."""
    tree, out = tree_of(base, tmp_path, "a", max_tokens_per_microbatch=200), tmp_path / "out"
    (sft,) = tree["jobs"]
    packlora.train({**tree, "output_dir": str(tmp_path / "sft")}, max_steps=1)
    folder = str(tmp_path / "sft" / "a")
    data = {"path": pairs(tmp_path / "pairs.jsonl")}
    own = {"data": data, "train": {"trainer": "dpo", "global_batch_size": 2, "max_steps": 9}, "seed": 3}
    plain = {**own, "name": "plain", "adapter": ADAPTERS["a"]}
    on = {**own, "name": "on", "adapter": {"init_from": folder}}
    tree["jobs"] = [sft, plain, on]
    calls = InThreads(out)

    def clones() -> None:
        for name in ("plain", "on"):
            calls.call(name, clone_job, name, f"{name}-2", [], True)
        learns = ["train.trainer=dpo", f"data.path={data['path']}", "data.eval_path=null"]
        calls.call("a", clone_job, "a", "a-2", learns, True)
        calls.call("other", clone_job, "on", "on-4", ["train.reference=base"], True)

    def again() -> None:
        for name in ("plain", "on"):
            calls.call(f"{name}-2", clone_job, f"{name}-2", f"{name}-3", [], True)

    packlora.train(tree, subscribers=[at_window(2, clones), at_window(4, again)])
    calls.join()
    changes = json.loads((out / "run.json").read_text())["changes"]
    held = {change["join"]["name"]: change["join"]["train"].get("reference") for change in changes}
    assert held == {
        "plain-2": "base", "on-2": folder, "a-2": None, "on-4": "base", "plain-3": "base", "on-3": folder,
    }, calls.answers  # fmt: skip


def request(out: Path, tree: dict[str, Any]) -> None:
    """As the commands write it, without a wait."""
    (out / "control").mkdir(exist_ok=True)
    number = f"{len(list((out / 'control').iterdir())) + 1:016x}"
    (out / "control" / f"request-{number}.json").write_text(json.dumps(tree))


def test_a_run_whose_jobs_join_and_leave_has_the_same_bits_wherever_it_is_broken_off_and_resumed(
    base: str, tmp_path: Path
) -> None:
    tree = tree_of(base, tmp_path, "ab", "float32", save_every=3, eval_every=2)
    tree["jobs"][0]["train"]["num_train_epochs"] = 1.5
    c, d = job("c", tmp_path), job("d", tmp_path, rows=16)

    def asking(out: Path) -> list[Callable[[Event], Any]]:
        add_c = Add(kind="add", jobs=[c]).model_dump()
        add_d, stop_b = Add(kind="add", jobs=[d]).model_dump(), StopJob(kind="stop", job="b").model_dump()
        stop_c = StopJob(kind="stop", job="c").model_dump()
        return [
            at_window(2, lambda: request(out, add_c)),
            at_window(4, lambda: (request(out, stop_b), request(out, add_d))[2:]),
            at_window(6, lambda: request(out, stop_c)),
        ]

    whole, events = tmp_path / "whole", list[Event]()
    want = packlora.train({**tree, "output_dir": str(whole)}, subscribers=[*asking(whole), events.append])
    assert {name: own.step for name, own in want.jobs.items()} == {"a": 9, "b": 6, "c": 4, "d": 8}
    places = range(20, len(events), 9) if SOAK else [len(events) * 13 // 20]
    for number, at in enumerate(places):
        out, count = tmp_path / f"out-{number}", [0]

        def break_off(event: Event, count: list[int] = count, at: int = at, out: Path = out) -> None:
            count[0] += 1
            if count[0] >= at and not list((out / "control").glob("request-*")):  # one that waits is carried out later
                signal.default_int_handler(signal.SIGINT, None)

        subscribers = asking(out)
        with pytest.raises(KeyboardInterrupt):
            packlora.train({**tree, "output_dir": str(out)}, subscribers=[*subscribers, break_off])
        got = packlora.train({**tree, "output_dir": str(out)}, resume=True, subscribers=subscribers)
        assert {name: own.step for name, own in got.jobs.items()} == {name: own.step for name, own in want.jobs.items()}
        for name in "abcd":
            file = Path(name, "adapter_model.safetensors")
            assert (out / file).read_bytes() == (whole / file).read_bytes(), (at, name)
            assert losses(out, name) == losses(whole, name)
        ours, theirs = (json.loads((folder / "run.json").read_text())["changes"] for folder in (out, whole))
        assert ours == theirs


def test_a_job_that_joins_from_a_folder_goes_on_with_the_folder_s_settings_after_a_stop(
    base: str, tmp_path: Path
) -> None:
    """Not with defaults of keys that its own file left out, which run.json has too."""
    tree = tree_of(base, tmp_path, "a", save_every=1)
    first = {**tree["jobs"][0], "adapter": {"r": 2, "lora_alpha": 3, "lora_dropout": 0.4, "target_modules": ["q_proj"]}}
    packlora.train({**tree, "jobs": [first], "output_dir": str(tmp_path / "first")}, max_steps=2)
    on = {**job("c", tmp_path), "adapter": {"init_from": str(tmp_path / "first" / "a")}}
    out, whole, add = tmp_path / "out", tmp_path / "whole", Add(kind="add", jobs=[on]).model_dump()
    begins = [at_window(2, lambda: request(out, add)), at_window(6, Stop)]
    stopped = packlora.train(tree, subscribers=begins)
    assert (stopped.status, stopped.jobs["c"].step) == ("interrupted", 3)
    assert packlora.train(tree, resume=True).status == "done"
    packlora.train({**tree, "output_dir": str(whole)}, subscribers=[at_window(2, lambda: request(whole, add))])
    assert losses(out, "c") == losses(whole, "c")
    assert json.loads((out / "run.json").read_text())["jobs"]["c"]["adapter"]["lora_dropout"] == 0.4


def test_a_run_goes_on_with_more_jobs_in_its_file_and_with_more_epochs_of_one_that_has_ended(
    base: str, tmp_path: Path
) -> None:
    tree = tree_of(base, tmp_path, "ab")
    packlora.train(tree, max_steps=3)
    more = {**tree, "jobs": [*tree["jobs"], job("c", tmp_path)]}
    assert {name: own.step for name, own in packlora.train(more, resume=True).jobs.items()} == {"a": 6, "b": 6, "c": 6}
    longer = json.loads(json.dumps(more))
    longer["jobs"][1]["train"]["num_train_epochs"] = 2
    longer["jobs"].append(job("d", tmp_path))
    heard: list[Event] = []
    result = packlora.train(longer, resume=True, subscribers=[heard.append])
    assert {name: own.step for name, own in result.jobs.items()} == {"a": 6, "b": 12, "c": 6, "d": 6}
    assert {event.job for event in heard if isinstance(event, Stepped)} == {"b", "d"}
    for own in longer["jobs"]:
        by_itself = alone(tree, own, tmp_path / f"alone-{own['name']}")
        assert distance(adapter(tmp_path / "out", own["name"]), adapter(by_itself, own["name"])) < 1e-10, own["name"]
    longer["jobs"][0]["train"]["learning_rate"] = 1.0
    with pytest.raises(packlora.InputError, match=r"job 'a' train\.learning_rate changed"):
        packlora.train(longer, resume=True)
    with pytest.raises(packlora.InputError, match=r"jobs \(names or order\) changed"):
        packlora.train({**longer, "jobs": longer["jobs"][1:]}, resume=True)


def test_a_run_with_a_clone_goes_on_in_a_folder_that_was_moved(base: str, tmp_path: Path) -> None:
    tree, first = tree_of(base, tmp_path, "a"), tmp_path / "out"
    asking = InThreads(first)
    clone = at_window(0, lambda: asking.call("clone", clone_job, "a", "b", ["train.learning_rate=1e-3"], True))
    stop = at_window(2, Stop)
    assert packlora.train(tree, subscribers=[clone, stop]).status == "interrupted"
    asking.join()
    first.rename(tmp_path / "moved")
    result = packlora.train({**tree, "output_dir": str(tmp_path / "moved")}, resume=True)
    assert {name: (job.status, job.step) for name, job in result.jobs.items()} == {"a": ("done", 6), "b": ("done", 6)}


def test_a_run_goes_on_where_a_pattern_of_plans_was_for_the_layers_of_a_job_that_has_left(
    base: str, tmp_path: Path
) -> None:
    tree = tree_of(base, tmp_path, "ab", plans={"plan": {"down_proj": "base-added"}})
    asking = InThreads(tmp_path / "out")
    leave, stop = at_window(0, lambda: asking.call("stop", stop_job, "a")), at_window(4, Stop)
    assert packlora.train(tree, subscribers=[leave, stop]).status == "interrupted"
    asking.join()
    result = packlora.train(tree, resume=True)
    assert {name: (job.status, job.step) for name, job in result.jobs.items()} == {"a": ("done", 2), "b": ("done", 6)}
    # what is told of how the job ended is told again, and its tokens are among those of the run
    evals, steps = (list(map(json.loads, (tmp_path / "out" / log).read_text().splitlines())) for log in LOGS)
    of_a = [line["eval_loss"] for line in evals if line["job"] == "a"]
    assert [result.jobs["a"].eval_before, result.jobs["a"].eval_after] == [of_a[0], of_a[-1]] and len(of_a) == 2
    tokens = json.loads((tmp_path / "out" / "run.json").read_text())["result"]["tokens"]
    assert tokens == sum(line["tokens"] for line in steps)


def test_a_run_that_was_stopped_after_its_last_step_keeps_the_line_of_its_last_window(
    base: str, tmp_path: Path
) -> None:
    tree = tree_of(base, tmp_path, "", jobs=[job("a", tmp_path, rows=10)])

    def stopping(event: Event) -> Any:
        return Stop() if isinstance(event, Stepped) and event.step == 5 else None

    assert packlora.train(tree, subscribers=[stopping]).status == "interrupted"
    assert packlora.train(tree, resume=True).jobs["a"].step == 5
    lines = map(json.loads, (tmp_path / "out" / "windows.jsonl").read_text().splitlines())
    assert [line["window"] for line in lines] == [0, 2, 4]


def test_commands_say_what_is_wrong_where_no_run_trains(base: str, tmp_path: Path) -> None:
    runner = CliRunner()
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text(json.dumps({"jobs": [job("c", tmp_path)], "seed": 1}))
    said = runner.invoke(app, ["add", str(tmp_path), str(jobs)])
    assert said.exit_code == 2 and "'seed' is of the whole run" in said.output
    said = runner.invoke(app, ["stop", str(tmp_path), "a"])
    assert said.exit_code == 2 and "holds no run" in said.output
    (tmp_path / "run.json").write_text("{}")
    said = runner.invoke(app, ["clone", str(tmp_path), "a", "b"])
    assert said.exit_code == 2 and "no run trains in" in said.output
    assert not (tmp_path / "control").exists()


def test_what_is_no_request_is_refused_and_costs_the_run_nothing(base: str, tmp_path: Path) -> None:
    tree, out = tree_of(base, tmp_path, "a"), tmp_path / "out"

    def spoil() -> None:
        control = out / "control"
        control.mkdir()
        (control / f"request-{1:016x}.json").write_text("{")
        (control / f"request-{2:016x}.json").write_text('{"kind": "stop", "job": "a", "path": "/"}')
        (control / f"request-{3:016x}.json").symlink_to(tmp_path / "a.jsonl")
        (control / f"request-{4:016x}.json").mkdir()
        (control / "request-../x.json").parent.mkdir()
        bad = job("c", tmp_path) | {"name": "../c"}
        (control / f"request-{5:016x}.json").write_text(json.dumps({"kind": "add", "jobs": [bad]}))

    assert packlora.train(tree, subscribers=[at_window(0, spoil)]).status == "done"
    answers = {path.name[-6]: json.loads(path.read_text()) for path in (out / "control").glob("answer-*")}
    assert not any(answer["accepted"] for answer in answers.values())
    assert "cannot be a folder name" in answers["5"]["text"]
    assert sorted(answers) == list("12345")


def test_a_clone_whose_weights_find_no_room_is_refused_and_costs_the_run_nothing(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, original = tmp_path / "out", safetensors.torch.save_file

    def save(tensors: Any, path: Path, *args: Any) -> None:
        if out / "b" in path.parents:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        original(tensors, path, *args)

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    clone = {"kind": "clone", "job": "a", "name": "b", "weights": True}
    result = packlora.train(tree_of(base, tmp_path, "a"), subscribers=[at_window(2, lambda: request(out, clone))])
    (answer,) = (json.loads(path.read_text()) for path in (out / "control").iterdir())
    assert result.status == "done" and not (out / "b").exists()
    assert not answer["accepted"] and "No space left on device" in answer["text"]


class Room:
    """A model that has memory for so many adapters; `tried` are the jobs for which one was to be attached."""

    def __init__(self, patched: pytest.MonkeyPatch, most: int) -> None:
        self.tried: list[str] = []
        original = members.attach_one

        def attach(model: Any, attached: Any, name: str, *args: Any) -> Any:
            self.tried.append(name)
            there = {key for layer in adapted_layers(model).values() for key in layer.adapters}
            if len(there) >= most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
            return original(model, attached, name, *args)

        patched.setattr(members, "attach_one", attach)


def sweep_of(base: str, folder: Path, concurrent: int, **changes: Any) -> dict[str, Any]:
    rates = {"train.learning_rate": [1e-2, 2e-2, 3e-2, 4e-2]}
    return tree_of(base, folder, "a", sweep={"job": "a", "parameters": rates, "concurrent": concurrent}, **changes)


def joined_in(out: Path) -> dict[str, int]:
    changes = json.loads((out / "run.json").read_text())["changes"]
    return {change["join"]["name"]: change["round"] for change in changes if "join" in change}


@pytest.mark.parametrize(
    ("concurrent", "most", "begun_with"), some([(1, 1, 0), (3, 3, 1), (2, 2, 1), (2, 2, 0), (2, 1, 0)], 2)
)
def test_a_candidate_that_finds_no_memory_waits_until_a_job_has_left_and_learns_the_same(
    concurrent: int, most: int, begun_with: int, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that has ended is on the model while the next one is to join it. Stopped and resumed where one has joined."""
    more = [job("d", tmp_path, rows=20)] * begun_with
    tree = sweep_of(base, tmp_path, concurrent - begun_with)
    tree["jobs"] += more
    packlora.train(tree | {"output_dir": str(tmp_path / "whole")})
    room, out = Room(monkeypatch, most), tmp_path / "out"
    assert packlora.train(tree).status == "done"
    record = json.loads((out / "run.json").read_text())
    told = [text for text in record["warnings"] if "the next candidate waits until another job has left" in text]
    assert told and "out of memory on cpu as job 'a-0" in told[0]
    names = [f"a-00{number}" for number in range(4)]
    assert set(joined_in(out)) == set(names) and json.loads((out / "sweep.json").read_text())["status"] == "done"
    for name in [*names, *["d"] * begun_with]:
        assert distance(adapter(out, name), adapter(tmp_path / "whole", name)) < 1e-10
    assert room.tried.count(names[-1]) <= 5, "it is tried where a job has left, and not in every window"
    for window in some(sorted(set(joined_in(out).values()) - {0}), 3):
        broken = tree | {"output_dir": str(tmp_path / f"broken{window}")}
        assert packlora.train(broken, subscribers=[at_window(window, Stop)]).status == "interrupted"
        assert packlora.train(broken, resume=True).status == "done"
        assert joined_in(Path(broken["output_dir"])) == joined_in(out)
        for name in names:
            assert distance(adapter(Path(broken["output_dir"]), name), adapter(out, name)) < 1e-10


def test_a_lack_that_passes_costs_a_candidate_nothing(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the executor keeps is freed, and the candidate joins in the same round."""
    tree, out, freed, lacked = sweep_of(base, tmp_path, 2), tmp_path / "out", list[int](), list[int]()
    packlora.train(tree | {"output_dir": str(tmp_path / "whole")})
    original = members.attach_one

    def attach(*args: Any) -> Any:
        if not lacked:
            lacked.append(1)
            raise torch.OutOfMemoryError("once")
        return original(*args)

    monkeypatch.setattr(members, "attach_one", attach)
    monkeypatch.setattr(SingleDevice, "free", lambda device: freed.append(1))
    assert packlora.train(tree).status == "done" and freed == lacked == [1]
    assert joined_in(out) == joined_in(tmp_path / "whole")


def test_where_no_job_can_leave_the_run_ends_and_the_sweep_goes_on_when_there_is_memory(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = sweep_of(base, tmp_path, 2, save_every=0)
    tree["jobs"].append(job("d", tmp_path, rows=20))
    out = tmp_path / "out"
    whole = packlora.train(tree | {"output_dir": str(tmp_path / "whole")})
    with monkeypatch.context() as own:
        Room(own, 0)
        with pytest.raises(MemoryError, match=r"as job 'a-002' joined; .* Kept: d: its adapter.*--resume"):
            packlora.train(tree)
    assert json.loads((out / "run.json").read_text())["result"]["jobs"]["d"]["status"] == "done"
    assert json.loads((out / "sweep.json").read_text())["status"] == "running"
    assert packlora.train(tree, resume=True).status == whole.status == "done"
    for name in ("d", "a-001", "a-002", "a-003"):
        assert distance(adapter(out, name), adapter(tmp_path / "whole", name)) < 1e-10


def test_a_run_on_several_processes_refuses_what_is_asked(tmp_path: Path) -> None:
    tmp_path.joinpath("run.json").write_text("{}")
    calls = InThreads(tmp_path)
    with lock_folder(tmp_path):
        calls.call("stop", stop_job, "a")
        Refusal(tmp_path, 2)(WindowPlanned(0, 16, "greedy", 60, 1, 0, 1, 0.0, "at bound", 0.0, 0.0))
        calls.join()
    assert calls.answers["stop"].startswith("refused: the run trains on 2 processes")


def test_a_command_whose_run_is_killed_takes_its_request_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packlora.sweep.control.LOOK_S", 0.05)
    tmp_path.joinpath("run.json").write_text("{}")
    calls = InThreads(tmp_path)
    with lock_folder(tmp_path):
        calls.call("stop", stop_job, "a")
    calls.join()
    assert "has ended without an answer; nothing was changed" in calls.answers["stop"]
    assert not list((tmp_path / "control").iterdir())


def test_a_command_that_is_interrupted_as_it_begins_to_wait_takes_its_request_back(tmp_path: Path) -> None:
    def told(_: str) -> None:
        raise KeyboardInterrupt

    tmp_path.joinpath("run.json").write_text("{}")
    with lock_folder(tmp_path), pytest.raises(KeyboardInterrupt):
        ask(tmp_path, StopJob(kind="stop", job="a"), told)
    assert not list((tmp_path / "control").iterdir())


def test_a_folder_of_requests_that_is_a_link_is_refused_and_not_waited_at(tmp_path: Path) -> None:
    tmp_path.joinpath("run.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "control").symlink_to(tmp_path / "elsewhere")
    with (
        lock_folder(tmp_path),
        pytest.raises(packlora.InputError, match="control is a link, which a run does not follow"),
    ):
        stop_job(tmp_path, "a")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_job_that_would_begin_with_a_checkpoint_that_goes_is_refused(base: str, tmp_path: Path) -> None:
    out, more = tmp_path / "out", tmp_path / "more.yaml"
    more.write_text(
        json.dumps({"jobs": [job("c", tmp_path) | {"adapter": {"init_from": str(out / "a/checkpoint-2")}}]})
    )
    calls = InThreads(out)
    tree = tree_of(base, tmp_path, "a", save_total_limit=1)
    packlora.train(tree, subscribers=[at_window(2, lambda: calls.call("add", add_jobs, more))])
    calls.join()
    assert f"job 'c': {out / 'a/checkpoint-2'} is of job 'a', which still trains in this run" in calls.answers["add"]


def test_a_command_whose_request_was_removed_does_not_wait_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packlora.sweep.control.LOOK_S", 0.05)
    tmp_path.joinpath("run.json").write_text("{}")
    calls = InThreads(tmp_path)
    with lock_folder(tmp_path):
        calls.call("stop", stop_job, "a")
        (tmp_path / "control").rename(tmp_path / "gone")  # at once: a request may be on its way
        calls.join()
    assert "was removed before the run" in calls.answers["stop"]


def test_a_command_whose_run_is_killed_once_its_change_is_recorded_says_that_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packlora.sweep.control.LOOK_S", 0.05)
    record = tmp_path / "run.json"
    record.write_text("{}")
    calls = InThreads(tmp_path)
    with lock_folder(tmp_path):
        calls.call("stop", stop_job, "a")
        (asked,) = Control(tmp_path).asked()
        record.write_text(json.dumps({"changes": [{"round": 16, "leave": "a", "step": 16, "request": asked.id}]}))
    calls.join()
    assert calls.answers["stop"].startswith("accepted, but the run") and "--resume does it" in calls.answers["stop"]


def test_the_paths_of_a_clone_are_those_that_the_command_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run may train in another folder, where a file of the same name holds other rows."""
    for name in ("own.jsonl", "chatml", "q_proj"):
        tmp_path.joinpath(name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("run.json").write_text("{}")
    given = [
        "data.path=own.jsonl",
        "data.eval_path=absent.jsonl",
        "data.chat_template=chatml",
        "adapter.target_modules=q_proj",
    ]
    calls, control = InThreads(tmp_path), Control(tmp_path)
    with lock_folder(tmp_path):
        calls.call("clone", clone_job, "a", "b", given)
        (asked,) = control.asked()
        control.answer(asked.id, True, "it joined")
        calls.join()
    assert isinstance(asked.request, Clone)
    assert asked.request.overrides == [f'data.path="{tmp_path / "own.jsonl"}"', *given[1:]]
