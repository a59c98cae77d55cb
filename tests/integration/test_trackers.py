"""Trackers: TensorBoard by its own reader, the others by modules that note the calls of their public interfaces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from test_members import at_window, base, job, request, short_windows, tree_of

import packlora
from packlora.events import Event, Note, RunBegan
from packlora.sweep.control import Add

assert callable(base) and callable(short_windows)  # fixtures


def lines(out: Path, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / log).read_text().splitlines()]


def test_tensorboard_reads_back_the_numbers_of_every_job_once_also_of_a_resumed_run(base: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tree, out = tree_of(base, tmp_path, "ab", "float32", trackers=["tensorboard"], eval_every=2), tmp_path / "out"
    add = Add(kind="add", jobs=[job("c", tmp_path)]).model_dump()
    packlora.train(tree, max_steps=3, subscribers=[at_window(0, lambda: request(out, add))])
    packlora.train(tree, resume=True)
    metrics, evals = lines(out, "metrics.jsonl"), lines(out, "evals.jsonl")
    for name in "abc":
        found = EventAccumulator(str(out / "trackers" / "tensorboard" / name)).Reload()
        assert {"loss", "grad_norm", "learning_rate", "tokens_per_second", "eval_loss"} <= set(found.Tags()["scalars"])
        own = [(line["step"], line["loss"]) for line in metrics if line["job"] == name]
        told = [(item.step, item.value) for item in found.Scalars("loss")]
        assert [step for step, _ in told] == [step for step, _ in own] == list(range(1, 7))
        assert all(abs(ours - theirs) < 1e-5 for (_, ours), (_, theirs) in zip(told, own, strict=True))
        held_out = [line["step"] for line in evals if line["job"] == name]
        assert [item.step for item in found.Scalars("eval_loss")] == held_out


def test_the_other_trackers_get_a_run_for_each_job_in_a_group_and_go_on_with_it(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, trackio, mlflow = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    for name, module in (("wandb", wandb), ("trackio", trackio), ("mlflow", mlflow), ("mlflow.entities", mlflow)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    client = mlflow.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.search_runs.return_value = []
    tree = tree_of(base, tmp_path, "ab", "float32", trackers=["wandb", "trackio", "mlflow"])
    packlora.train(tree, max_steps=2)
    run = json.loads((tmp_path / "out" / "run.json").read_text())["id"]
    asked = [call.kwargs for call in wandb.init.call_args_list]
    assert [(own["name"], own["group"], own["id"], own["resume"], own["mode"]) for own in asked] == [
        (name, "out", f"{run}-{name}", "allow", "offline") for name in "ab"
    ]
    assert [
        (call.kwargs["project"], call.kwargs["name"], call.kwargs["resume"]) for call in trackio.init.call_args_list
    ] == [("out", name, "allow") for name in "ab"]
    for logged in (wandb.init.return_value, trackio.init.return_value):
        steps = [call.kwargs["step"] for call in logged.log.call_args_list if "loss" in call.args[0]]
        assert sorted(steps) == [1, 1, 2, 2] and logged.finish.call_count == 2
    assert [call.kwargs["run_name"] for call in client.create_run.call_args_list] == ["a", "b"]
    assert mlflow.MlflowClient.call_args.kwargs["tracking_uri"].startswith("sqlite:///")
    client.search_runs.return_value = [SimpleNamespace(info=SimpleNamespace(run_id="old"))]
    packlora.train(tree, resume=True)
    assert client.create_run.call_count == 2
    assert {call.args[0] for call in client.log_batch.call_args_list[-2:]} == {"old"}


def test_a_tracker_that_fails_costs_a_note_and_one_that_is_missing_is_refused(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = mock.MagicMock()
    broken.init.return_value.log.side_effect = RuntimeError("no room")
    monkeypatch.setitem(sys.modules, "wandb", broken)
    mlflow = mock.MagicMock()
    mlflow.MlflowClient.side_effect = OSError("no server")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    heard: list[Event] = []
    tree = tree_of(base, tmp_path, "a", "float32", trackers=["wandb", "mlflow"])
    assert packlora.train(tree, subscribers=[heard.append], max_steps=2).status == "done"
    notes = [event.text for event in heard if isinstance(event, Note)]
    assert any("subscriber Wandb failed at" in text and "no room" in text for text in notes)
    began = next(event for event in heard if isinstance(event, RunBegan))
    assert any("tracker mlflow cannot begin (OSError: no server)" in text for text in began.notes)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(packlora.InputError, match="trackio needs the package trackio: pip install trackio"):
        packlora.train({**tree, "trackers": ["trackio"], "output_dir": str(tmp_path / "new")})
    with pytest.raises(packlora.InputError, match="'neptune'"):
        packlora.train({**tree, "trackers": ["neptune"]})
