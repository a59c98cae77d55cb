"""Rewards, environments and evaluations that fail in every way, each beside a healthy job, which keeps its bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS
from hanging import given_up_where_it_hangs
from test_environments import ending
from test_held_out_rewards import evals
from test_rollouts import tree
from test_training import adapter, distance, train

REWARDS: dict[str, tuple[str, str | None]] = {
    "raises": ("raise RuntimeError('no')", "failed: RuntimeError: no"),
    "exits": ("sys.exit(3)", "failed: SystemExit: 3"),
    "cancels": ("raise asyncio.CancelledError('of a task')", "failed: CancelledError: of a task"),
    "stops": ("next(iter([]))", "failed: StopIteration"),
    "needs_more": ("return missing", "failed: NameError"),
    "recurses": ("return recursing(prompts)", "failed: RecursionError"),
    "runs_out": ("raise MemoryError('of a reward')", "failed: of a reward"),
    "hangs": ("hang()", "took more than 0.5 seconds"),
    "nan": ("return [math.nan] * len(completions)", "gave nan for a completion"),
    "infinite": ("return [-math.inf] * len(completions)", "gave -inf for a completion"),
    "large": ("return [1e31] * len(completions)", "a reward is a number up to 1e+30"),
    "one_nan": ("return [1.0] * (len(completions) - 1) + [math.nan]", "gave nan for a completion"),
    "none": ("return None", "gave a NoneType for 4 completions"),
    "all_none": ("return [None] * len(completions)", "no reward has anything to say of a completion"),
    "number": ("return 1.0", "gave a float for 4 completions"),
    "mapping": ("return {'rewards': [1.0] * len(completions)}", "gave a dict for 4 completions"),
    "text": ("return ['1'] * len(completions)", "gave '1' for a completion"),
    "lists": ("return [[1.0]] * len(completions)", "gave [1.0] for a completion"),
    "fewer": ("return [1.0]", "gave 1 values for 4 completions"),
    "more": ("return [1.0] * 9", "gave 9 values for 4 completions"),
    "generates": ("return (1.0 for one in completions)", "gave a generator for 4 completions"),
    "clears": ("completions.clear(); return [1.0]", "gave 1 values for 4 completions"),
    "equal": ("return [7.0] * len(completions)", None),
    "vast": ("return [1e30 * (-1) ** at for at in range(len(completions))]", None),
}
"""Bodies of rewards, and what is said of them; None: nothing fails."""
ENVIRONMENTS: dict[str, tuple[str, str | None]] = {
    "step_raises": ("def step(self, said): raise RuntimeError('no')", "failed: RuntimeError: no"),
    "step_hangs": ("def step(self, said): hang()", "an environment or tool took more than 0.5 seconds"),
    "step_exits": ("def step(self, said): raise SystemExit", "failed: SystemExit"),
    "step_nan": ("def step(self, said): return 'so', math.nan, False", "step gave the reward nan"),
    "step_none": ("def step(self, said): return None", "step gave a NoneType"),
    "step_pair": (
        "def step(self, said): return 'so', 1.0",
        "it gives an observation, a reward, and whether it is done",
    ),
    "step_says_a_number": ("def step(self, said): return 3, 1.0, False", "step said 3; it is a text"),
    "step_says_a_role": (
        "def step(self, said): return [{'role': 'human', 'content': 'so'}], 1.0, False",
        "step said messages: message 1 has the role 'human'; chat templates call it user",
    ),
    "step_says_too_much": ("def step(self, said): return ' the' * 999, float(len(said)), False", None),
    "step_async": ("async def step(self, said): raise KeyError('level')", "failed: KeyError: 'level'"),
    "reset_raises": ("def reset(self, **row): raise KeyError('level')", "failed: KeyError: 'level'"),
    "reset_hangs": ("def reset(self, **row): hang()", "an environment or tool took more than 0.5 seconds"),
    "reset_says_a_number": ("def reset(self, **row): return 3", "reset said 3; it is a text"),
    "reset_says_too_much": ("def reset(self, **row): return ' the' * 999", "leave room for max_new_tokens"),
    "end_raises": ("def get_reward(self): raise RuntimeError('no')", "failed: RuntimeError: no"),
    "end_text": ("def get_reward(self): return '1'", "get_reward gave the reward '1'"),
    "end_infinite": ("def get_reward(self): return math.inf", "get_reward gave the reward inf"),
}
"""Methods in the place of those of an environment, and what is said of them."""
HELD_OUT = ("raises", "hangs", "nan", "all_none", "fewer", "text", "equal", "vast", "exits")
"""Rewards that fail on held-out prompts alone."""
HEAD = """
import asyncio, math, sys
from hanging import hang

