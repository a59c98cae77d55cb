"""Whole runs on several processes: what one device gives, whoever trains a job and however many share it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import rows_into
from ranks import Ranks
from test_training import JOBS, adapter, config, distance, steps, train

import packlora
from packlora.errors import InputError
from packlora.report.events import Event, JobDone, RunBegan, RunEnded, Stepped, Stop

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


@pytest.mark.parametrize(
    ("processes", "each", "layout"),
    [(2, 1, 2), (2, 2, 1), (2, "auto", None), (4, 4, 1), (4, 2, 2), (4, 1, 4)],
)
def test_a_run_gives_what_one_device_gives(
    processes: int, each: Any, layout: int | None, tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    asked = {**tree, "output_dir": str(tmp_path / "out"), "parallel": {"devices_per_job": each}}
    told = ranks(processes).run(on_ranks, asked, {})
    tokens = sum(line["tokens"] for line in steps(whole))
    assert told == [("done", tokens, [job["name"] for job in tree["jobs"]])] * processes
    same_run(tmp_path / "out", whole, 1e-10)
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


def test_a_job_that_is_whole_on_a_device_has_the_bits_of_one_device(
    tree: dict[str, Any], ranks: Groups, tmp_path: Path
) -> None:
    asked = {**tree, "dtype": "float32", "output_dir": str(tmp_path / "out"), "parallel": {"devices_per_job": 1}}
    ranks(2).run(on_ranks, asked, {})
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
