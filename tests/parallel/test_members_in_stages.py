"""Jobs that join and leave a run on the stages of a pipeline: as on one process, between two windows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import tiny_model
from ranks import Ranks
from test_members import InThreads, at_window, job, losses, tree_of
from test_preference import judged
from test_training import adapter, distance

import packlora
from packlora.commands.control import add_jobs, clone_job, stop_job
from packlora.events import Event, JobJoined, Stepped, Stop
from packlora.schedule.planner import Planner

SAMPLES = "samples.jsonl"

Groups = Callable[[int], Ranks]
NAMES = ("a", "b", "c", "a-2", "a-3")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("qwen2", num_hidden_layers=2, hidden_size=32, intermediate_size=48).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def asking(rank: int, tree: dict[str, Any], more: str, until: int, resume: bool) -> tuple[Any, ...]:
    """A run of which much is asked in its second window, and which is stopped at the until-th step from there on. Its status,
    the answers, who has joined, and the names in its result."""
    calls, joined, stepped = InThreads(Path(tree["output_dir"])), list[str](), 0

    def ask() -> None:
        calls.call("add", add_jobs, Path(more))
        calls.call("stop", stop_job, "b")
        calls.call("clone", clone_job, "a", "a-2", ["train.learning_rate=2e-2", "adapter.r=6"])
        calls.call("weights", clone_job, "a", "a-3", ["train.learning_rate=5e-3"], True)
        calls.call("twice", clone_job, "a", "A", [])
        calls.call("file", clone_job, "a", "a-5", ["data.path=nowhere.jsonl"])

    def heard(event: Event) -> Stop | None:
        nonlocal stepped
        if isinstance(event, JobJoined):
            joined.append(event.job)
        stepped += isinstance(event, Stepped) and bool(joined)
        return Stop() if until and stepped == until else None

    asks = [] if resume else [at_window(2, ask)]
    with mock.patch("packlora.runtime.windows.Planner", partial(Planner, window_rounds=2)):
        result = packlora.train(tree, subscribers=[*asks, heard], resume=resume)
    calls.join()
    return result.status, calls.answers, joined, list(result.jobs)


@pytest.mark.parametrize("processes", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_jobs_join_and_leave_stages_as_they_join_and_leave_one_process(
    processes: int, base: str, ranks: Groups, tmp_path: Path
) -> None:
    """Asked on two stages; stopped after that, and ended on one process, or on two stages of two. The job that is added has
    judged completions and a prompt."""
    tree = tree_of(base, tmp_path, "ab", save_every=0, sample_max_new_tokens=3)
    more = tmp_path / "more.yaml"
    judging = job("c", tmp_path, global_batch_size=3, trainer="kto")
    judging |= {"data": {"path": judged(tmp_path / "said.jsonl")}, "sample_prompts": ["the fox"]}
    more.write_text(json.dumps({"jobs": [judging]}))
    one, out = tmp_path / "one", tmp_path / "out"
    assert asking(0, {**tree, "output_dir": str(one)}, str(more), 0, False)[0] == "done"

    staged = {**tree, "parallel": {"pipeline": 2}}
    (status, answers, joined, names), (_, _, nobody, same) = ranks(2).run(asking, staged, str(more), 3, False)
    assert (status, names, same, nobody) == ("interrupted", list(NAMES), list(NAMES), [])
    assert joined == ["c", "a-2", "a-3"]
    assert answers["add"] == "job 'c' joined at round 4, for 4 optimizer steps"
    assert "job 'b' ends at step 4" in answers["stop"] and "joined at round 4" in answers["weights"]
    assert "twice" in answers["twice"] and "nowhere.jsonl does not exist" in answers["file"]
    both = {**tree, "parallel": {"pipeline": 2, "tensor": 2}}
    told = ranks(4).run(asking, both, str(more), 0, True) if processes == 4 else [asking(0, tree, str(more), 0, True)]
    assert [(own[0], own[3]) for own in told] == [("done", list(NAMES))] * processes
    for name in NAMES:
        assert distance(adapter(out, name), adapter(one, name)) <= 1e-10, name
        ours, theirs = losses(out, name), losses(one, name)
        assert [line[0] for line in ours] == [line[0] for line in theirs] == list(range(1, len(theirs) + 1))
        assert [line[1] for line in ours] == pytest.approx([line[1] for line in theirs], rel=1e-10)
    texts = [
        {(line["job"], line["step"]): line["samples"] for line in map(json.loads, (folder / SAMPLES).open())}
        for folder in (out, one)
    ]
    assert texts[0] == texts[1] and texts[0].keys() == {("c", 0), ("c", 4)}
    records = [json.loads((folder / "run.json").read_text()) for folder in (out, one)]
    for record in records:
        for change in record["changes"]:
            change.pop("request")
    assert records[0]["changes"] == json.loads(json.dumps(records[1]["changes"]).replace(str(one), str(out)))
    assert records[0]["jobs"].keys() == records[1]["jobs"].keys()


def swept(rank: int, tree: dict[str, Any], until: int, resume: bool) -> str:
    """How a run ends that is stopped at the until-th step."""
    stepped = 0

    def heard(event: Event) -> Stop | None:
        nonlocal stepped
        stepped += isinstance(event, Stepped)
        return Stop() if until and stepped == until else None

    with mock.patch("packlora.runtime.windows.Planner", partial(Planner, window_rounds=2)):
        return packlora.train(tree, subscribers=[heard], resume=resume).status


def test_candidates_of_a_sweep_join_and_leave_stages_as_one_process(base: str, ranks: Groups, tmp_path: Path) -> None:
    """One of them fails. Stopped on two stages and ended on one process."""
    tree = tree_of(base, tmp_path, "a", eval_every=2, save_every=0)
    tree["jobs"][0]["data"]["eval_path"] = tree["jobs"][0]["data"]["path"]
    tree["sweep"] = {
        "job": "a", "parameters": {"train.learning_rate": [1e-4, 3e-2, 1e30, 1e-2, 5e-3]}, "concurrent": 2,
        "stopping": {"method": "successive_halving", "min_resource": 2, "reduction_factor": 2},
    }  # fmt: skip
    one, out = tmp_path / "one", tmp_path / "out"
    assert swept(0, {**tree, "output_dir": str(one)}, 0, False) == "done"
    staged = {**tree, "parallel": {"pipeline": 2}}
    assert ranks(2).run(swept, staged, 7, False) == ["interrupted"] * 2
    assert swept(0, tree, 0, True) == "done"
    ours, theirs = (json.loads((folder / "sweep.json").read_text()) for folder in (out, one))
    assert len(theirs["candidates"]) == 5 and len({line["status"] for line in theirs["candidates"]}) == 3
    for own, other in zip(ours["candidates"], theirs["candidates"], strict=True):
        assert own.pop("evals") == [[step, pytest.approx(loss, rel=1e-10)] for step, loss in other.pop("evals")]
        assert {**own, "eval_loss": 0} == {**other, "eval_loss": 0}
        assert distance(adapter(out, own["name"]), adapter(one, own["name"])) <= 1e-10
    assert ours["best"] == theirs["best"]


def failing_on_one(rank: int, tree: dict[str, Any], files: list[str]) -> tuple[str, dict[str, str], list[str]]:
    """A run whose second process finds no memory for job x, and whose processes read job y from files of their own."""
    from packlora.sweep import members

    calls, attach_one = InThreads(Path(tree["output_dir"])), members.attach_one

    def attach(model: Any, attached: Any, name: str, *more: Any) -> Any:
        if rank == 1 and name == "x":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return attach_one(model, attached, name, *more)

    def ask() -> None:
        calls.call("memory", clone_job, "a", "x", [])
        calls.call("files", clone_job, "a", "y", ["data.path=[own.jsonl]"])
        calls.call("both", clone_job, "a", "a-2", ["train.learning_rate=2e-2"])

    own, before = Path(files[rank]), Path.cwd()
    os.chdir(own)
    try:
        with (
            mock.patch("packlora.runtime.windows.Planner", partial(Planner, window_rounds=2)),
            mock.patch("packlora.sweep.members.attach_one", attach),
        ):
            result = packlora.train(tree, subscribers=[at_window(2, ask)])
    finally:
        os.chdir(before)
    calls.join()
    return result.status, calls.answers, list(result.jobs)


def test_a_job_that_one_process_cannot_take_is_refused_on_all_and_costs_the_run_nothing(
    base: str, ranks: Groups, tmp_path: Path
) -> None:
    tree = tree_of(base, tmp_path, "a", save_every=0)
    one = {**tree, "output_dir": str(tmp_path / "one")}
    assert packlora.train(one).status == "done"
    rows = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    files = [tmp_path / name for name in ("first", "second")]
    for file, own in zip(files, (rows, rows[::-1]), strict=True):
        file.mkdir()
        (file / "own.jsonl").write_text("".join(own))
    staged = {**tree, "parallel": {"pipeline": 2, "timeout_s": 20}}
    (status, answers, names), _ = ranks(2).run(failing_on_one, staged, [str(file) for file in files])
    assert (status, names) == ("done", ["a", "a-2"])
    assert "process 1 of 2: job 'x': OutOfMemoryError: CUDA out of memory" in answers["memory"]
    assert "the processes of a run must have the same data of job 'y'" in answers["files"]
    assert answers["both"].startswith("job 'a-2' joined at round 4")
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == ["a", "a-2", "control"]
    assert distance(adapter(tmp_path / "out", "a"), adapter(tmp_path / "one", "a")) <= 1e-10
