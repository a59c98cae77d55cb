"""What rewards answer, what they may change, and the advantages that are made of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_rollouts import job, tree
from test_training import train

from packlora.rl.config import RolloutConfig
from packlora.rl.judging import advantages_of
from packlora.rl.objective import standard_error
from packlora.rl.refill import Found
from packlora.rl.rewards import Group, Judged, Rewards, numbers_of

NAN = float("nan")


def judged(code: str, folder: Path, groups: Sequence[Group], *names: str, **keys: Any) -> tuple[Rewards, list[Judged]]:
    """What the rewards of these names in a file say of groups."""
    (folder / "code.py").write_text(code)
    rewards = Rewards(RolloutConfig(reward=[f"{folder / 'code.py'}:{name}" for name in names], **keys), "j")
    futures = rewards.ask(groups)
    end = time.monotonic() + 30
    while not all(future.is_done for future in futures) and time.monotonic() < end:
        time.sleep(0.001)
    rewards.worker.close()
    return rewards, rewards.judged(groups, futures)


@pytest.mark.parametrize(
    "answer",
    [
        [np.float32(0.5), np.int64(2), np.bool_(True)],
        [torch.tensor(0.5), torch.tensor(2), torch.tensor(True)],
        [np.array(0.5), 2, True],
        np.array([0.5, 2.0, 1.0], np.float16),
        torch.tensor([0.5, 2.0, 1.0], dtype=torch.bfloat16),
        torch.tensor([0.5, 2.0, 1.0], requires_grad=True),
        (0.5, 2, 1),
    ],
)
def test_numbers_of_numpy_and_torch_are_rewards_one_by_one_and_as_a_whole(answer: Any) -> None:
    assert np.array_equal(numbers_of(answer, 3), [0.5, 2.0, 1.0])


@pytest.mark.parametrize("answer", [[np.float32("nan")], [torch.tensor([1.0])], [np.complex64(1)], [np.str_("1")]])
def test_what_is_no_number_is_none_in_numpy_and_torch_either(answer: Any) -> None:
    assert "a reward is a number" in str(numbers_of(answer, 1))


def test_what_a_reward_changes_is_seen_by_no_other_completion_reward_or_step(tmp_path: Path) -> None:
    code = """
def first(prompts, completions, left):
    for prompt, completion in zip(prompts, completions):
        prompt += completion
        completion.clear()
    return [len(prompt) + own.pop() for prompt, own in zip(prompts, left)]

def second(prompts, completions, left):
    return [len(prompt) + len(completion) + sum(own) for prompt, completion, own in zip(prompts, completions, left)]
"""
    prompt, said = [{"role": "user", "content": "a"}], [[{"role": "assistant", "content": "b"}] for _ in range(3)]
    group = Group("row 1", [prompt] * 3, said, {"left": [1, 2, 4]})
    _, found = judged(code, tmp_path, [group, group], "first", "second")
    for one in found:
        assert one.lost is None and one.rewards.tolist() == [[6.0] * 3, [9.0] * 3]
    assert prompt == [{"role": "user", "content": "a"}] and all(said) and group.columns == {"left": [1, 2, 4]}


def test_objects_of_a_program_that_have_no_copy_reach_the_reward_as_they_are(tmp_path: Path) -> None:
    code = "def held(prompts, completions, lock):\n    return [float(len({id(own[0]) for own in lock}))] * len(completions)\n"
    _, (found,) = judged(code, tmp_path, [Group("row 1", ["a"] * 2, ["b", "c"], {"lock": [threading.Lock()]})], "held")
    assert found.lost is None and found.rewards.tolist() == [[1.0, 1.0]]


def test_a_run_keeps_its_prompts_where_a_reward_changes_them(tiny_base: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def grows(prompts, completions):\n"
        "    for prompt, completion in zip(prompts, completions):\n        prompt += completion\n"
        "    return [len(prompt) for prompt in prompts]\n"
    )
    rows = [{"prompt": [{"role": "user", "content": "the fox"}]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = job("a", (str(tmp_path / "rewards.py"), str(tmp_path / "prompts.jsonl")), "grows", max_steps=2)
    train(tree(tiny_base("shallow"), tmp_path / "out", asked))
    for step in (1, 2):
        told = json.loads((tmp_path / "out" / "a" / "rollouts" / f"step-{step}.json").read_text())
        assert told["prompts"] == {"0": "user: the fox"}
        assert {one["reward"] for one in told["completions"]} == {2.0}


def test_a_reward_whose_answer_cannot_be_read_costs_its_group(tmp_path: Path) -> None:
    code = (
        "class Odd:\n    def tolist(self):\n        raise ValueError('of no list')\n\n"
        "def odd(prompts, completions):\n    return Odd()\n"
    )
    _, (found,) = judged(code, tmp_path, [Group("row 1", ["a"], ["b"], {})], "odd")
    assert found.lost is not None and "of no list" in found.lost


def test_a_file_of_functions_may_have_dataclasses_whose_annotations_are_texts(tmp_path: Path) -> None:
    code = (
        "from __future__ import annotations\n\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Judge:\n"
        "    length: int = 1\n\n    def __call__(self, prompts, completions):\n"
        "        return [float(self.length)] * len(completions)\n\n\nlong = Judge(3)\n"
    )
    _, (found,) = judged(code, tmp_path, [Group("row 1", ["a"], ["b"], {})], "long")
    assert found.rewards.tolist() == [[3.0]]


def test_a_completion_of_which_no_reward_has_anything_to_say_leaves_its_group_as_it_is(tmp_path: Path) -> None:
    code = """