def letters(prompts, completions, **columns):
    return [float(text.count("o")) - 0.01 * len(text) for text in completions]

def recursing(value):
    return recursing(value)

class Game:
    def reset(self, **row):
        self.turns = 0

    def step(self, said):
        self.turns += 1
        return " fox", float(said.count("o")), self.turns == 2
"""
KEYS = {"loss_type": "dapo", "global_batch_size": 8, "learning_rate": 1e-2, "max_steps": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of functions, prompts and held-out prompts. Each reward fails for rows of the word `fox`, or in `is_held_out`."""
    folder, code = tmp_path_factory.mktemp("poison"), HEAD
    for name, (body, _) in REWARDS.items():
        for prefix, when in (("", "word[0] == 'fox'"), ("held_out_", "is_held_out is not None")):
            code += (
                f"\ndef {prefix}{name}(prompts, completions, word, is_held_out=None):\n    if {when}:\n        {body}\n"
            )
            code += "    return letters(prompts, completions)\n"
    for name, (method, _) in ENVIRONMENTS.items():
        code += f"\nclass {name}(Game):\n    {method}\n"
    (folder / "code.py").write_text(code)
    lines = [{"prompt": " ".join(WORDS[n : n + 3]), "word": "fox" if n % 2 else "the"} for n in range(2)]
    held_out = [{"prompt": WORDS[n], "word": "the", "is_held_out": True} for n in range(2)]
    for name, rows in (("prompts", lines), ("held-out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def base(tiny_base: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model, a third of whose tokens end a turn: many of its completions are empty texts."""
    return ending(tiny_base("llama"), tmp_path_factory.mktemp("ends") / "base", 3)


def job(name: str, files: Path, seed: int = 3, **rollout: Any) -> dict[str, Any]:
    keys = {"num_generations": 4, "max_new_tokens": 8} | rollout
    if name.endswith("hangs"):
        keys["reward_timeout"] = 0.5
    return {
        "name": name, "data": {"path": str(files / "prompts.jsonl")}, "seed": seed, "rollout": keys, "train": KEYS,
        "adapter": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
    }  # fmt: skip


def jobs_of(kind: str, files: Path) -> list[dict[str, Any]]:
    """The healthy job first."""
    code, healthy = files / "code.py", job("healthy", files, 1, reward=f"{files / 'code.py'}:letters")
    if kind == "rewards":
        return [healthy, *(job(name, files, reward=f"{code}:{name}", scale_rewards="none") for name in REWARDS)]
    if kind == "environments":
        more = {"max_turns": 3, "max_new_tokens": 24}
        return [healthy, *(job(name, files, environment_factory=f"{code}:{name}", **more) for name in ENVIRONMENTS)]
    own = [healthy, *(job(name, files, reward=f"{code}:held_out_{name}") for name in HELD_OUT)]
    for one in own:
        one["data"] = one["data"] | {"eval_path": str(files / "held-out.jsonl")}
    return own


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["rewards", "environments", "evaluations"])
def test_what_fails_is_told_and_costs_no_neighbour_a_bit(
    kind: str, files: Path, base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 of them, each a job of one run. Of two prompts one fails; an evaluation that fails costs training no bit."""
    assert len(REWARDS) + len(ENVIRONMENTS) + len(HELD_OUT) == 50
    jobs = jobs_of(kind, files)
    train(tree(base, tmp_path / "alone", jobs[0]))
    capsys.readouterr()
    with given_up_where_it_hangs():
        result = train(tree(base, tmp_path / "out", *jobs))
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: job ")]
    assert distance(adapter(tmp_path / "out", "healthy"), adapter(tmp_path / "alone", "healthy")) == 0
    table = ENVIRONMENTS if kind == "environments" else REWARDS
    for name in (one["name"] for one in jobs[1:]):
        own, wanted = [line for line in notes if f"job '{name}'" in line], table[name][1]
        assert result[name].status == ("failed" if (kind, name) == ("rewards", "vast") else "done"), name
        told = any(wanted in line for line in own) if wanted else not any("teach nothing" in line for line in own)
        assert told, (name, own)
        if kind == "evaluations":
            assert distance(adapter(tmp_path / "out", name), adapter(tmp_path / "out", jobs[1]["name"])) == 0, name
            rewards = [line["eval_reward"] for line in evals(tmp_path / "out", name)]
            assert len(rewards) == 2 and (wanted is None or rewards == [None, None]), name
