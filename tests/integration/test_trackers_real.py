"""Weights & Biases, MLflow and Trackio themselves: what a run tells them is read back, by their own readers where they have
some."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest
from test_members import base, tree_of
from test_trackers import lines

import packlora
from packlora.events import JobAtStart, JobDone, RunBegan, Stepped
from packlora.report.trackers import trackers

assert callable(base)  # a fixture
VALUES = {"loss", "grad_norm", "learning_rate", "tokens_per_second"}


def trained(base: str, folder: Path, tracker: str) -> tuple[Path, str]:
    """Two jobs of six steps with a held-out loss at every second one, broken off after three and resumed."""
    tree = tree_of(base, folder, "ab", "float32", trackers=[tracker], eval_every=2)
    packlora.train(tree, max_steps=3)
    time.sleep(1.1)  # wandb names the files of a session by the second
    packlora.train(tree, resume=True)
    out = folder / "out"
    warnings = json.loads((out / "run.json").read_text())["warnings"]
    assert not [text for text in warnings if "tracker" in text or "subscriber" in text], warnings
    return out, json.loads((out / "run.json").read_text())["id"]


def wanted(out: Path, job: str) -> tuple[dict[int, float], dict[int, float]]:
    """Losses and held-out losses by step."""
    losses, evals = (
        {line["step"]: line[key] for line in lines(out, log) if line["job"] == job}
        for log, key in (("metrics.jsonl", "loss"), ("evals.jsonl", "eval_loss"))
    )
    return losses, evals


def records(file: Path) -> Iterator[Any]:
    """Of a .wandb file: after 7 bytes, LevelDB's log. Blocks of 32 KiB hold parts with a checksum, a length and a type (whole,
    first, middle, last); a block's last 6 bytes are none."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def test_wandb_keeps_an_offline_run_of_each_job_that_goes_on(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    out, run = trained(base, tmp_path, "wandb")
    for job in "ab":
        files = sorted((out / "trackers" / "wandb").glob(f"offline-run-*-{run}-{job}/*.wandb"))
        told: dict[str, dict[int, float]] = {}
        for file in files:
            for record in records(file):
                if record.WhichOneof("record_type") == "run":
                    assert (record.run.run_group, record.run.display_name) == ("out", job)
                if record.WhichOneof("record_type") == "history":
                    items = {
                        item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
                    }
                    for key, value in items.items():
                        if not key.startswith("_"):
                            told.setdefault(key, {})[items["_step"]] = value
        losses, evals = wanted(out, job)
        assert told.keys() == VALUES | {"eval_loss"}
        assert told["loss"] == pytest.approx(losses)
        assert told["eval_loss"] == pytest.approx(evals)


def test_mlflow_finds_a_run_of_each_job_that_goes_on(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    out, run = trained(base, tmp_path, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{out / 'trackers' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("out")
    found = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {"a", "b"}
    for job, one in found.items():
        assert (one.info.status, one.data.tags["packlora.job"]) == ("FINISHED", f"{run}-{job}")
        assert one.data.params["train.optim"] == "adamw_torch"
        losses, evals = wanted(out, job)
        assert one.data.metrics.keys() == VALUES | {"eval_loss"}
        for key, want in (("loss", losses), ("eval_loss", evals)):
            got = {item.step: item.value for item in client.get_metric_history(one.info.run_id, key)}
            assert got == pytest.approx(want)
    assert not (tmp_path / "mlruns").exists(), "nothing beside the output folder"


def test_trackio_holds_a_run_of_each_job_that_goes_on(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "trackio" not in sys.modules:  # it reads this once
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    out, _ = trained(base, tmp_path, "trackio")
    assert set(SQLiteStorage.get_runs("out")) == {"a", "b"}
    for job in "ab":
        told: dict[str, dict[int, float]] = {}
        for line in SQLiteStorage.get_logs("out", job):
            for key, value in line.items():
                if key in VALUES | {"eval_loss"}:
                    told.setdefault(key, {})[line["step"]] = value
        losses, evals = wanted(out, job)
        assert told.keys() == VALUES | {"eval_loss"}
        assert told["loss"] == pytest.approx(losses)
        assert told["eval_loss"] == pytest.approx(evals)


ROWS = [
    {"step": 2, "prompt": "Say | it.", "completion": "first\nsecond <b>", "reward": 1.5, "advantage": 0.5, "tokens": 3},
    {"step": 2, "prompt": "Say | it.", "completion": "né 世", "reward": -2.0, "advantage": -0.5, "tokens": 2},
]


def show(out: Path, tracker: str) -> None:
    """Tell a tracker of the second step of a job that has drawn these completions."""
    (out / "a" / "rollouts").mkdir(parents=True)
    drawn = [
        {
            "prompt": 7, "text": row["completion"], "ids": [1] * row["tokens"], "is_lost": False,
            "reward": row["reward"], "advantage": row["advantage"],
        }
        for row in ROWS
    ]  # fmt: skip
    tree = {"prompts": {"7": "Say | it."}, "completions": drawn[::-1]}
    (out / "a" / "rollouts" / "step-2.json").write_text(json.dumps(tree))
    ((told,), notes) = trackers([tracker], out)
    config = {"jobs": [{"name": "a", "rollout": {"log_completions": True}}]}
    told(RunBegan("run", out, config, (JobAtStart("a", "running", 1, 2, 10),)))
    told(Stepped("a", 2, 0.5, 1.0, 1e-3, 10, 0.1, 1.0))
    told(JobDone("a", 2, out / "a"))
    assert not notes


def test_wandb_keeps_a_table_of_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    show(tmp_path, "wandb")
    (file,) = (tmp_path / "trackers" / "wandb").glob("offline-run-*-run-a/files/media/table/completions_2_*.json")
    table = json.loads(file.read_text())
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == ROWS


def test_trackio_holds_a_table_of_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "trackio" not in sys.modules:
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    show(tmp_path / "completions-out", "trackio")
    (table,) = [line["completions"] for line in SQLiteStorage.get_logs("completions-out", "a") if "completions" in line]
    assert table["_value"] == ROWS


def test_mlflow_keeps_completions_as_a_text_in_the_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    show(out, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{out / 'trackers' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("out").experiment_id])
    assert [one.path for one in client.list_artifacts(run.info.run_id, "completions")] == ["completions/step-2.md"]
    text = (Path(url2pathname(urlparse(run.info.artifact_uri).path)) / "completions" / "step-2.md").read_text("utf-8")
    first, second = text.split("\n\n---\n\n")
    assert first.startswith("**step 2**, **reward 1.5**, **advantage 0.5**, **tokens 3**\n\nprompt:\n\n    Say | it.")
    assert first.endswith("completion:\n\n    first\n    second <b>") and second.endswith("    né 世\n")
    assert not (tmp_path / "mlruns").exists(), "nothing beside the output folder"
