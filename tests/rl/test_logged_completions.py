"""Completions of jobs that learn from rewards in trackers: TensorBoard by its own reader, others by the calls that they get."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from test_rollouts import files, job, tree

import packlora
from packlora.rl.examples import examples
from packlora.rl.page import section

assert callable(files)  # a fixture
COLUMNS = ["step", "prompt", "completion", "reward", "advantage", "tokens"]


def wanted(out: Path, name: str, prompts: str, step: int) -> list[list[Any]]:
    """Rows of a step: the three best and the three worst of its completions, with prompts as the data has them."""
    said = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
    drawn = json.loads((out / name / "rollouts" / f"step-{step}.json").read_text())["completions"]
    drawn.sort(key=lambda one: one["reward"], reverse=True)
    return [
        [step, said[one["prompt"]], one["text"], one["reward"], one["advantage"], len(one["ids"])]
        for one in (*drawn[:3], *drawn[-3:])
    ]


def test_trackers_get_the_best_and_the_worst_completions_of_jobs_that_ask_for_it(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions drawn two steps ahead come in the order of steps. Asked for at a resume, TensorBoard has earlier ones too."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wandb, trackio, mlflow = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    for name, module in (("wandb", wandb), ("trackio", trackio), ("mlflow", mlflow), ("mlflow.entities", mlflow)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client, out, base = mlflow.MlflowClient.return_value, tmp_path / "out", tiny_base("llama")
    client.get_experiment_by_name.return_value = None
    client.search_runs.return_value = []
    trackers = ["tensorboard", "wandb", "trackio", "mlflow"]

    def run(asked: bool) -> dict[str, Any]:
        quiet = job("quiet", files, max_steps=2)
        told = job("told", files, "later", 2, max_staleness=2, log_completions=asked, logging_steps=2, max_steps=6)
        return tree(base, out, quiet, told, trackers=trackers)

    packlora.train(run(False), max_steps=2)
    assert not (wandb.Table.called or trackio.Table.called or client.log_text.called)
    packlora.train(run(True), resume=True)
    rows = {step: wanted(out, "told", files[1], step) for step in (2, 4, 6)}
    for module in (wandb, trackio):
        assert [call.kwargs for call in module.Table.call_args_list] == [
            {"columns": COLUMNS, "data": rows[step]} for step in (4, 6)
        ]
        calls = module.init.return_value.log.call_args_list
        shown = [call.kwargs["step"] for call in calls if call.args[0] == {"completions": module.Table.return_value}]
        of_told = [call.kwargs["step"] for call in calls if call.kwargs["step"] > 2]
        assert shown == [4, 6] and of_told == sorted(of_told)
    texts = {step: client.log_text.call_args_list[at].args[1] for at, step in enumerate((4, 6))}
    assert [call.args[2] for call in client.log_text.call_args_list] == [f"completions/step-{n}.md" for n in (4, 6)]
    assert client.create_experiment.call_args.args == ("out", (out / "trackers" / "mlflow").as_uri())

    found = EventAccumulator(str(out / "trackers" / "tensorboard" / "told")).Reload()
    told = {one.step: one.tensor_proto.string_val[0].decode() for one in found.Tensors("completions/text_summary")}
    assert sorted(told) == [2, 4, 6] and {step: told[step] for step in texts} == texts
    for step, text in told.items():
        for _, prompt, completion, reward, advantage, tokens in rows[step]:
            numbers = f"**step {step}**, **reward {reward:.6g}**, **advantage {advantage:.6g}**, **tokens {tokens}**"
            below = completion.replace("\n", "\n    ")
            assert f"{numbers}\n\nprompt:\n\n    {prompt}\n\ncompletion:\n\n    {below}\n" in text
    quiet = EventAccumulator(str(out / "trackers" / "tensorboard" / "quiet")).Reload()
    assert not quiet.Tags()["tensors"] and quiet.Tags()["scalars"]


def one(reward: float, text: str, is_lost: bool = False) -> dict[str, Any]:
    return {"prompt": 0, "text": text, "reward": reward, "advantage": 0.5, "ids": [1, 2], "is_lost": is_lost}


def test_a_completion_whose_reward_failed_is_neither_the_best_nor_the_worst(tmp_path: Path) -> None:
    """Its reward of 0 would be above all that are negative."""
    folder = tmp_path / "a" / "rollouts"
    folder.mkdir(parents=True)
    lost = one(0.0, "lost", is_lost=True)
    drawn = [one(-2.0, "two"), lost, one(-1.0, "one")]
    (folder / "step-7.json").write_text(json.dumps({"prompts": {"0": "say"}, "completions": drawn}))
    assert [(row["prompt"], row["completion"], row["reward"]) for row in examples(tmp_path / "a", 7)] == [
        ("say", "one", -1.0),
        ("say", "two", -2.0),
    ]
    assert "lost" not in section(tmp_path, [("a", "")])
    (folder / "step-8.json").write_text(json.dumps({"completions": [lost]}))
    assert [row["completion"] for row in examples(tmp_path / "a", 8)] == ["lost"]
    assert "<span class='said'>lost</span>" in section(tmp_path, [("a", "")])
    (folder / "step-9.json").write_text('{"completions": [')
    assert examples(tmp_path / "a", 9) == examples(tmp_path / "a", 10) == []
