"""The example of generated arithmetic: its problems, its rewards, and a step of its run file with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import packlora
from packlora.config import Run

EXAMPLES = Path(__file__).parents[2] / "examples"
SOLVED: tuple[tuple[str, Callable[..., int]], ...] = (
    ("pencil costs {} cents .* notebook costs {} cents. .* buys {} pencils and {} notebooks", lambda a, b, n, m: a * n + b * m),
    ("collects {} .* for {} days.* gives {} of them away", lambda a, n, less: a * n - less),
    ("^{} friends share {} .* finds {} more", lambda n, every, more: every // n + more),
    ("goes {} .* for {} hours, and then {} .* for {} hours", lambda a, n, b, m: a * n + b * m),
    ("is {} years old. .* is {} times as old .* is {} years younger", lambda age, n, less: age * n - less),
)  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("arithmetic_example", EXAMPLES / "arithmetic.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_problems_are_the_same_every_time_and_have_the_answers_that_their_words_have(example: Any) -> None:
    rows = example.problems(300)
    assert rows == example.problems(500)[:300]
    found = set[int]()
    for row in rows:
        text = row["prompt"][0]["content"]
        for kind, (words, solve) in enumerate(SOLVED):
            if (numbers := re.search(words.replace("{}", r"(\d+)"), text)) is not None:
                assert solve(*map(int, numbers.groups())) == row["answer"] > 0, text
                found.add(kind)
                break
        else:
            pytest.fail(text)
    assert len(found) == len(SOLVED) and len({row["prompt"][0]["content"] for row in rows}) == 300


def test_rewards_are_of_the_last_line_and_of_the_exact_answer(example: Any) -> None:
    texts = [
        "6 + 6 = 12\nAnswer: 12",
        "Answer: 12.",
        "Answer: 1,200",
        "Answer: 13",
        "12",
        "Answer: 12\nor so",
        "",
        "Answer: ",
    ]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    answers = [12, 12, 1200, 12, 12, 12, 12, 12]
    assert example.form([], completions) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert example.correct([], completions, answer=answers) == [1, 1, 1, 0, 0, 0, 0, 0]


def test_the_run_file_takes_a_step_on_a_cpu(example: Any, tiny_base: Callable[[str], str], tmp_path: Path) -> None:
    example.write(tmp_path, train=4, held_out=2)
    tree = yaml.safe_load((EXAMPLES / "arithmetic.yaml").read_text())
    (job,) = tree["jobs"]
    for key in ("path", "eval_path"):
        job["data"][key] = str(tmp_path / Path(job["data"][key]).name)
    job["rollout"] |= {"reward": [str(EXAMPLES / one) for one in job["rollout"]["reward"]], "num_generations": 2}
    job["rollout"]["max_new_tokens"] = 4
    job["train"] |= {"global_batch_size": 4, "max_steps": 1, "eval_steps": 1, "learning_rate": 1e-3}
    tree |= {"base_model": tiny_base("llama"), "output_dir": str(tmp_path / "out"), "device": "cpu"}
    assert packlora.train(Run.model_validate(tree)).status == "done"
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["rewards/correct/mean"] for line in lines] == [line["rewards/form/mean"] for line in lines] == [0]
    assert "eval_reward" in (tmp_path / "out" / "evals.jsonl").read_text()
