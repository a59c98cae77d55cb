"""Rewards of completions: functions of a user in the manner of TRL, or addresses that answer with JSON.

    def reward(prompts, completions, **columns):      # lists, one entry a completion; may be async
        return [len(text) for text in completions]    # a number each; None: the function has nothing to say of this one

A job's rewards are asked in a thread of its own, one prompt's completions after the other, so that the jobs do not wait for one
another. A function that raises, takes too long or answers with something else costs its group, and a note says which.
"""

from __future__ import annotations

import json
import math
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packlora.errors import InputError, reason_of, shown
from packlora.functions import RAISED, load_function, place_of, why_not_called
from packlora.rl.awaiting import awaited
from packlora.rl.config import RolloutConfig
from packlora.rl.workers import Future, Worker

MOST_ANSWERED = 10**7
"""Bytes of what an address may answer."""
LARGEST = 1e30
"""Of a reward, so that means and deviations of float64 hold it."""
ENVIRONMENTS = "environments"
"""Name by which a reward is given the environments, as in TRL."""
Ask = Callable[[list[Any], list[Any], Mapping[str, list[Any]]], Any]


@dataclass(frozen=True, slots=True)
class Group:
    """Completions of a prompt. where: file and line of its row. columns: other fields of the row.

    environments: of each completion, for rewards that look into them. scores: rewards of these environments; empty where they
    give none. lost: why it teaches nothing, as an environment has failed.
    """

    where: str
    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: Mapping[str, Any]
    environments: Sequence[Any] = ()
    scores: Sequence[float] = ()
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """Rewards of a group, [R, G] float64 by reward and completion; NaN where one has nothing to say. lost: why the group
    teaches nothing."""

    rewards: np.ndarray
    lost: str | None = None


