"""Whole runs on several processes: what one device gives, whoever trains a job and however many share it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import chdir, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import typer
import yaml
from conftest import rows_into
from ranks import Ranks
from safetensors.torch import load_file, save_file
from seeds import SOAK
from test_training import JOBS, adapter, config, distance, steps, train

import packlora
from packlora.cli.train import train as train_command
from packlora.config import ParallelConfig
from packlora.errors import InputError, ProcessError
from packlora.events import Event, RunBegan, Stepped, Stop
from packlora.files import LOCK
from packlora.parallel.mesh import Mesh
from packlora.parallel.start import started

Groups = Callable[[int], Ranks]


def on_ranks(rank: int, tree: dict[str, Any], options: dict[str, Any]) -> tuple[str, int, list[str]]:
    """A run, on every process: its status, tokens and jobs; or what is wrong with it."""
    try:
        result = packlora.train(tree, **options)
    except InputError as error:
        return str(error), -1, []
    return result.status, result.tokens, list(result.jobs)


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


def refused_on_all(ranks: Groups, asked: dict[str, Any], says: str, *options: Any, function: Any = on_ranks) -> None:
    """A run on two processes ends alike on both with these words, and leaves no trace."""
    told = ranks(2).run(function, asked, *(options or ({},)))
    assert told[0] == told[1] and told[0][1] == -1, told
    assert says in str(told[0][0])
    assert not Path(asked["output_dir"]).exists(), "bad input leaves no trace"


def test_what_is_wrong_is_said_alike_on_every_process(tree: dict[str, Any], ranks: Groups, tmp_path: Path) -> None:
    fresh = {**tree, "output_dir": str(tmp_path / "out")}
    for change, says in (
        ({"seed": 5}, "same run file and arguments: process 0 has"),
        ({"dtype": "float61"}, "process 1 of 2: the run:\n  dtype"),
    ):
        refused_on_all(ranks, fresh, says, 1, change, function=with_changes)
    (tmp_path / "bad.jsonl").write_text('{"prompt": 1}\n')
    jobs = [{**tree["jobs"][0], "data": {"path": str(tmp_path / "bad.jsonl")}}, *tree["jobs"][1:]]
    for changes, says in (
        ({"base_model": str(tmp_path / "none")}, "base_model"), ({"device": "cuda:1"}, "device: 'cuda:1' is one device"),
        ({"jobs": jobs}, "bad.jsonl"), ({"parallel": {"pipeline": 3}}, "parallel.pipeline is 3, but 2 processes were"),
    ):  # fmt: skip
        refused_on_all(ranks, fresh | changes, says)


def in_folders(rank: int, tree: dict[str, Any], folder: Path) -> tuple[str, int, list[str]]:
    """A run whose processes have folders of their own, as on nodes whose disks are not shared."""
    with chdir(folder / str(rank)):
        return on_ranks(rank, tree, {})


@pytest.mark.parametrize("there", ["folder", "lock of a run that was killed", ""])
def test_an_output_folder_on_a_disk_of_its_own_is_refused(
    there: str, tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    """Else each process would write its jobs to its own disk, and none could go on with them."""
    for rank in "01":
        (tmp_path / rank / "out").mkdir(parents=True)
    if not there:
        (tmp_path / "1" / "out").rmdir()
    if "lock" in there:
        (tmp_path / "1" / "out" / LOCK).write_text("here 1\n")
    refused_on_all(
        ranks, tree | {"output_dir": "out"}, "process 1 of 2: output_dir out is not that", tmp_path, function=in_folders
    )


def test_data_adapters_and_base_models_that_differ_between_processes_are_refused(
    tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    """Rows of the same lengths and weights of the same shapes, which no message between the processes would tell apart."""
    rows = Path(tree["jobs"][0]["data"]["path"]).read_text()
    for rank, text in enumerate((rows, rows.replace("quick", "brown", 1))):
        shutil.copytree(tree["base_model"], tmp_path / str(rank) / "base")
        (tmp_path / str(rank) / "rows.jsonl").write_text(text)
        shutil.copytree(whole / tree["jobs"][rank]["name"], tmp_path / str(rank) / "start")
    assert rows != text
    fresh = {**tree, "output_dir": str(tmp_path / "out")}
    job = {**tree["jobs"][0], "data": {"path": "rows.jsonl"}}
    says = f"the same data of job {job['name']!r}: process 0 has"
    refused_on_all(ranks, {**fresh, "jobs": [job]}, says, tmp_path, function=in_folders)
    job = {**tree["jobs"][0], "adapter": {"init_from": "start"}}
    says = f"the same init_from of job {job['name']!r}: process 0 has"
    refused_on_all(ranks, {**fresh, "jobs": [job]}, says, tmp_path, function=in_folders)
    weights = tmp_path / "1" / "base" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    layouts: list[dict[str, Any]] = [{"devices_per_job": 1}, {"shard_base": True}, {"tensor": 2}, {"pipeline": 2}]
    for parallel in layouts:
        asked = {**fresh, "base_model": "./base", "parallel": parallel}
        refused_on_all(ranks, asked, "the same base model: process 0 has", tmp_path, function=in_folders)
    weights.write_bytes(weights.read_bytes()[:-100])
    for parallel in layouts[1:]:  # where one process waits for another's part
        asked = {**fresh, "base_model": "./base", "parallel": parallel}
        refused_on_all(
            ranks,
            asked,
            "process 1 of 2: base_model './base' (folder): cannot load the model",
            tmp_path,
            function=in_folders,
        )


@pytest.mark.parametrize(
    ("processes", "parallel", "says"),
    [
        (2, {"pipeline": 3}, "parallel.pipeline is 3, but 2 processes were started, one for each device; start"),
        (2, {"pipeline": 2, "tensor": 2}, "parallel.pipeline is 2 and parallel.tensor 2, but 2 processes were started"),
        (1, {"pipeline": 2}, "parallel.pipeline is 2, but 1 process was started"),
        (2, {"tensor": 3}, "parallel.tensor is 3, but 2 processes were started"),
        (2, {"tensor": 2, "shard_base": True}, "shares what each of 2 devices (parallel.tensor) holds with"),
        (2, {"shard_base": 3}, "parallel.shard_base is 3, but 2 processes were started"),
        (2, {"tensor": 2, "shard_base": 2}, "parallel.shard_base is 2 and parallel.tensor 2, but 2 processes"),
        (1, {"shard_base": True}, "but one process was started"), (3, {"expert": 2}, "parallel.expert is 2, but 3 processes"),
        (6, {"expert": 2, "shard_base": 2}, "parallel.shard_base is 2 and parallel.expert 2, but 6 processes were started"),
        (2, {"expert": 2, "shard_base": True}, "shares what each of 2 devices (parallel.expert) holds with further ones"),
        (2, {"devices_per_job": 3}, "devices_per_job is 3, but 2 processes were started"),
        (2, {"devices_per_job": 1, "shard_base": True}, "with shard_base all 2 processes share every job"),
    ],
)  # fmt: skip
def test_numbers_of_processes_that_cannot_be_divided_as_asked_are_refused(
    processes: int, parallel: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError) as caught:
        ParallelConfig.model_validate(parallel).check(processes)
    assert says in str(caught.value)


def said(rank: int, run_file: Path, mark: Path) -> bool:
    """Whether the first process has said how the run ended when the command ends here."""

    def slow(*words: Any) -> None:
        time.sleep(0.3)
        mark.touch()

    with mock.patch("packlora.report.summary.print_summary", slow), pytest.raises(typer.Exit):
        train_command(run_file)
    return mark.exists()


def test_no_process_ends_before_the_first_one_has_said_how_the_run_ended(
    tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    """torchrun ends all others once one has ended with an exit code, as after a job that failed."""
    asked = {**tree, "jobs": tree["jobs"][:1], "output_dir": str(tmp_path / "out")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(asked))
    assert ranks(2).run(said, tmp_path / "run.yaml", tmp_path / "said") == [True, True]


def unanswered(rank: int) -> str:
    """The error of the first process, to whose message, sent by a library that knows nothing of packlora, nobody answers. The
    other one is there until that is said."""
    if rank:
        with suppress(KeyError), started(60.0) as mesh:
            mesh.new_group(range(2))  # type: ignore[attr-defined]
            mesh.store.set("connected", "")  # type: ignore[attr-defined]
            mesh.store.wait(["said"])  # type: ignore[attr-defined]
            raise KeyError
        return ""
    stores: list[Any] = []

    def ask() -> None:
        with started(60.0) as mesh:
            stores.append(mesh.store)  # type: ignore[attr-defined]
            group = mesh.new_group(range(2))  # type: ignore[attr-defined]
            stores[0].wait(["connected"])
            dist.monitored_barrier(group, timedelta(milliseconds=1))

    with pytest.raises(ProcessError) as caught:
        ask()
    stores[0].set("said", "")
    return str(caught.value)


def test_a_process_that_waits_in_vain_blames_no_process_that_waits(ranks: Groups) -> None:
    """One that is killed cannot tell the others."""
    said, _ = ranks(2).run(unanswered)
    assert said.startswith("process 0 of 2 waited in vain for another one of the run (")


def test_a_run_that_is_there_is_refused_on_every_process(tree: dict[str, Any], whole: Path, ranks: Groups) -> None:
    told = ranks(2).run(on_ranks, tree, {})
    assert told[0] == told[1]
    assert "already holds a run" in told[0][0]
