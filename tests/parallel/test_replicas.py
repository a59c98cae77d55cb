"""Whole runs on several processes: what one device gives, whoever trains a job and however many share it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import rows_into
from ranks import Ranks
from seeds import SOAK
from test_training import JOBS, adapter, config, distance, steps, train

import packlora
from packlora.errors import InputError
from packlora.events import Event, RunBegan, RunEnded, Stepped, Stop
from packlora.parallel.mesh import Mesh

Groups = Callable[[int], Ranks]


def on_ranks(rank: int, tree: dict[str, Any], options: dict[str, Any]) -> tuple[str, int, list[str]]:
    """A run, on every process: its status, tokens and jobs; or what is wrong with it."""
    try:
        result = packlora.train(tree, **options)
    except InputError as error:
        return str(error), -1, []
    return result.status, result.tokens, list(result.jobs)


def followed(rank: int, tree: dict[str, Any]) -> tuple[tuple[str, int, list[str]], list[str]]:
    """A run, on every process, and the kinds of events that it was told."""
    told: list[str] = []
    return on_ranks(rank, tree, {"subscribers": [lambda event: told.append(type(event).__name__)]}), told


@pytest.fixture(scope="module")
def tree(tiny_base: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four different jobs, two of them with held-out data."""
    folder = tmp_path_factory.mktemp("replicas")
    out = config(
        tiny_base(), folder / "whole", rows_into(folder), dtype="float64", max_tokens_per_microbatch=70, eval_every=2
    )
    for job in out["jobs"][:2]:
        job["data"]["eval_path"] = job["data"]["path"]
    return out


@pytest.fixture(scope="module")
def whole(tree: dict[str, Any]) -> Path:
    """The run on one device."""
    train(tree)
    return Path(tree["output_dir"])


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def same_run(out: Path, whole: Path, bound: float) -> None:
    """Adapters, losses, learning rates, tokens and held-out losses of the jobs of two runs."""
    for job in JOBS:
        assert distance(adapter(out, job["name"]), adapter(whole, job["name"])) <= bound, job["name"]
    ours = {(line["job"], line["step"]): line for line in steps(out)}
    theirs = {(line["job"], line["step"]): line for line in steps(whole)}
    assert ours.keys() == theirs.keys()
    assert len(ours) == len(steps(out)), "a step is there twice"
    for key, line in theirs.items():
        assert ours[key]["loss"] == pytest.approx(line["loss"], rel=max(bound, 1e-12))
        assert ours[key]["grad_norm"] == pytest.approx(line["grad_norm"], rel=max(bound, 1e-12))
        assert (ours[key]["lr"], ours[key]["tokens"]) == (line["lr"], line["tokens"])
    found = {(line["job"], line["step"]): line["eval_loss"] for line in lines(out, "evals")}
    assert found == pytest.approx({(line["job"], line["step"]): line["eval_loss"] for line in lines(whole, "evals")})
    assert not list(out.glob("**/.tmp-*"))


def hears_all_as_of_one_run(events: list[str], whole: Path) -> None:
    for kind in (RunBegan, RunEnded):
        assert events.count(kind.__name__) == 1
    assert (events[0], events[-1]) == ("RunBegan", "RunEnded")
    assert events.count("TrainingBegan") == 1
    assert events.count("Stepped") == len(steps(whole))
    assert events.count("JobDone") == len(JOBS)
    assert events.count("Evaluated") == len(lines(whole, "evals"))
    assert events.count("CheckpointSaved") == events.count("CheckpointBegins") > len(JOBS)


