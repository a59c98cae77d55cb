"""Drawing of completions, turn by turn where environments answer.

The drawing of a job's completions is a course (courses.py): a turn of all of them, then the answers of the environments, which
are made in a thread of the job. A turn goes on from all tokens before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from packlora.base.model import Base
from packlora.config import JobConfig
from packlora.data.prompts import answer_ends, taught_end
from packlora.data.template import templated
from packlora.engine.generate import sampler_for
from packlora.engine.passes import SingleDevice
from packlora.engine.sampling import SampleRequest
from packlora.errors import InputError, reason_of
from packlora.functions import RAISED
from packlora.rl.conversation import Conversation, between, with_said
from packlora.rl.courses import Steps, Turn
from packlora.rl.data import RolloutData, RolloutSamples
from packlora.rl.environments import Answer, Environments, LostError
from packlora.rl.prompts import Prompt, tokens_of
from packlora.rl.rewards import Group
from packlora.rl.room import sampler_room
from packlora.rl.tools import Call, calls_of, message_of
from packlora.rl.workers import Worker
from packlora.runtime.job import Job
from packlora.seeding import stable_hash


@dataclass(slots=True)
class Drawn:
    """Completions of a step of a job, before they are judged.

    is_held_out: whether the prompts are those that are held out. prompts: number of the prompt of each group. talks: by
    completion. lost: by group, why its environments have failed. scores: by group, rewards of its environments. seconds: in
    which they were drawn, with those of other jobs. first: number of the first group among all that the step draws.
    """

    job: Job
    step: int
    is_held_out: bool
    prompts: list[int]
    talks: list[Conversation]
    lost: dict[int, str] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    first: int = 0

    @property
    def size(self) -> int:
        """Completions of a group."""
        return int(self.job.config.rollout.num_generations)

    def prompt(self, group: int) -> Prompt:
        """Prompt of a group."""
        return self.rollouts.prompts_from(self.is_held_out)[self.prompts[group]]

    @property
    def rollouts(self) -> RolloutSamples:
        """Samples of the job."""
        data = self.job.data
        assert isinstance(data, RolloutData)
        return data.rollouts

    def seed(self, what: str, group: int, *more: int) -> int:
        """Seed of a draw of a group. Held-out prompts are drawn for alike at every step, and use up nothing of training."""
        seed = self.job.data.seed
        own = (self.first + group, *more)
        return (
            stable_hash(f"held-out {what}", seed, *own)
            if self.is_held_out
            else stable_hash(what, seed, self.step, *own)
        )

    def took(self, seconds: float) -> None:
        """Add seconds of drawing."""
        self.seconds += seconds

    def group(self, number: int) -> list[Conversation]:
        """Completions of a group."""
        return self.talks[number * self.size : (number + 1) * self.size]

    def groups(self) -> list[Group]:
        """Groups as rewards are asked for them."""
        return [self._asked(number) for number in range(len(self.prompts))]

    def _asked(self, number: int) -> Group:
        prompt, talks = self.prompt(number), self.group(number)
        said: list[Any] = [talk.text if isinstance(talk.prompt, str) else talk.messages for talk in talks]
        environments = [talk.environment for talk in talks] if talks[0].environment is not None else []
        return Group(
            prompt.where, [talk.prompt for talk in talks], said, prompt.columns, environments, self.scores.get(number, []),
            self.lost.get(number),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Room:
    """Settings of a job's draws, for the whole run. end: text of the token that ends a turn. ends: tokens that end one."""

    tokenizer: Any
    end: str | None
    ends: frozenset[int]
    environments: Environments | None
    worker: Worker
    config: JobConfig


