"""Text that a chat template writes around a message, found by rendering windows: the message with the few before it.

Windows render bones (marks.py), messages whose words are replaced by marks, so conversations of the same shape share their
renderings. Windows of a long conversation are no longer than those of a short one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from packlora.data.marks import MARK, Mark, Message, Part, Place, bones_of, message_of, tags_of, written
from packlora.data.template import EndlessTemplateError, Template, clock_of
from packlora.errors import InputError

NEAR = 4
"""Messages before a place that a window has at least."""
KNOWN, LONG = 1024, 2**15
"""Number of renderings that are cached, and the length in characters from which a rendering is not cached."""
A_USER, AN_ANSWER = -1, -2
"""Stand for messages that are not the conversation's, in the place of a message's number."""
ADDED: dict[int, Message] = {A_USER: {"role": "user", "content": "u"}, AN_ANSWER: {"role": "assistant", "content": "a"}}
ANY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "any", "description": "any", "parameters": {"type": "object", "properties": {}}},
}
"""Tool that stands for all tools in a window: the text around messages does not depend on which tools there are."""

_KNOWN: dict[tuple[Any, ...], str | None] = {}


def attempt(template: Template, messages: list[Message], generation: bool = False) -> str | None:
    """Text that a template renders; None where it refuses the messages."""
    try:
        return template.render(messages, generation) if messages else None
    except EndlessTemplateError:
        raise
    except InputError:
        return None


def tail(whole: str | None, mark: Mark, number: int, up_to_next: bool = False) -> str | None:
    """Text behind a mark in a rendering, without marks; None where the mark is not in it.

    Args:
        number: of the mark's place, if it is in several; the last one if it is in fewer.
        up_to_next: up to the next mark, not to the end.
    """
    text = written(mark)
    _, *rests = whole.split(text, number + 1) if whole is not None else [""]
    if not rests:
        return None
    rest = rests[-1]
    if up_to_next and (following := MARK.search(rest)):
        rest = rest[: following.start()]
    return MARK.sub("", rest)


@lru_cache
def _added(tags: frozenset[str]) -> dict[int, str]:
    return {number: bones_of(message, tags) for number, message in ADDED.items()}


class Windows:
    """Renderings of some of a conversation's messages.

    Args:
        template: of the conversation.
        messages: in the form that the template takes.
    """

    def __init__(self, template: Template, messages: Sequence[Message]) -> None:
        tags = tags_of(template.source)
        self.roles = [str(message["role"]) for message in messages]
        self.bones = [bones_of(message, tags) for message in messages]
        self._added = _added(tags)
        self._exact = template
        self._alike = Template(template.tokenizer, [ANY_TOOL], template.variables) if template.tools else template
        given = json.dumps(
            [dict(template.variables), template.tokenizer.special_tokens_map], sort_keys=True, default=str
        )
        self.key = template.source, given, clock_of(template.tokenizer), bool(template.tools)
        """What the text around any message depends on, whatever the conversation: the template, its arguments, and whether it
        has tools."""

    @cached_property
    def _tools(self) -> str:
        """The conversation's own tools, as a key of what is rendered with them."""
        return json.dumps(self._exact.tools, default=str) if self._exact.tools else ""

    def near(self, stop: int, needed: int) -> list[int]:
        """The numbers of the messages before `stop` that tell how a template goes on there.

        They are the system's at the beginning, and those from a user's message on, with `needed` among them. Where the last
        user's message is far, it is followed by an assistant's turn that is near.
        """
        start = max(min(needed, stop - NEAR), 0)
        while start > 0 and self.roles[start] not in ("user", "assistant"):
            start -= 1
        head = 0
        while head < min(start, 2) and self.roles[head] in ("system", "developer"):
            head += 1
        user = start
        while user > head and self.roles[user] != "user":
            user -= 1
        between = [user] if head <= user < start and self.roles[user] == "user" else []
        return [*range(head), *between, *range(start, stop)]

    def rendered(self, numbers: Sequence[int], generation: bool, exact: bool = False) -> str | None:
        """Rendering of the bones of these messages; None where the template refuses them.

        Args:
            exact: with the conversation's own tools, not with one that stands for them.
        """
        template = self._exact if exact else self._alike
        shapes = tuple(self._added[number] if number < 0 else self.bones[number] for number in numbers)
        tools = self._tools if exact else ""
        key = (*self.key, tools, shapes, generation)
        if key in _KNOWN:
            return _KNOWN[key]
        text = attempt(template, [message_of(shape, place) for place, shape in enumerate(shapes)], generation)
        if len(text or "") + len(tools) + sum(map(len, shapes)) < LONG:
            if len(_KNOWN) >= KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = text
        return text

    def behind(
        self, numbers: Sequence[int], place: Place, generation: bool, up_to_next: bool = False, exact: bool = False
    ) -> str | None:
        """Text behind a place of a part of one of these messages; see `tail`."""
        if place.part.message not in numbers:
            return None
        mark = numbers.index(place.part.message), place.part.last[1]
        return tail(self.rendered(numbers, generation, exact), mark, place.number, up_to_next)

    def before_a_user(self) -> str:
        """Text before a user's message that is the only one."""
        return MARK.split(self.rendered([A_USER], False) or "")[0]

    def behind_a_user(self, generation: bool) -> str | None:
        """Text behind a user's message that is the only one."""
        return tail(self.rendered([A_USER], generation), (0, 1), 0)

    def before_an_answer(self) -> str:
        """Text between the user's message and an answer."""
        return tail(self.rendered([A_USER, AN_ANSWER], False), (0, 1), 0, up_to_next=True) or ""

    def behind_an_answer(self, *following: int) -> str:
        """Text behind an answer to the user's message, up to the message that follows, if any."""
        return tail(self.rendered([A_USER, AN_ANSWER, *following], False), (1, 1), 0, up_to_next=True) or ""

    def shown_last(self, part: Part) -> int:
        """Number of places of a part while its message is the last one."""
        stop = part.message + 1
        for numbers in (self.near(stop, part.message), range(stop)):
            text = self.rendered(numbers, False) or ""
            if places := text.count(written((numbers.index(part.message), part.first[1]))):
                return places
        return 0