@pytest.mark.parametrize(
    ("processes", "each", "layout"),
    [(2, 1, 2), (2, "auto", None), (4, 2, 2)],
)
def test_a_run_gives_what_one_device_gives(
    processes: int, each: Any, layout: int | None, tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    asked = {**tree, "output_dir": str(tmp_path / "out"), "parallel": {"devices_per_job": each}}
    (done, events), *others = ranks(processes).run(followed, asked)
    tokens = sum(line["tokens"] for line in steps(whole))
    assert done == ("done", tokens, [job["name"] for job in tree["jobs"]])
    assert others == [(done, [])] * (processes - 1), "only the first process has subscribers"
    same_run(tmp_path / "out", whole, 1e-10)
    hears_all_as_of_one_run(events, whole)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["result"]["status"] == "done"
    assert layout is None or len(record["schedule"]["layout"]["groups"]) == layout
    assert sorted(name for group in record["schedule"]["layout"]["groups"] for name in group) == sorted(
        job["name"] for job in tree["jobs"]
    )
    ran = lines(tmp_path / "out", "microbatches")
    assert sorted(line["index"] for line in ran) == list(range(len(ran)))
    assert {line["rank"] for line in ran} == set(range(processes))
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000
    described, alone = record["jobs"], json.loads((whole / "run.json").read_text())["jobs"]
    assert described == alone


def test_jobs_end_as_on_one_device_where_held_out_losses_decide_it(
    tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    """One job's result is its best adapter, the other ends early; a learning rate of its own for B."""
    asked = (
        {"load_best_model_at_end": True, "eval_steps": 1, "learning_rate": 0.3},
        {"early_stopping_patience": 1, "early_stopping_threshold": 10.0, "eval_steps": 1, "loraplus_lr_ratio": 4.0},
    )
    jobs = [job | {"train": job["train"] | more} for job, more in zip(tree["jobs"][:2], asked, strict=True)]
    one, two = ({**tree, "jobs": jobs, "output_dir": str(tmp_path / name)} for name in ("one", "two"))
    alone = train(one)
    assert alone.jobs["dropped"].step == 2
    told = ranks(2).run(on_ranks, {**two, "parallel": {"devices_per_job": 2}}, {})
    assert [status for status, *_ in told] == ["done", "done"]
    for job in jobs:
        found, wanted = (adapter(tmp_path / name, job["name"]) for name in ("two", "one"))
        assert distance(found, wanted) <= 1e-10
    states = [json.loads((tmp_path / name / "lora" / "trainer_state.json").read_text()) for name in ("one", "two")]
    assert states[0]["best_global_step"] == states[1]["best_global_step"] < states[0]["global_step"]


def patient(rank: int, tree: dict[str, Any]) -> bool:
    """A run whose first process takes half a second longer. Whether it had ended when this one asked the others for its
    result, in a message that does not wait longer than timeout_s."""
    record, gather, asked = Path(tree["output_dir"], "run.json"), Mesh.gather, list[bool]()

    def seen(mesh: Mesh, value: Any) -> list[Any]:
        asked.append(record.exists() and json.loads(record.read_text())["result"] is not None)
        return gather(mesh, value)

    def slow(event: Event) -> None:
        if isinstance(event, RunBegan):
            time.sleep(0.5)

    with mock.patch.object(Mesh, "gather", seen):
        packlora.train(tree, subscribers=[slow])
    return asked[-1]


def test_a_job_that_is_whole_on_a_device_has_the_bits_of_one_device(
    tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    """The process that is done first waits for the other, however long."""
    asked = {**tree, "dtype": "float32", "output_dir": str(tmp_path / "out"), "parallel": {"devices_per_job": 1}}
    assert ranks(2).run(patient, asked) == [True, True]
    layout = json.loads((tmp_path / "out" / "run.json").read_text())["schedule"]["layout"]
    for number, names in enumerate(layout["groups"]):
        alone = tmp_path / f"alone-{number}"
        train(
            {
                **tree,
                "dtype": "float32",
                "output_dir": str(alone),
                "jobs": [j for j in tree["jobs"] if j["name"] in names],
            }
        )
        for name in names:
            file = Path(name, "adapter_model.safetensors")
            assert (tmp_path / "out" / file).read_bytes() == (alone / file).read_bytes(), name


# --- stopping, resuming, failing ---------------------------------------------------------------------------------------


def heard(rank: int, tree: dict[str, Any], ends: str | None, at: int, options: dict[str, Any]) -> tuple[str, list[str]]:
    """A run whose subscriber ends a job, or with "" the run, at the at-th step of any job; and what it heard."""
    told: list[Event] = []

    def subscriber(event: Event) -> Stop | None:
        told.append(event)
        if ends is not None and sum(isinstance(one, Stepped) for one in told) == at and isinstance(event, Stepped):
            return Stop(ends or None, "enough")
        return None

    result = packlora.train(tree, subscribers=[subscriber], **options)
    return result.status, [type(event).__name__ for event in told]


@pytest.mark.soak
@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_job_can_be_ended_from_the_first_process(
    each: int, tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    name = "dora.drop"
    jobs = json.loads(json.dumps(tree["jobs"]))
    jobs[1]["train"]["num_train_epochs"], jobs[3]["train"]["num_train_epochs"] = (
        20,
        12,
    )  # so the other process trains it
    asked = {**tree, "jobs": jobs, "output_dir": str(tmp_path / "out"), "parallel": {"devices_per_job": each}}
    assert ranks(2).run(heard, asked, name, 1, {})[0][0] == "done"
    groups = json.loads((tmp_path / "out" / "run.json").read_text())["schedule"]["layout"]["groups"]
    assert name not in groups[0] or each == 2
    ends = {
        job["name"]: max(line["step"] for line in steps(tmp_path / "out") if line["job"] == job["name"]) for job in JOBS
    }
    full = {job["name"]: max(line["step"] for line in steps(whole) if line["job"] == job["name"]) for job in JOBS}
    assert ends[name] < 25
    assert {other: ends[other] for other in ("lora", "rs")} == {other: full[other] for other in ("lora", "rs")}
    state = json.loads((tmp_path / "out" / name / "trainer_state.json").read_text())
    assert "enough" in state["stopped"]


def short_of_memory(rank: int, tree: dict[str, Any], short: int) -> tuple[str, int]:
    """A run in which one process has no memory for microbatches of more than 120 tokens."""
    import torch

    from packlora.engine import engine
    from packlora.engine.parts import num_tokens

    original = engine.run_microbatch

    def run(executor: Any, parts: Any) -> Any:
        if rank == short and num_tokens(parts) > 120:
            raise torch.OutOfMemoryError("out of memory, for this test")
        return original(executor, parts)

    engine.run_microbatch = run
    try:
        result = packlora.train(tree)
    finally:
        engine.run_microbatch = original
    return result.status, json.loads((Path(tree["output_dir"]) / "run.json").read_text())["schedule"]["budget"]


@pytest.mark.parametrize(("each", "short"), [(1, 1), *([(2, 0), (2, 1)] if SOAK else [])])
def test_where_memory_of_one_process_runs_out_all_plan_with_less(
    each: int, short: int, tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    asked = {**tree, "output_dir": str(tmp_path / "out"), "parallel": {"devices_per_job": each}}
    asked |= {"max_tokens_per_microbatch": "auto"}
    told = ranks(2).run(short_of_memory, asked, short)
    assert {status for status, _ in told} == {"done"}
    assert told[0][1] < 2048
    same_run(tmp_path / "out", whole, 1e-10)


# --- bad input ---------------------------------------------------------------------------------------------------------


def with_changes(rank: int, tree: dict[str, Any], changed: int, change: dict[str, Any]) -> tuple[str, int, list[str]]:
    return on_ranks(rank, {**tree, **change} if rank == changed else tree, {})


def test_what_is_wrong_is_said_alike_on_every_process(tree: dict[str, Any], ranks: Groups, tmp_path: Path) -> None:
    fresh = {**tree, "output_dir": str(tmp_path / "out")}

    def refused(*args: Any) -> str:
        told = ranks(2).run(*args)
        assert told[0] == told[1]
        assert told[0][1] == -1, told
        assert not (tmp_path / "out").exists(), "bad input leaves no trace"
        return str(told[0][0])

    assert "same run file and arguments: process 0 has" in refused(with_changes, fresh, 1, {"seed": 5})
    assert refused(with_changes, fresh, 1, {"dtype": "float61"}).startswith("process 1 of 2: the run:\n  dtype")
    assert refused(on_ranks, {**fresh, "base_model": str(tmp_path / "none")}, {}).startswith("base_model")
    assert "devices_per_job is 3, but 2 processes were started" in refused(
        on_ranks, {**fresh, "parallel": {"devices_per_job": 3}}, {}
    )
    assert "with shard_base all 2 processes share every job" in refused(
        on_ranks, {**fresh, "parallel": {"devices_per_job": 1, "shard_base": True}}, {}
    )
    assert "but one process was started" in on_ranks(0, {**fresh, "parallel": {"shard_base": True}}, {})[0]
    assert "device: 'cuda:1' is one device" in refused(on_ranks, {**fresh, "device": "cuda:1"}, {})
    (tmp_path / "bad.jsonl").write_text('{"prompt": 1}\n')
    jobs = [{**tree["jobs"][0], "data": {"path": str(tmp_path / "bad.jsonl")}}, *tree["jobs"][1:]]
    assert "bad.jsonl" in refused(on_ranks, {**fresh, "jobs": jobs}, {})


def test_a_run_that_is_there_is_refused_on_every_process(tree: dict[str, Any], whole: Path, ranks: Groups) -> None:
    told = ranks(2).run(on_ranks, tree, {})
    assert told[0] == told[1]
    assert "already holds a run" in told[0][0]
