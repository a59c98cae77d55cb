"""Dynamic sampling: groups that teach nothing are replaced, exactly, and with a bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from conftest import WORDS
from test_rollouts import of_job, tree
from test_training import adapter, distance, train

import packlora
from packlora.errors import InputError
from packlora.events import Event, Stepped, Stop
from packlora.rl.drawing import Drawn
from packlora.rl.prompts import further_prompts
from packlora.rl.refill import Found, Refill, Scores

REWARDS = """
def rare(prompts, completions, word, **columns):
    if word[0] == "fox":
        raise ValueError("no")
    return [float(len(text) % 7 == 0) for text in completions]

def equal(prompts, completions, **columns):
    return [0.1 for text in completions]
"""
GROUP, PLACES, STEPS = 3, 2, 3


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Folder of rewards, and of prompts, of which every fourth fails."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    lines = [{"prompt": " ".join(WORDS[n : n + 2]), "word": WORDS[n]} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def job(
    name: str, files: Path, reward: str = "rare", seed: int = 1, steps: int = STEPS, **rollout: Any
) -> dict[str, Any]:
    keys = {"num_generations": GROUP, "max_new_tokens": 6, "dynamic_sampling": True} | rollout
    if reward:
        keys["reward"] = f"{files / 'rewards.py'}:{reward}"
    return {
        "name": name, "data": {"path": str(files / "prompts.jsonl")}, "seed": seed, "rollout": keys,
        "adapter": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
        "train": {"loss_type": "dapo", "global_batch_size": GROUP * PLACES, "learning_rate": 1e-2, "max_steps": steps},
    }  # fmt: skip


def drawn(out: Path, name: str, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / name / "rollouts" / f"step-{step}.json").read_text())
    return found


def without_seconds(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "rollout/seconds"} for line in lines]


def test_refilled_groups_are_the_same_together_alone_and_killed(
    files: Path, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    """Each step has groups whose rewards differ; the run is broken off at every step."""
    base = tiny_base("llama")
    own, beside = job("own", files), job("beside", files, "rare", 2, max_staleness=2)
    both = tree(base, tmp_path / "both", own, beside)
    assert train(both).status == "done"
    parts = both | {"output_dir": str(tmp_path / "parts")}
    for step in range(1, STEPS + 1):
        train(parts, resume=step > 1, max_steps=step)
    for one in (own, beside):
        name = one["name"]
        train(tree(base, tmp_path / name, one))
        for out in (tmp_path / name, tmp_path / "parts"):
            assert distance(adapter(out, name), adapter(tmp_path / "both", name)) == 0
            assert [drawn(out, name, step + 1) for step in range(STEPS)] == [
                drawn(tmp_path / "both", name, step + 1) for step in range(STEPS)
            ]
            assert without_seconds(of_job(out, name)) == without_seconds(of_job(tmp_path / "both", name))
        check_steps(tmp_path / "both", name)


def check_steps(out: Path, name: str) -> None:
    """The groups of each step, and what its line says of those that were drawn."""
    lines, rounds = of_job(out, name), 0
    for step, line in enumerate(lines, 1):
        found = drawn(out, name, step)
        refilled, groups = found["refilled"], groups_of(found)
        assert len(groups) == PLACES and all(len({one["reward"] for one in group}) > 1 for group in groups)
        assert not any(one["is_lost"] for group in groups for one in group)
        assert all(any(one["advantage"] for one in group) for group in groups)
        assert line["dynamic_sampling/rounds"] == refilled["rounds"] and line["dynamic_sampling/groups_missing"] == 0
        assert line["dynamic_sampling/groups_drawn"] == refilled["drawn"] >= PLACES + refilled["rounds"]
        assert line["frac_reward_zero_std"] == pytest.approx(1 - PLACES / refilled["drawn"])
        rounds += refilled["rounds"]
    assert rounds >= 3, "next to nothing was refilled, which shows nothing"


def groups_of(found: dict[str, Any]) -> list[list[dict[str, Any]]]:
    ones = found["completions"]
    return [ones[at : at + GROUP] for at in range(0, len(ones), GROUP)]


def test_a_step_learns_from_what_there_is_where_the_bound_is_reached(
    files: Path, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    """Equal rewards never teach, whatever the last bit of their mean is; what is drawn then changes no other step's prompts."""
    never, plain = (
        job(name, files, "equal", 1, 2, dynamic_sampling=most) for name, most in (("never", 3), ("plain", False))
    )
    assert train(tree(tiny_base("llama"), tmp_path / "out", never, plain)).status == "done"
    for step, line in enumerate(of_job(tmp_path / "out", "never"), 1):
        wanted = {"rounds": 3, "drawn": 4 * PLACES, "missing": PLACES, "numbers": [0, 1]}
        own, other = (drawn(tmp_path / "out", name, step) for name in ("never", "plain"))
        assert own["refilled"] == wanted and other["refilled"] is None
        assert own["completions"] == other["completions"]
        told = {key: line[f"dynamic_sampling/{key}"] for key in ("rounds", "groups_drawn", "groups_missing")}
        assert told == {"rounds": 3, "groups_drawn": 8, "groups_missing": 2} and line["frac_reward_zero_std"] == 1
    assert not any("dynamic_sampling/rounds" in line for line in of_job(tmp_path / "out", "plain"))


