"""A slow environment, reward or evaluation of one job: the others go on, and no bit depends on when it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS
from test_held_out_rewards import evals
from test_training import adapter, distance
from waiting import SECONDS

import packlora
from packlora.events import Event, JobDone, Note, Stepped, Stop, WindowPlanned

LONG = SECONDS
"""Seconds after which a slow function is given up; a run that waits for it fails its test by then."""
ROWS = [{"prompt": " ".join(WORDS[n : n + 3]), "word": WORDS[n % 4]} for n in range(6)]
HELD_OUT = [{"prompt": " ".join(WORDS[n : n + 2]), "word": WORDS[n], "is_held_out": True} for n in (5, 6)]


class Gate:
    """What the slow job waits for: shut until the others have ended. order: of events. has_stepped: the slow job."""

    def __init__(self, *others: str) -> None:
        self._open, self._others = threading.Event(), set(others)
        self.has_stepped = threading.Event()
        self.order: list[tuple[str, int]] = []
        self.notes: list[str] = []
        if not others:
            self._open.set()

    def wait(self) -> None:
        self._open.wait(LONG)

    def hear(self, event: Event) -> None:
        if isinstance(event, Stepped | JobDone):
            self.order.append((event.job, event.step if isinstance(event, Stepped) else 0))
            if event.job == "slow":
                self.has_stepped.set()
        if isinstance(event, Note):
            self.notes.append(event.text)
        if isinstance(event, JobDone):
            self._others.discard(event.job)
            if not self._others:
                self._open.set()


def letters(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    return [float(text.count("o")) - 0.01 * len(text) for text in completions]


def jobs(where: str, gate: Gate, **keys: Any) -> list[packlora.Job]:
    """A job that waits for the gate there, and two others."""

    judged = list[int]()

    def slow(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        judged.extend([1] * ("is_held_out" in columns))
        first = where == "evaluation" and "is_held_out" in columns
        if where == "reward" or first or (where == "last evaluation" and len(judged) > len(HELD_OUT)):
            gate.wait()
        return letters(prompts, completions)

    class Game:
        def reset(self, word: str) -> None:
            self.turns = 0

        def step(self, completion: str) -> tuple[str, float, bool]:
            gate.wait()
            self.turns += 1
            return " fox", 0.1 * len(completion), self.turns == 2

    own: dict[str, Any] = {"loss_type": "dapo", "global_batch_size": 8, "learning_rate": 1e-2, "max_steps": 3, **keys}
    own["adapter"] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    rollout = {"num_generations": 4, "max_new_tokens": 12, "reward": slow, "reward_timeout": LONG}
    rollout |= {"environment_factory": Game, "max_turns": 3} if where == "environment" else {}
    more: dict[str, Any] = {"eval_data": HELD_OUT, "eval_steps": 1} if "evaluation" in where else {}
    more |= {"max_steps": 1} if where == "last evaluation" else {}

    def after_slow(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        gate.has_stepped.wait(LONG)
        return letters(prompts, completions)

    quick: dict[str, Any] = {"num_generations": 4, "max_new_tokens": 12, "reward_timeout": LONG}
    quick["reward"] = after_slow if where == "last evaluation" else letters
    texts: dict[str, Any] = {"global_batch_size": 2, "max_steps": 3, "adapter": {"r": 4}}
    rows = [{"prompt": "the", "completion": f" {word}"} for word in WORDS[:6]]
    return [
        packlora.Job("slow", data=ROWS, seed=1, rollout=rollout, **own | more),
        packlora.Job("fast", data=ROWS, seed=2, rollout=quick, **own),
        packlora.Job("texts", data=rows, seed=3, **texts),
    ]


def run(base: str, out: Path, some: list[packlora.Job], *callbacks: Any, resume: bool = False) -> packlora.Result:
    keys: dict[str, Any] = {"device": "cpu", "dtype": "float32", "save_every": 1, "max_tokens_per_microbatch": 128}
    return packlora.Trainer(base, jobs=some, output_dir=str(out), callbacks=list(callbacks), **keys).train(resume)


@pytest.fixture(scope="module")
def alone(tiny_base: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Runs of one job in which nothing is slow, by where the slow one would wait and by job."""
    made: dict[tuple[str, str], Path] = {}

    def make(where: str, name: str) -> Path:
        key = (where if name == "slow" else "", name)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            run(tiny_base("llama"), made[key], [one for one in jobs(where, Gate()) if one.name == name])
        return made[key]

    return make


def check_same(out: Path, where: str, alone: Callable[[str, str], Path]) -> None:
    for name in ("slow", "fast", "texts"):
        assert distance(adapter(out, name), adapter(alone(where, name), name)) == 0, name
    if where == "evaluation":
        found = evals(out, "slow")
        assert [line["step"] for line in found] == [0, 1, 2, 3] and found == evals(alone(where, "slow"), "slow")


@pytest.mark.parametrize("where", ["reward", pytest.param("environment", marks=pytest.mark.soak), "evaluation"])
def test_only_the_job_that_waits_stands_still(
    where: str, alone: Callable[[str, str], Path], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    gate = Gate("fast", "texts")
    result = run(tiny_base("llama"), tmp_path / "out", jobs(where, gate), gate.hear)
    assert result.status == "done"
    first = gate.order.index(("slow", 1))
    assert {("fast", 3), ("fast", 0), ("texts", 3), ("texts", 0)} <= set(gate.order[:first])
    assert not any("seconds" in note for note in gate.notes)
    check_same(tmp_path / "out", where, alone)


def test_a_job_is_done_when_its_last_evaluation_is_there(tiny_base: Callable[..., str], tmp_path: Path) -> None:
    gate = Gate("fast", "texts")
    assert run(tiny_base("llama"), tmp_path / "out", jobs("last evaluation", gate), gate.hear).status == "done"
    assert gate.order.index(("slow", 1)) < gate.order.index(("fast", 3)) < gate.order.index(("slow", 0))
    assert [line["step"] for line in evals(tmp_path / "out", "slow")] == [0, 1]


@pytest.mark.parametrize("where", ["reward", "environment"])
def test_a_run_that_is_stopped_while_one_job_lags_behind_goes_on_with_the_same_bits(
    where: str, alone: Callable[[str, str], Path], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    gate, out = Gate("nobody"), tmp_path / "out"

    def stop(event: Event) -> Stop | None:
        return Stop() if isinstance(event, Stepped) and (event.job, event.step) == ("fast", 2) else None

    assert run(tiny_base("llama"), out, jobs(where, gate), gate.hear, stop).status == "interrupted"
    assert ("fast", 2) in gate.order and not any(name == "slow" for name, _ in gate.order)
    gate._open.set()
    rounds = list[int]()

    def begin(event: Event) -> None:
        if isinstance(event, WindowPlanned):
            rounds.append(event.window)

    assert run(tiny_base("llama"), out, jobs(where, Gate()), begin, resume=True).status == "done"
    assert rounds[0] >= 2, "nobody waits for the steps by which one lags behind"
    check_same(out, where, alone)
