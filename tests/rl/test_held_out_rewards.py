"""Held-out prompts of jobs that learn from rewards: what is told of them, and what they decide."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import WORDS
from test_rollouts import files, job, tree
from test_training import adapter, distance, steps, train

import packlora
from packlora.config import JobConfig, TrainConfig
from packlora.data.encode import Sample
from packlora.errors import InputError
from packlora.rl.config import RolloutConfig
from packlora.rl.drawing import Drawn
from packlora.rl.objective import COLUMNS, RewardObjective, standard_error
from packlora.rl.prompts import read_prompts

assert callable(files)  # a fixture


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    path = tmp_path / "held-out.jsonl"
    lines = [{"prompt": " ".join(WORDS[n : n + 2]), "word": WORDS[n]} for n in (2, 5, 7)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def judged(
    name: str, files: tuple[str, str], held_out: str | None, reward: str = "later", **keys: Any
) -> dict[str, Any]:
    made = job(name, files, reward, **{"eval_steps": 2} | keys)
    made["data"] |= {} if held_out is None else {"eval_path": held_out}
    return made


def evals(out: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "evals.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "elapsed"} for line in lines if line["job"] == name]


def completions(out: Path, name: str, file: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / name / "rollouts" / f"{file}.json").read_text())["completions"]
    return found


def test_held_out_rewards_are_those_of_what_was_drawn_and_cost_training_no_bit(
    files: tuple[str, str], held_out: str, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    base = tiny_base("llama")
    own, plain = judged("own", files, held_out), judged("own", files, None)
    beside = judged("beside", files, held_out, "brevity", seed=2, loss_type="grpo", beta=0.1)
    train(tree(base, tmp_path / "plain", plain))
    train(tree(base, tmp_path / "alone", own))
    both = tree(base, tmp_path / "both", own, beside)
    assert train(both).status == "done"
    parts = both | {"output_dir": str(tmp_path / "parts")}
    train(parts, max_steps=2)
    train(parts, resume=True)
    for out in ("alone", "both", "parts"):
        assert distance(adapter(tmp_path / out, "own"), adapter(tmp_path / "plain", "own")) == 0
        assert evals(tmp_path / out, "own") == evals(tmp_path / "alone", "own")
    assert evals(tmp_path / "parts", "beside") == evals(tmp_path / "both", "beside")

    lines = {line["step"]: line for line in evals(tmp_path / "both", "own")}
    assert sorted(lines) == [0, 2, 4]
    for step, line in lines.items():
        drawn = completions(tmp_path / "both", "own", f"held-out-{step}")
        assert [one["prompt"] for one in drawn] == [0] * 4 + [1] * 4 + [2] * 4
        rewards = np.array([one["text"].count("o") for one in drawn], float)
        means = rewards.reshape(3, 4).mean(1)
        assert line["eval_reward"] == pytest.approx(rewards.mean())
        assert line["eval_reward_stderr"] == pytest.approx(np.sqrt(((means - means.mean()) ** 2).sum() / 2 / 3))
        assert line["eval_rewards/later/mean"] == pytest.approx(rewards.mean())
        assert line["eval_completions/mean_length"] == pytest.approx(np.mean([len(one["ids"]) for one in drawn]))
        assert line["eval_sampling/sampling_logp_difference/mean"] < 1e-4 and abs(line["eval_loss"]) < 10
    assert lines[0]["eval_reward"] != lines[4]["eval_reward"]


def test_held_out_prompts_are_drawn_for_alike_at_every_step_and_not_as_in_training() -> None:
    """So an evaluation differs from the one before by the adapter alone."""
    own: Any = SimpleNamespace(data=SimpleNamespace(seed=3))
    seeds = [Drawn(own, step, is_held_out, [0], []).seed("draw", 1) for is_held_out in (True, False) for step in (0, 4)]
    assert seeds[0] == seeds[1] and len({*seeds}) == 3


def test_the_best_adapter_and_an_early_end_go_by_the_held_out_reward(
    files: tuple[str, str], held_out: str, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    keys = {"eval_steps": 1, "max_steps": 6, "learning_rate": 3e-2}
    best = judged("best", files, held_out, load_best_model_at_end=True, **keys)
    patient = judged("patient", files, held_out, early_stopping_patience=1, **keys)
    run = tree(tiny_base("llama"), tmp_path / "out", best, patient, save_total_limit=None)
    result = train(run)
    assert result.status == "done"
    rewards = [(line["step"], line["eval_reward"]) for line in evals(tmp_path / "out", "best") if line["step"]]
    step = max(rewards, key=lambda one: one[1])[0]
    kept = tmp_path / "out" / "best"
    shown = {"best": kept / f"checkpoint-{step}"}
    assert step < 6, "the last adapter is the best, which shows nothing"
    assert distance(adapter(tmp_path / "out", "best"), adapter(shown["best"].parent, shown["best"].name)) == 0
    pairs = enumerate(itertools.pairwise(rewards), 2)
    worse = next(at for at, (before, after) in pairs if after[1] <= before[1])
    assert result["patient"].step == worse


def test_a_share_of_the_prompts_is_held_out(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    own = judged("own", files, None, max_steps=2)
    own["data"] |= {"eval_split": 0.34}
    assert train(tree(tiny_base("llama"), tmp_path / "out", own)).status == "done"
    drawn = completions(tmp_path / "out", "own", "held-out-2")
    assert [one["prompt"] for one in drawn] == [0] * 4 + [1] * 4
    taught = {one["prompt"] for step in (1, 2) for one in completions(tmp_path / "out", "own", f"step-{step}")}
    assert taught <= set(range(4)) and steps(tmp_path / "out")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"load_best_model_at_end": True}, "needs held-out samples"),
        (
            {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
            "eval_loss, which says nothing of rewards",
        ),
        ({"reward": "none", "teacher": "base", "early_stopping_patience": 1}, "held-out rewards are compared"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    keys: dict[str, Any],
    said: str,
    files: tuple[str, str],
    held_out: str,
    tiny_base: Callable[..., str],
    tmp_path: Path,
) -> None:
    held = None if said.startswith("needs") else held_out
    with pytest.raises(InputError, match=said):
        packlora.train(tree(tiny_base("llama"), tmp_path / "out", judged("own", files, held, **keys)))


def test_the_standard_error_is_of_the_prompts_that_were_judged() -> None:
    rewards, lost = np.array([1.0, 3.0, 5.0, 5.0, 0.0, 0.0]), np.array([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    assert standard_error(rewards, lost, 2) == pytest.approx(np.sqrt(4.5 / 2))
    assert np.isnan(standard_error(rewards[2:], lost[2:], 2))


def test_a_completion_with_the_mean_reward_of_its_prompt_does_not_make_the_prompt_an_idle_one() -> None:
    """TRL counts prompts whose rewards have no deviation."""
    rollout = RolloutConfig(reward="a.py:b", num_generations=3)
    objective, rest = RewardObjective.of(TrainConfig(loss_type="dapo"), rollout), dict.fromkeys(COLUMNS, np.array(0.0))
    batch = [
        Sample(np.zeros(2, np.int32), np.array([False, True]), columns={"advantages": np.array(advantage), **rest})
        for advantage in (1.0, 0.0, -1.0, 0.0, 0.0, 0.0)
    ]
    assert objective.facts(batch)["frac_reward_zero_std"] == 0.5


def test_a_row_without_a_renamed_column_is_left_out_where_bad_rows_are(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ({"q": "a"}, {"x": "b"}, {"q": "c"}))
    )
    data = {"path": str(tmp_path / "rows.jsonl"), "columns": {"prompt": "q"}, "on_bad_row": "skip"}
    own = JobConfig.model_validate(
        {"name": "a", "data": data, "rollout": {"reward": "r.py:f"}, "train": {"max_steps": 1, "loss_type": "grpo"}}
    )
    prompts, notes = read_prompts(own, tokenizer, 100, lambda *_: None)
    assert [prompt.said for prompt in prompts] == ["a", "c"]
    assert "1 row was left out by on_bad_row" in notes[0] and "line 2: there is no 'q'" in notes[0]
    two = own.model_copy(update={"data": own.data.model_copy(update={"max_samples": 2})})
    assert [prompt.said for prompt in read_prompts(two, tokenizer, 100, lambda *_: None)[0]] == ["a", "c"]
    strict = own.model_copy(update={"data": own.data.model_copy(update={"on_bad_row": "error"})})
    with pytest.raises(InputError, match=r"line 2: there is no 'q', which data\.columns names for prompt"):
        read_prompts(strict, tokenizer, 100, lambda *_: None)