class Rewards:
    """The rewards of a job.

    Args:
        job: its name.
        has_own: whether its environments give a reward, which stands last and has weight 1, as in TRL.
        rung: set when a group has been judged.

    Raises:
        InputError: a function is not there.
    """

    def __init__(
        self, config: RolloutConfig, job: str, has_own: bool = False, rung: threading.Event | None = None
    ) -> None:  # fmt: skip
        self.names = names_of(config.reward_sources)[: len(config.rewards) + has_own]
        weights = config.reward_weights or [1.0] * len(config.rewards)
        self.weights = np.array([*weights, 1.0][: len(self.names)])
        self._timeout = config.reward_timeout
        self._functions: dict[str, Any] = {}
        try:
            self._asked = [self._ask_of(spec) for spec in config.rewards]
        except InputError as error:
            raise InputError(f"job {job!r}: {error}") from None
        self.worker = Worker(config.reward_timeout, rung or threading.Event())

    def _ask_of(self, spec: str) -> tuple[str, Ask]:
        """File, or address, and what asks it."""
        if spec.startswith(("http://", "https://")):
            return spec, lambda prompts, completions, columns: _post(spec, self._timeout, prompts, completions, columns)
        file, function = load_function(spec, "rollout.reward")
        self._functions[spec] = function

        def ask(prompts: list[Any], completions: list[Any], columns: Mapping[str, list[Any]]) -> Any:
            found = function(prompts=prompts, completions=completions, **columns)
            return awaited(found)

        return file, ask

    def why_not(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """Why a reward can be called with the fields of none of these rows; None where each can with some."""
        for spec, function in self._functions.items():
            reasons = [why_not_called(function, {"prompts": [], "completions": [], **row}) for row in rows]
            if all(reasons):
                given = f"it is given prompts, completions and {named(rows)}"
                return f"rollout.reward {spec} cannot be called: {reasons[0]}; {given}"
        return None

    def ask(self, groups: Sequence[Group]) -> list[Future[Judged]]:
        """Begin to judge groups; the results come in their order."""
        return self.worker.ask([lambda group=group: self._judge(group) for group in groups])  # type: ignore[misc]

    def judged(self, groups: Sequence[Group], futures: Sequence[Future[Judged]]) -> list[Judged]:
        """Results of `ask`, all of which are there. One that took too long is lost."""
        late = f"the rewards took more than {self._timeout:g} seconds (rollout.reward_timeout)"
        return [future.result or self._lost(group, late) for group, future in zip(groups, futures, strict=True)]

    def _judge(self, group: Group) -> Judged:
        count = len(group.completions)
        if group.lost is not None:
            return self._lost(group, group.lost)
        found = np.full((len(self.names), count), math.nan)
        if group.scores:
            found[len(self._asked)] = group.scores
        for number, (file, ask) in enumerate(self._asked):
            try:
                numbers = numbers_of(ask(*_arguments(group)), count)
            except RAISED as error:
                return self._lost(group, f"{place_of(error, file)} failed: {reason_of(error)}")
            if isinstance(numbers, str):
                return self._lost(group, f"{self.names[number]} {numbers}")
            found[number] = numbers
        if len(found) and np.isnan(found).all():
            return self._lost(group, "no reward has anything to say of a completion")
        return Judged(found)

    def _lost(self, group: Group, why: str) -> Judged:
        return Judged(np.full((len(self.names), len(group.completions)), math.nan), f"{group.where}: {why}")

    def total(self, judged: Judged) -> np.ndarray:
        """Weighted sums [G] of what has something to say; NaN of a completion of which nothing has."""
        total: np.ndarray = np.nansum(judged.rewards * self.weights[:, None], axis=0)
        return np.where(np.isnan(judged.rewards).all(axis=0), math.nan, total) if len(judged.rewards) else total


def _copied(value: Any) -> Any:
    """A copy of what rows of a file are made of; other objects are handed over as they are."""
    if isinstance(value, dict):
        return {key: _copied(own) for key, own in value.items()}
    return [_copied(own) for own in value] if isinstance(value, list) else value


def _arguments(group: Group) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
    """Prompts, completions and columns of a group for one reward. Each completion has its own copies, so that what a function
    changes in them is seen by no other completion, reward or step."""
    prompts, completions = _copied(list(group.prompts)), _copied(list(group.completions))
    columns = {name: [_copied(value) for _ in completions] for name, value in group.columns.items()}
    return prompts, completions, columns | ({ENVIRONMENTS: list(group.environments)} if group.environments else {})


def named(rows: Sequence[Mapping[str, Any]]) -> str:
    """Names of the other fields of rows, as a message lists them."""
    names = dict.fromkeys(name for row in rows for name in row)
    return f"the fields of rows: {', '.join(shown(name, 40) for name in names) or 'none'}"


def names_of(specs: Sequence[str]) -> list[str]:
    """Names of rewards in logs: those of functions, and hosts of addresses; with a number where one comes twice."""
    found = [
        spec.split("/")[2].replace(":", "-") if spec.startswith("http") else spec.rpartition(":")[2].rpartition("/")[2]
        for spec in specs
    ]
    return [name if found.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(found)]


def _post(address: str, timeout: float, prompts: Any, completions: Any, columns: Mapping[str, Any]) -> Any:
    """Answer of an address: a list of numbers, or a mapping with one under `rewards`."""
    columns = {name: own for name, own in columns.items() if name != ENVIRONMENTS}
    sent = json.dumps({"prompts": prompts, "completions": completions, **columns}).encode()
    request = urllib.request.Request(address, sent, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read(MOST_ANSWERED)
    value = json.loads(text)
    return value["rewards"] if isinstance(value, dict) else value


def numbers_of(answer: Any, count: int) -> np.ndarray | str:
    """An answer as numbers [G], NaN for None; or what is wrong with it. Arrays and tensors of one number are numbers."""
    values = answer.tolist() if hasattr(answer, "tolist") else answer
    if not isinstance(values, list | tuple) or len(values) != count:
        what = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(answer).__name__}"
        return f"gave {what} for {count} completions; it gives a list of a number each"
    out = np.full(count, math.nan)
    for at, value in enumerate(values):
        if value is None:
            continue
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        if not isinstance(value, bool | int | float) or not abs(value) <= LARGEST:
            return f"gave {value!r:.60} for a completion; a reward is a number up to {LARGEST:g}, or None"
        out[at] = float(value)
    return out
