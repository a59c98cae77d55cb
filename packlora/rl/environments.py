"""Environments: what a completion of several turns talks to, as a user writes it, and the calls of its functions.

    class Game:                                              # one instance a completion, with no arguments
        def reset(self, secret, **row): ...                  # None, a text for the last message, or messages that follow
        def step(self, completion): ...                      # observation (a text, messages or None), reward, done
        def get_reward(self): ...                            # a number at the end; optional beside `step`

An environment without `step` is one of TRL's (`environment_factory`): its other public methods are tools. Calls are made in a
thread of the job. One that raises, takes too long or gives no number costs its group.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from packlora.data.messages import check_messages
from packlora.errors import InputError, quoted, reason_of
from packlora.functions import RAISED, load_function, place_of, why_not_called
from packlora.rl.awaiting import awaited
from packlora.rl.config import RolloutConfig
from packlora.rl.rewards import named, numbers_of
from packlora.rl.tools import Call, run_calls, schemas_of

OWN = ("reset", "step", "get_reward")
"""Methods of an environment that are no tools."""
Messages = list[dict[str, Any]]


class Environment(Protocol):
    """An object of `rollout.environment_factory`, for one completion.

    Optional methods: `step(completion) -> (observation, reward, done)` is called with the text of each turn. It gives a text of
    the user or messages, which the next turn answers, a reward that is added to earlier ones, and whether the completion ends.
    `get_reward() -> float` is called once at the end. Without `step` all other public methods are tools.
    """

    def reset(self, **row: Any) -> str | Messages | None:
        """Begin. Returns a text that is added to the last message of the prompt, messages that follow the prompt, or None.

        Args:
            row: fields of the prompt's row that it names, or all of them; and `seed`, the same for all completions of a prompt
                in a step.
        """


class LostError(Exception):
    """A failure of a user's code, which costs a group."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a turn. said: a text, messages, or None. reward: of `step`. done: whether the completion ends."""

    said: str | Messages | None = None
    reward: float = 0.0
    done: bool = True
    calls: int = 0
    failures: int = 0


class Environments:
    """Environments and tools of a job.

    Args:
        job: its name.

    Raises:
        InputError: a function is not there, cannot be made, or is no tool.
    """

    def __init__(self, config: RolloutConfig, job: str) -> None:
        self._make: Callable[[], Any] | None = None
        self._file, self.has_reward, self.has_step = "", False, False
        self._reset: Callable[..., Any] | None = None
        self._functions: dict[str, Callable[..., Any]] = {}
        try:
            for spec in config.tool_specs:
                _, function = load_function(spec, "rollout.tools")
                self._add(getattr(function, "__name__", spec), function)
            methods = [] if config.environment_factory is None else self._probed(config.environment_factory)
            tools = dict(self._functions)
            for name, method in methods:
                if name in tools:
                    raise InputError(f"rollout.tools and the environment have a tool {quoted(name)} each; rename one")
                tools[name] = method
            self.schemas = schemas_of(tools) or None
        except InputError as error:
            raise InputError(f"job {job!r}: {error}") from None

    def _add(self, name: str, function: Callable[..., Any]) -> None:
        if name in self._functions:
            raise InputError(f"rollout.tools has {quoted(name)} twice; rename one")
        self._functions[name] = function

    def _probed(self, spec: str) -> list[tuple[str, Any]]:
        """Make an environment to see what it has. Returns its tools."""
        self._file, self._make = load_function(spec, "rollout.environment_factory")
        try:
            found = self._make()
        except RAISED as error:
            raise InputError(
                f"rollout.environment_factory {spec}: {place_of(error, self._file)} failed: {reason_of(error)}"
            ) from None
        if not callable(getattr(found, "reset", None)):
            raise InputError(
                f"rollout.environment_factory {spec} gives a {type(found).__name__} without `reset`; it gives an environment"
            )
        self._reset = found.reset
        self.has_step = callable(getattr(found, "step", None))
        self.has_reward = self.has_step or callable(getattr(found, "get_reward", None))
        return self._methods(found)

    def _methods(self, environment: Any) -> list[tuple[str, Any]]:
        if self.has_step:
            return []
        names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
        return [(name, getattr(environment, name)) for name in names if name not in OWN and not name.startswith("_")]

    def why_not(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """Why `reset` can be called with the fields of none of these rows; None where it can with some."""
        if self._reset is None:
            return None
        given = [_named(self._reset, {"seed": 0, "prompt": "", **row}) for row in rows]
        reasons = [why_not_called(self._reset, one) for one in given]
        if not all(reasons):
            return None
        said = f"`reset` cannot be called: {reasons[0]}; it is given seed, prompt and {named(rows)}"
        return f"rollout.environment_factory: {said}"

    # --- calls, in a thread of the job; each raises LostError ----------------------------------------------------------------

    def begin(self, row: Mapping[str, Any], seed: int) -> tuple[Any, str | Messages | None]:
        """Make an environment and reset it; None for a job with tools alone."""
        if self._make is None:
            return None, None
        try:
            environment = self._make()
            said = awaited(environment.reset(**_named(environment.reset, {"seed": seed, **copy.deepcopy(row)})))
        except RAISED as error:
            raise self._lost(error) from None
        return environment, _said(said, "reset")

    def answer(self, environment: Any, text: str, calls: Sequence[Call], is_last: bool) -> Answer:
        """Answer a turn. Calls of a last turn are not run, as nothing would follow their results."""
        if calls and not is_last:
            tools = {**self._functions, **dict(self._methods(environment) if environment is not None else [])}
            messages, failures = run_calls(calls, tools)
            return Answer(messages, 0.0, False, len(calls), failures)
        if not self.has_step:
            return Answer()
        try:
            found = awaited(environment.step(text))
        except RAISED as error:
            raise self._lost(error) from None
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise LostError(
                f"step gave a {type(found).__name__}; it gives an observation, a reward, and whether it is done"
            )
        said, reward, done = found
        return Answer(_said(said, "step"), _number(reward, "step"), bool(done) or said is None)

    def reward(self, environment: Any, earned: float) -> float:
        """Reward of a completion. earned: sum of the rewards of its steps."""
        if not callable(getattr(environment, "get_reward", None)):
            return earned
        try:
            found = awaited(environment.get_reward())
        except RAISED as error:
            raise self._lost(error) from None
        return earned + _number(found, "get_reward")

    def _lost(self, error: BaseException) -> LostError:
        return LostError(f"{place_of(error, self._file)} failed: {reason_of(error)}")


def _named(reset: Callable[..., Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a function names; all where it takes any."""
    parameters = inspect.signature(reset).parameters.values()
    if any(own.kind is inspect.Parameter.VAR_KEYWORD for own in parameters):
        return dict(fields)
    return {own.name: fields[own.name] for own in parameters if own.name in fields}


def _said(said: Any, method: str) -> str | Messages | None:
    """Answer of a method, checked."""
    if said is None or isinstance(said, str):
        return said
    if isinstance(said, list) and said and all(isinstance(one, Mapping) and "role" in one for one in said):
        try:
            return check_messages([dict(one) for one in said], InputError)
        except InputError as error:
            raise LostError(f"{method} said messages: {error}") from None
    raise LostError(f"{method} said {said!r:.60}; it is a text, a list of messages, or None")


def _number(value: Any, method: str) -> float:
    found = numbers_of([value.item() if hasattr(value, "item") else value], 1)
    if isinstance(found, str) or value is None:
        raise LostError(f"{method} gave the reward {value!r:.60}; a reward is a finite number")
    return float(found[0])