def some(prompts, completions):
    return [None if text == "b" else 1.0 for text in completions]

def others(prompts, completions):
    return [None if text in "bc" else 2.0 for text in completions]
"""
    group = Group("row 1", ["p"] * 3, ["a", "b", "c"], {})
    rewards, (found,) = judged(code, tmp_path, [group], "some", "others", reward_weights=[1.0, -3.0])
    assert found.lost is None
    np.testing.assert_array_equal(rewards.total(found), [-5.0, NAN, 1.0])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_trl_where_some_completions_have_no_reward(scale: str) -> None:
    """TRL's formula (GRPOTrainer, sum_then_normalize) in torch. A group of one reward has none to be compared with."""
    totals = [[1.0, NAN, 3.0, 4.0], [0.5, 0.25, 0.25, 0.0], [NAN, NAN, 7.0, NAN], [2.0, 2.0, 2.0, 2.0]]
    rewards = torch.tensor(totals, dtype=torch.float64)

    def deviation(values: torch.Tensor) -> torch.Tensor:
        there = values[~values.isnan()]
        return there.std() if len(there) > 1 else torch.zeros((), dtype=torch.float64)

    away = rewards - rewards.nanmean(1, keepdim=True)
    by_group = torch.stack([deviation(own) for own in rewards])[:, None]
    over = {"group": by_group + 1e-4, "batch": deviation(rewards.flatten()) + 1e-4, "none": torch.ones(())}[scale]
    found = advantages_of([np.array(own) for own in totals], [False] * 4, scale)
    np.testing.assert_allclose(np.stack(found), (away / over).nan_to_num(0.0).numpy(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("total", "teaches"), [([1.0, NAN, 1.0], False), ([NAN, NAN, 1.0], False), ([NAN, 2.0, 1.0], True)]
)
def test_a_group_teaches_by_the_rewards_that_are_there(total: list[float], teaches: bool) -> None:
    nothing: Any = None
    found = Found(nothing, [Judged(np.array([total]))], [np.array(total)], nothing)
    assert found.teaches(0) == teaches


def test_equal_rewards_have_no_advantage_however_they_are_rounded() -> None:
    """0.1 + 0.1 + 0.1 is not 0.3, so a mean of three is another number."""
    for scale in ("group", "batch", "none"):
        same, other = advantages_of([np.full(3, 0.1), np.array([1.0, 2.0, 3.0])], [False, False], scale)
        assert not same.any() and other.any()


def test_the_standard_error_is_of_the_completions_that_were_judged() -> None:
    rewards, lost = np.array([1.0, 0.0, 5.0, 5.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    assert standard_error(rewards, lost, 2) == pytest.approx(np.sqrt(8.0 / 2))


def test_a_run_learns_from_the_completions_that_have_a_reward(tiny_base: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def partly(prompts, completions):\n    return [None, *map(float, range(1, len(completions)))]\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the fox"}\n{"prompt": "the dog"}\n')
    files = str(tmp_path / "rewards.py"), str(tmp_path / "prompts.jsonl")
    train(tree(tiny_base("shallow"), tmp_path / "out", job("a", files, "partly", max_steps=1)))
    told = json.loads((tmp_path / "out" / "a" / "rollouts" / "step-1.json").read_text())["completions"]
    assert [one["rewards"]["partly"] for one in told] == [None, 1.0, 2.0, 3.0] * 2
    assert [one["is_lost"] for one in told] == [True, False, False, False] * 2
    np.testing.assert_allclose([one["advantage"] for one in told], [0.0, -1 / 1.0001, 0.0, 1 / 1.0001] * 2)
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    (line,) = [one for one in metrics if one.get("job") == "a"]
    assert line["reward"] == 2.0 and line["rollout/lost"] == 0.25 and line["frac_reward_zero_std"] == 0.0