def test_a_run_that_is_stopped_goes_on_with_the_refilled_groups_of_its_files(
    files: Path, tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    """A reward that never says the same twice: only what is on disk can tell which groups were learnt from."""
    calls = list[str]()

    def fickle(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        calls.append(prompts[0])
        return [float(len(calls) % 2 and at) for at in range(len(completions))]

    def run(out: Path, resume: bool, stop: bool) -> packlora.Result:
        def stopping(event: Event) -> Stop | None:
            return Stop() if stop and isinstance(event, Stepped) else None

        keys: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "save_every": 100,
            "max_tokens_per_microbatch": 128,
        }
        tree = job("own", files, "", max_staleness=2)
        tree["rollout"]["reward"] = fickle
        rows = [json.loads(line) for line in (files / "prompts.jsonl").read_text().splitlines()]
        own = packlora.Job("own", data=rows, seed=1, rollout=tree["rollout"], adapter=tree["adapter"], **tree["train"])
        trainer = packlora.Trainer(tiny_base("llama"), jobs=[own], output_dir=str(out), callbacks=[stopping], **keys)
        return trainer.train(resume)

    assert run(tmp_path / "out", False, True).status == "interrupted"
    before = [drawn(tmp_path / "out", "own", step) for step in (1, 2, 3)]
    assert any(found["refilled"]["rounds"] for found in before[1:])
    calls.clear()
    assert run(tmp_path / "out", True, False).status == "done"
    assert not calls and [drawn(tmp_path / "out", "own", step) for step in (1, 2, 3)] == before


def test_further_prompts_are_all_others_first_and_another_order_for_each_step() -> None:
    first = further_prompts([1, 4], 20, 8, 3, 0)
    assert sorted(first[:6]) == [0, 2, 3, 5, 6, 7] and sorted(first[6:14]) == list(range(8))
    assert further_prompts([1, 4], 5, 8, 3, 0) == first[:5]
    assert len({tuple(further_prompts([1, 4], 20, 8, seed, step)) for seed in (3, 4) for step in (0, 1)}) == 4
    assert sorted(further_prompts([0, 1], 3, 2, 3, 0)[:2]) == [0, 1]


def test_a_group_of_a_refill_has_random_numbers_of_its_own_by_its_number_in_the_step() -> None:
    own: Any = SimpleNamespace(data=SimpleNamespace(seed=3))
    first, later = (Drawn(own, 1, False, [0, 1], [], first=first) for first in (0, 2))
    seeds = [
        drawn.seed(what, group) for what in ("rollout", "environment") for drawn in (first, later) for group in (0, 1)
    ]
    assert len({*seeds}) == 8 and [first.seed("rollout", group) for group in (2, 3)] == seeds[2:4]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "dynamic_sampling.*is '0'; give false, true, or a number of rounds from 1 to 1000"),
        (-1, "is '-1'; give false"), (1001, "is '1001'; give false"), (2.0, "is '2.0'; give false"),
        ("yes", "is 'yes'; give false"), (None, "is 'None'; give false"),
    ],
)  # fmt: skip
def test_what_is_no_number_of_rounds_is_refused(value: Any, said: str, files: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        packlora.train(tree("none", tmp_path / "out", job("own", files, dynamic_sampling=value)))


def test_a_teacher_alone_has_no_rewards_to_go_by(files: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dynamic_sampling goes by rewards, and rollout has a teacher alone"):
        packlora.train(tree("none", tmp_path / "out", job("own", files, "", teacher="base")))


def test_seconds_of_drawing_are_those_of_all_rounds() -> None:
    def found(*totals: list[float], seconds: float) -> Found:
        own = SimpleNamespace(prompts=[0] * len(totals), talks=[None] * 2 * len(totals), size=2, seconds=seconds)
        scores = Scores([np.zeros(1)] * 2 * len(totals), None, None)
        judged: Any = [SimpleNamespace(lost=None) for _ in totals]
        return Found(cast(Any, own), judged, [np.array(one) for one in totals], scores)

    refill = Refill(found([1.0, 1.0], [0.0, 1.0], seconds=2.0), 3)
    for totals, seconds in (([2.0, 2.0], 0.5), ([2.0, 3.0], 0.25)):
        assert refill.wanted() == 1
        refill.take(found(totals, seconds=seconds))
    assert refill.wanted() == 0 and refill.told().numbers == [3, 1] and refill.first.drawn.seconds == 2.75
