"""Weights & Biases, MLflow and Trackio themselves: what a run tells them is read back with their own readers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_members import base, tree_of
from test_trackers import lines

import packlora

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