class Drawing:
    """Draws completions by the adapters as they are on the model.

    Args:
        rung: set when an environment has answered.
    """

    def __init__(self, base: Base, single: SingleDevice, rung: threading.Event) -> None:
        self.base, self.single, self._rung = base, single, rung
        self._rooms: dict[str, _Room] = {}
        self._ends: dict[str | None, tuple[str | None, frozenset[int]]] = {}

    def sampler(self) -> Any:
        """A sampler of the model."""
        model = self.base.model
        return sampler_for(model, self.single.attached, self.base.tokenizer, **sampler_room(model))[0]

    def workers(self) -> list[Worker]:
        """Workers that run environments."""
        return [room.worker for room in self._rooms.values()]

    def begun(self, job: Job, step: int, is_held_out: bool, first: int = 0, more: int = 0) -> Drawn:
        """Completions of a job that are yet to be drawn: of all its groups; or of `more` further ones, where it has drawn
        `first` for this step."""
        data = job.data
        assert isinstance(data, RolloutData)
        known, size = data.rollouts.prompts_from(is_held_out), job.config.rollout.num_generations
        numbers = list(range(len(known))) if is_held_out else data.rollouts.prompts_of(step)
        if more:
            numbers = data.rollouts.prompts_of(step, first + more - len(numbers))[first:]
        prompts = [known[number] for number in numbers for _ in range(size)]
        talks = [Conversation(prompt.ids.tolist(), prompt.said) for prompt in prompts]
        return Drawn(job, step, is_held_out, numbers, talks, first=first)

    def course(self, drawn: Drawn) -> Steps:
        """Draw completions."""
        yield from self._in_thread(drawn, self._begin)
        for turn in range(drawn.job.config.rollout.turns):
            if all(talk.is_over for talk in drawn.talks):
                break
            yield Turn(list(self._requests(drawn, turn)))
            for talk in (talk for number in drawn.lost for talk in drawn.group(number)):
                talk.is_over = True
            yield from self._in_thread(drawn, self._answer)
        yield from self._in_thread(drawn, self._end)
        tokenizer = self._room(drawn.job).tokenizer
        for talk in drawn.talks:
            talk.text = str(tokenizer.decode(talk.ids, skip_special_tokens=True))
            talk.is_over = True

    def has_reward(self, job: Job) -> bool:
        """Whether the environments of a job give rewards."""
        environments = self._room(job).environments
        return environments is not None and environments.has_reward

    def more_of(self, drawn: Drawn, number: int) -> dict[str, Any]:
        """Fields of a Completion that one with an environment has."""
        talk = drawn.talks[number]
        if self._room(drawn.job).environments is None:
            return {}
        is_own = talk.start == drawn.prompt(number // drawn.size).ids.tolist()
        return {
            "start": None if is_own else talk.start, "mask": talk.mask, "turns": talk.turns, "calls": talk.calls,
            "failures": talk.failures,
        }  # fmt: skip

    def _room(self, job: Job) -> _Room:
        if job.name not in self._rooms:
            tokenizer, config = templated(self.base.tokenizer, job.chat_template), job.config
            if job.chat_template not in self._ends:
                taught, ends = taught_end(tokenizer), frozenset(answer_ends(tokenizer, self.base.model))
                self._ends[job.chat_template] = None if taught is None else str(tokenizer.decode([taught])), ends
            environments = Environments(config.rollout, job.name) if config.rollout.has_environment else None
            worker = Worker(config.rollout.reward_timeout, self._rung)
            self._rooms[job.name] = _Room(tokenizer, *self._ends[job.chat_template], environments, worker, config)
        return self._rooms[job.name]

    # --- a turn --------------------------------------------------------------------------------------------------------------

    def _requests(self, drawn: Drawn, turn: int) -> Iterator[tuple[SampleRequest, list[Conversation]]]:
        """Requests of a job: the first turn of a group in one request where its prompts are the same."""
        job, room = drawn.job, self._room(drawn.job)
        config = job.config.rollout
        for group in range(len(drawn.prompts)):
            talks = [(at, talk) for at, talk in enumerate(drawn.group(group)) if not talk.is_over]
            if turn == 0 and talks and all(talk.start == talks[0][1].start for _, talk in talks):
                prompt, own = tuple(talks[0][1].start), [talk for _, talk in talks]
                yield SampleRequest(
                    prompt, job.adapter.number, config.max_new_tokens, len(own), seed=drawn.seed("rollout", group),
                    stop_tokens=room.ends, temperature=config.temperature, entropy=True,
                ), own  # fmt: skip
                continue
            for at, talk in talks:
                left = config.max_new_tokens - len(talk.ids)
                yield SampleRequest(
                    (*talk.start, *talk.ids), job.adapter.number, left, seed=drawn.seed("rollout", group, turn, at),
                    stop_tokens=room.ends, temperature=config.temperature, entropy=True,
                ), [talk]  # fmt: skip

    # --- environments --------------------------------------------------------------------------------------------------------

    def _in_thread(self, drawn: Drawn, method: Callable[[Drawn, int], Any]) -> Steps:
        """Do something for each group that is not lost.

        Args:
            method: gives for a group what is run in the job's thread, and what is done with the result here; None: nothing.
        """
        numbers = [number for number in range(len(drawn.prompts)) if number not in drawn.lost]
        steps = [(number, found) for number in numbers if (found := method(drawn, number)) is not None]
        if not steps:
            return
        futures = self._room(drawn.job).worker.ask([_caught(found[0]) for _, found in steps])
        yield futures
        for (number, (_, take)), future in zip(steps, futures, strict=True):
            self._took(drawn, number, take, future.result)

    def _took(self, drawn: Drawn, group: int, take: Callable[[Any], None], result: Any) -> None:
        """Use what a group's environments have given, or lose the group."""
        if result is None:
            seconds = drawn.job.config.rollout.reward_timeout
            result = LostError(f"an environment or tool took more than {seconds:g} seconds (rollout.reward_timeout)")
        if not isinstance(result, LostError):
            try:
                take(result[0])
                return
            except InputError as error:
                result = error
        drawn.lost[group] = str(result)
        for talk in drawn.group(group):
            talk.is_over = talk.turns > 0  # one that has no turn yet is drawn one, as a sample has a token

    def _begin(self, drawn: Drawn, group: int) -> Any:
        environments = self._room(drawn.job).environments
        if environments is None:
            return None
        prompt, longest = drawn.prompt(group), drawn.rollouts.longest
        row = {**prompt.columns, "prompt": prompt.said}
        seed = drawn.seed("environment", group)

        def take(found: Sequence[tuple[Any, Any]]) -> None:
            for talk, (environment, said) in zip(drawn.group(group), found, strict=True):
                talk.environment = environment
                if said is not None:
                    self._open(talk, said, drawn.job, longest)

        return lambda: [environments.begin(row, seed) for _ in range(drawn.size)], take

    def _open(self, talk: Conversation, said: Any, job: Job, longest: int) -> None:
        """Add what a reset says to a prompt. Raises InputError where it cannot be."""
        room = self._room(job)
        assert room.environments is not None
        prompt = with_said(talk.prompt, said)
        schemas = room.environments.schemas
        start = tokens_of(prompt, room.tokenizer, room.config.data.chat_template_kwargs, schemas)
        if len(start) > longest:
            raise InputError(
                f"the prompt has {len(start)} tokens with what reset gives, and {longest} leave room for max_new_tokens"
            )
        talk.prompt, talk.start = prompt, start

    def _answer(self, drawn: Drawn, group: int) -> Any:
        room = self._room(drawn.job)
        environments, talks = room.environments, [talk for talk in drawn.group(group) if not talk.is_over]
        if environments is None:
            self._end_turns(talks, room)
            return None
        if not talks:
            return None
        written = [self._written(talk, room) for talk in talks]
        last = [talk.is_cut or talk.turns >= room.config.rollout.turns for talk in talks]

        def answers() -> list[Answer]:
            return [
                environments.answer(talk.environment, text, calls, is_last)
                for talk, (text, calls), is_last in zip(talks, written, last, strict=True)
            ]

        def take(found: Sequence[Answer]) -> None:
            for talk, answer, (_, calls), is_last in zip(talks, found, written, last, strict=True):
                self._go_on(talk, answer, calls, is_last, room)

        return answers, take

    def _end_turns(self, talks: Sequence[Conversation], room: _Room) -> None:
        """End completions without an environment."""
        for talk in talks:
            self._written(talk, room)
            talk.is_over = True

    def _written(self, talk: Conversation, room: _Room) -> tuple[str, list[Call]]:
        """Text and calls of the newest turn, which becomes a message."""
        ids = talk.turn()
        text = str(room.tokenizer.decode(ids, skip_special_tokens=True))
        has_tools = room.environments is not None and room.environments.schemas is not None
        calls = calls_of(str(room.tokenizer.decode(ids))) if has_tools else []
        if not isinstance(talk.prompt, str):
            talk.messages.append(message_of(text, calls))
        return text, calls

    def _go_on(self, talk: Conversation, answer: Answer, calls: Sequence[Call], is_last: bool, room: _Room) -> None:
        """Add an answer to a completion, which ends where there is no room for more. Raises InputError."""
        talk.reward += answer.reward
        talk.calls += answer.calls
        talk.failures += answer.failures
        talk.is_over = is_last or answer.done or answer.said is None
        if talk.is_over or answer.said is None:
            return
        variables = room.config.data.chat_template_kwargs
        ids, messages = between(
            answer.said, calls, isinstance(talk.prompt, str), room.tokenizer, variables, room.end
        )  # fmt: skip
        if len(talk.ids) + len(ids) >= room.config.rollout.max_new_tokens:
            talk.is_over = talk.is_cut = True
            return
        talk.hear(ids)
        talk.messages += messages

    def _end(self, drawn: Drawn, group: int) -> Any:
        environments, talks = self._room(drawn.job).environments, drawn.group(group)
        if environments is None or not environments.has_reward:
            return None

        def take(found: list[float]) -> None:
            drawn.scores[group] = found

        return lambda: [environments.reward(talk.environment, talk.reward) for talk in talks], take


def _caught(action: Callable[[], Any]) -> Callable[[], Any]:
    """An action that gives its result in a list of one, or what it has failed with."""

    def run() -> Any:
        try:
            return [action()]
        except LostError as error:
            return error
        except RAISED as error:  # of what a user's code has given: values that tell nothing of themselves
            return LostError(reason_of(error))

    return run
