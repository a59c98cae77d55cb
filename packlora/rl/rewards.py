"""Rewards of completions: functions of a user in the manner of TRL, or addresses that answer with JSON.

    def reward(prompts, completions, **columns):      # lists, one entry a completion; may be async
        return [len(text) for text in completions]    # a number each; None: the function has nothing to say of this one

A job's rewards are asked in a thread of its own, one prompt's completions after the other, so that the jobs do not wait for one
another. A function that raises, takes too long or answers with something else costs its group, and a note says which.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packlora.errors import InputError, reason_of
from packlora.functions import load_function, place_of
from packlora.rl.config import RolloutConfig

MOST_ANSWERED = 10**7
"""Bytes of what an address may answer."""
LARGEST = 1e30
"""Of a reward, so that means and deviations of float64 hold it."""
Ask = Callable[[list[Any], list[Any], Mapping[str, list[Any]]], Any]


@dataclass(frozen=True, slots=True)
class Group:
    """Completions of a prompt. where: file and line of its row. columns: other fields of the row."""

    where: str
    prompt: Any
    completions: Sequence[Any]
    columns: Mapping[str, Any]


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

    Raises:
        InputError: a function is not there.
    """

    def __init__(self, config: RolloutConfig, job: str) -> None:
        self.names = names_of(config.rewards)
        self.weights = np.array(config.reward_weights or [1.0] * len(self.names))
        self._timeout = config.reward_timeout
        try:
            self._asked = [_ask_of(spec, config.reward_timeout) for spec in config.rewards]
        except InputError as error:
            raise InputError(f"job {job!r}: {error}") from None
        self._worker: _Worker | None = None

    def ask(self, groups: Sequence[Group]) -> list[Future]:
        """Begin to judge groups; the results come in their order."""
        if self._worker is None or self._worker.is_stuck:
            self._worker = _Worker()
        return [self._worker.submit(lambda group=group: self._judge(group)) for group in groups]  # type: ignore[misc]

    def take(self, groups: Sequence[Group], futures: Sequence[Future]) -> list[Judged]:
        """Wait for the results of `ask`. Where one takes too long, its thread is left alone, and the rest is asked anew."""
        out: list[Judged] = []
        while len(out) < len(groups):
            found = futures[len(out)].wait(self._timeout)
            if found is None:
                said = f"took more than {self._timeout:g} seconds"
                out.append(self._lost(groups[len(out)], said))
                assert self._worker is not None
                self._worker.is_stuck = True
                futures = [*futures[: len(out)], *self.ask(groups[len(out) :])]
            else:
                out.append(found)
        return out

    def _judge(self, group: Group) -> Judged:
        count = len(group.completions)
        columns = {name: [value] * count for name, value in group.columns.items()}
        found = np.full((len(self._asked), count), math.nan)
        for number, (file, ask) in enumerate(self._asked):
            try:
                answer = ask([group.prompt] * count, list(group.completions), columns)
            except Exception as error:  # any code of a user
                return self._lost(group, f"{place_of(error, file)} failed: {reason_of(error)}")
            numbers = _numbers(answer, count)
            if isinstance(numbers, str):
                return self._lost(group, f"{self.names[number]} {numbers}")
            found[number] = numbers
        if self._asked and np.isnan(found).all(axis=0).any():
            return self._lost(group, "no reward has anything to say of a completion")
        return Judged(found)

    def _lost(self, group: Group, why: str) -> Judged:
        return Judged(np.full((len(self._asked), len(group.completions)), math.nan), f"{group.where}: {why}")

    def total(self, judged: Judged) -> np.ndarray:
        """Weighted sums [G] of what has something to say."""
        total: np.ndarray = np.nansum(judged.rewards * self.weights[:, None], axis=0)
        return total


def names_of(specs: Sequence[str]) -> list[str]:
    """Names of rewards in logs: those of functions, and hosts of addresses; with a number where one comes twice."""
    found = [
        spec.split("/")[2].replace(":", "-") if spec.startswith("http") else spec.rpartition(":")[2].rpartition("/")[2]
        for spec in specs
    ]
    return [name if found.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(found)]


def _ask_of(spec: str, timeout: float) -> tuple[str, Ask]:
    """File, or address, and what asks it."""
    if spec.startswith(("http://", "https://")):
        return spec, lambda prompts, completions, columns: _post(spec, timeout, prompts, completions, columns)
    file, function = load_function(spec, "rollout.reward")

    def ask(prompts: list[Any], completions: list[Any], columns: Mapping[str, list[Any]]) -> Any:
        found = function(prompts=prompts, completions=completions, **columns)
        return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found

    return file, ask


async def _awaited(found: Any) -> Any:
    return await found


def _post(address: str, timeout: float, prompts: Any, completions: Any, columns: Mapping[str, Any]) -> Any:
    """What an address answers: a list of numbers, or a mapping with one under `rewards`."""
    sent = json.dumps({"prompts": prompts, "completions": completions, **columns}).encode()
    request = urllib.request.Request(address, sent, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read(MOST_ANSWERED)
    value = json.loads(text)
    return value["rewards"] if isinstance(value, dict) else value


def _numbers(answer: Any, count: int) -> np.ndarray | str:
    """An answer as numbers [G], NaN for None; or what is wrong with it."""
    values = answer.tolist() if hasattr(answer, "tolist") else answer
    if not isinstance(values, list | tuple) or len(values) != count:
        what = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(answer).__name__}"
        return f"gave {what} for {count} completions; it gives a list of a number each"
    out = np.full(count, math.nan)
    for at, value in enumerate(values):
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or not abs(value) <= LARGEST:
            return f"gave {value!r:.60} for a completion; a reward is a number up to {LARGEST:g}, or None"
        out[at] = float(value)
    return out


class Future:
    """A result that a worker is to give."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._done = threading.Event()
        self._result: Judged | None = None

    def run(self, action: Callable[[], Judged]) -> None:
        self._began = time.monotonic()
        self._result = action()
        self._done.set()

    def wait(self, seconds: float) -> Judged | None:
        """The result; None where it takes longer than so many seconds from when it began."""
        while not self._done.wait(0.05 if self._began is None else max(0.0, self._began + seconds - time.monotonic())):
            if self._began is not None and time.monotonic() > self._began + seconds:
                return None
        return self._result


class _Worker:
    """A thread that does one thing after the other, and holds no program up that ends.

    is_stuck: set where what it does takes too long; nothing that waits is done then.
    """

    def __init__(self) -> None:
        self.is_stuck = False
        self._waiting: queue.SimpleQueue[tuple[Future, Callable[[], Judged]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="packlora-reward", daemon=True).start()

    def submit(self, action: Callable[[], Judged]) -> Future:
        future = Future()
        self._waiting.put((future, action))
        return future

    def _run(self) -> None:
        while not self.is_stuck:
            future, action = self._waiting.get()
            if not self.is_stuck:
                future.run(action)
