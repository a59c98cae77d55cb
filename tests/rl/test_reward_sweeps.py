"""Sweeps over jobs that learn from rewards: what ranks their candidates, and the same decisions after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WORDS
from test_held_out_rewards import completions, evals, held_out, judged
from test_rollouts import files, job, of_job, tree
from test_training import adapter, distance, train

import packlora
from packlora.errors import InputError
from packlora.events import Event, Stepped, Stop
from packlora.run_file import run_from
from packlora.runtime.prepare import prepare
from packlora.sweep.candidates import Trial

assert callable(files) and callable(held_out)  # fixtures
RATES = [1e-4, 3e-2, 1e-2, 5e-2]


def swept(base: str, out: Path, own: dict[str, Any], *others: dict[str, Any], **sweep: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "job": own["name"], "parameters": {"train.learning_rate": RATES}, "concurrent": 2,
        "stopping": {"method": "successive_halving", "min_resource": 1, "reduction_factor": 2},
    } | sweep  # fmt: skip
    return tree(base, out, own, *others, sweep=keys, eval_every=1)


def ranking(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return found


def stopped_at(job: str, step: int) -> Callable[[Event], Stop | None]:
    def stop(event: Event) -> Stop | None:
        return Stop() if isinstance(event, Stepped) and (event.job, event.step) == (job, step) else None

    return stop


@pytest.mark.slow
def test_candidates_are_ranked_by_held_out_rewards_and_decided_alike_where_the_run_is_broken_off(
    files: tuple[str, str], held_out: str, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    base, own = tiny_base("llama"), judged("a", files, held_out, eval_steps=1, max_steps=3)
    beside = job("b", files, "brevity", seed=2, max_steps=2)
    whole = swept(base, tmp_path / "whole", own, beside)
    assert train(whole).status == "done"
    found = ranking(tmp_path / "whole")
    assert (found["metric"], found["status"], len(found["candidates"])) == ("eval_reward", "done", 4)
    rewards = [line["eval_reward"] for line in found["candidates"]]
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) > 1
    for line in found["candidates"]:
        drawn = completions(tmp_path / "whole", line["name"], f"held-out-{line['step']}")
        assert line["eval_reward"] == pytest.approx(np.mean([one["text"].count("o") for one in drawn]))
    assert {line["status"] for line in found["candidates"]} == {"done", "stopped"}
    best = tmp_path / "whole" / "best"
    assert distance(adapter(best.parent, "best"), adapter(best.parent, str(found["best"]))) == 0

    full = next(line for line in found["candidates"] if line["status"] == "done")
    alone = json.loads(json.dumps(own)) | {"name": full["name"]}
    alone["train"]["learning_rate"] = full["parameters"]["train.learning_rate"]
    train(tree(base, tmp_path / "alone", alone, eval_every=1))
    assert distance(adapter(tmp_path / "alone", full["name"]), adapter(tmp_path / "whole", full["name"])) == 0

    parts = whole | {"output_dir": str(tmp_path / "parts")}
    for number, (name, step) in enumerate([("a-000", 1), ("a-001", 1), ("a-002", 1)]):
        broken_off = packlora.train(parts, resume=number > 0, subscribers=[stopped_at(name, step)])
        assert broken_off.status == "interrupted"
    assert packlora.train(parts, resume=True).status == "done"
    assert ranking(tmp_path / "parts") == found
    for line in [*found["candidates"], {"name": "b"}]:
        name = line["name"]
        assert distance(adapter(tmp_path / "parts", name), adapter(tmp_path / "whole", name)) == 0
        assert evals(tmp_path / "parts", name) == evals(tmp_path / "whole", name)


def test_without_held_out_prompts_candidates_are_ranked_by_their_rewards_in_training(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    own = job("a", files, "later", max_steps=4)
    whole = swept(tiny_base("llama"), tmp_path / "whole", own, stopping={"method": "median", "n_startup_trials": 2})
    whole["eval_every"] = 2
    assert train(whole).status == "done"
    found = ranking(tmp_path / "whole")
    assert found["metric"] == "reward" and found["status"] == "done"
    rewards = [line["reward"] for line in found["candidates"]]
    assert rewards == sorted(rewards, reverse=True)
    for line in found["candidates"]:
        seen = {one["step"]: one["reward"] for one in of_job(tmp_path / "whole", line["name"])}
        wanted = [[step, np.mean([seen[step - 1], seen[step]])] for step in range(2, line["step"] + 1, 2)]
        assert [own for own in line["evals"] if own[0] % 2 == 0] == [
            [step, pytest.approx(value)] for step, value in wanted
        ]
    parts = whole | {"output_dir": str(tmp_path / "parts")}
    assert packlora.train(parts, subscribers=[stopped_at("a-001", 3)]).status == "interrupted"
    packlora.train(parts, resume=True)
    assert ranking(tmp_path / "parts") == found


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"metric": "eval_loss"}, "eval_loss does not compare rewards; use eval_reward or reward"),
        ({"metric": "eval_reward"}, "has no data.eval_path or data.eval_split"),
    ],
)
def test_a_metric_that_does_not_compare_rewards_is_refused(
    sweep: dict[str, Any], said: str, files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        packlora.train(swept(tiny_base("llama"), tmp_path / "out", job("a", files), **sweep))


@pytest.mark.parametrize(
    ("parameters", "is_told"),
    [
        ({"rollout.reward_weights": [[1.0], [2.0]]}, True),
        ({"rollout.reward": ["brevity", "later"]}, True),
        ({"rollout.scale_rewards": ["group", "none"]}, False),
    ],
)
def test_a_key_that_changes_what_the_reward_measures_is_told(
    parameters: dict[str, list[Any]],
    is_told: bool,
    files: tuple[str, str],
    tiny_base: Callable[..., str],
    tmp_path: Path,
) -> None:
    if "rollout.reward" in parameters:
        parameters = {"rollout.reward": [f"{files[0]}:{name}" for name in parameters["rollout.reward"]]}
    asked = swept(
        tiny_base("shallow"), tmp_path / "out", job("a", files, max_steps=2), parameters=parameters, stopping={}
    )
    (key,) = parameters
    said = f"sweep: {key} changes the measure of reward, so the best value is no proof"
    assert (said in prepare(run_from(asked)).warnings) == is_told


def test_a_job_of_completions_has_no_reward_to_be_swept_by(
    files: tuple[str, str], held_out: str, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "the", "completion": f" {word}"}) + "\n" for word in WORDS[:6]))
    texts = {"name": "a", "data": {"path": str(rows), "eval_path": str(rows)}, "train": {"max_steps": 3}}
    with pytest.raises(InputError, match="eval_reward is of trainer grpo"):
        packlora.train(swept(tiny_base("llama"), tmp_path / "out", texts, metric="eval_reward"))


def test_a_reward_in_training_is_a_mean_up_to_each_comparison_wherever_it_is_looked_at() -> None:
    history = [{"step": step, "loss": 0.0, "reward": None if step == 4 else float(step)} for step in range(1, 8)]
    for looks in ([7], [1, 2, 3, 4, 5, 6, 7], [3, 3, 7, 7]):
        trial = Trial(0, "a", {}, 0, metric="reward", every=2)
        for step in looks:
            trial.see(step, "running", 7, history[:step])
        assert trial.evals == {2: -1.5, 4: -3.0, 6: -5.5, 7: -6.5} and trial.last == -6.5
