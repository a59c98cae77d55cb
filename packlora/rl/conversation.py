"""A completion while it is drawn: turns of the adapter, which are learnt, and what an environment says between them.

The tokens that were drawn are kept as they are. What is said between turns is rendered by the chat template after a turn that
stands for the drawn one, so that no token of the adapter is tokenized anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packlora.data.template import PLACEHOLDER, Template
from packlora.errors import InputError
from packlora.rl.tools import Call

Said = str | list[dict[str, Any]]


@dataclass(slots=True)
class Conversation:
    """A completion.

    start: tokens of its prompt. prompt: text or messages, with what an environment has added.
    ids, mask: tokens that follow, and 1 for a token of the adapter, 0 for one of the environment.
    logprobs: of the adapter's tokens, by the sampler. entropies: of the distributions that they were drawn from.
    begun: tokens before the newest turn. messages: that follow the prompt. text: of all tokens.
    reward: sum over the steps of its environment.
    is_cut: whether it ended for lack of room. is_over: whether nothing more is drawn.
    """

    start: list[int]
    prompt: Said
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    begun: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    turns: int = 0
    calls: int = 0
    failures: int = 0
    reward: float = 0.0
    is_cut: bool = False
    is_over: bool = False
    environment: Any = None

    def take(self, token: int, logprob: float, entropy: float) -> None:
        """Add a token of the adapter."""
        self.ids.append(token)
        self.mask.append(1)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)

    def turn(self) -> list[int]:
        """Tokens of the newest turn."""
        return self.ids[self.begun :]

    def hear(self, ids: Sequence[int]) -> None:
        """Add tokens of the environment, which may be none, before a turn."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.begun = len(self.ids)


def with_said(prompt: Said, said: Said | None) -> Said:
    """A prompt with what a reset says. Raises InputError where a text is to be followed by messages."""
    if said is None:
        return prompt
    if isinstance(prompt, str):
        if isinstance(said, str):
            return prompt + said
        raise InputError(
            "reset gave messages, and the prompt is a text; give a text, or make the prompt a list of messages"
        )
    if not isinstance(said, str):
        return [*prompt, *said]
    last = prompt[-1]
    if not isinstance(last.get("content"), str):
        raise InputError("reset gave a text, and the content of the prompt's last message is no text; give messages")
    return [*prompt[:-1], {**last, "content": last["content"] + said}]


def between(
    said: Said, calls: Sequence[Call], is_text: bool, tokenizer: Any, variables: Mapping[str, Any], end: str | None
) -> tuple[list[int], list[dict[str, Any]]]:
    """Tokens between a turn and the next one, and the messages that they say.

    Args:
        said: by the environment; a text is the user's.
        calls: of the turn, which the messages answer.
        is_text: whether the prompt is a text, which goes on without a chat template.
        end: text of the token that ends a turn; None: there is none.

    Raises:
        InputError: the chat template refuses the messages.
    """
    if is_text:
        if not isinstance(said, str):
            raise InputError("the environment said messages, and the prompt is a text; say a text")
        return list(tokenizer(said, add_special_tokens=False)["input_ids"]), []
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    text = rendered_between(messages, bool(calls), Template(tokenizer, None, variables), end)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]), messages


def rendered_between(messages: list[dict[str, Any]], are_results: bool, template: Template, end: str | None) -> str:
    """Text that a chat template writes after the end of a turn up to the beginning of the next one.

    Args:
        messages: between them. are_results: of calls that the turn has made.

    Raises:
        InputError: the chat template refuses the messages, or writes the turn itself anew when something follows.
    """
    function = {"name": PLACEHOLDER, "arguments": {}}
    turns: list[dict[str, Any]] = [{"role": "assistant", "content": PLACEHOLDER}]
    if are_results:
        turns.insert(
            0, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
    reason = "the chat template does not show the assistant's turns"
    for turn in turns:
        asked = [{"role": "user", "content": "a"}, turn]
        try:
            alone, whole = template.render(asked), template.render([*asked, *messages], generation=True)
        except InputError as error:
            reason = str(error)
            continue
        count = alone.count(PLACEHOLDER)
        after = alone.split(PLACEHOLDER, count)[-1] if count else ""
        at = after.find(end) if end else -1
        kept = after[: at + len(end)] if end and at >= 0 else after.rstrip()
        following = whole.split(PLACEHOLDER, count)[-1]
        if count and following.startswith(kept):
            return following[len(kept) :]
        if count:
            reason = "the chat template writes a turn in another way when something follows it"
    raise InputError(reason)
