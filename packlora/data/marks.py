"""Marks in the parts of messages, by which every part is found in the text that a chat template renders.

A mark is put before and behind the visible text of every part: contents, thoughts, names and arguments of calls. The text stays
where it is, so that a template treats it as it treats the true one, whatever it looks for in it. What it writes without the
marks must be what it writes for the true conversation; then the marks tell exactly where each part is.

A content is cut at the tags that stand in the template's own source, as </think>: a template that knows a tag may move or drop
what is around it, so each piece is marked by itself.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from packlora.data.messages import THOUGHTS
from packlora.errors import InputError, quoted

TAG = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]")
"""Tags at which a template may split a content, if it knows them."""
SALT = f"{secrets.randbelow(10**10):010d}"
"""Random for every process, so that no data holds a mark. Digits: no template takes some for other letters than others."""
MARK = re.compile(rf"zq{SALT}m(\d{{5,}})n(\d{{5,}})z")

DEEPEST = 100
"""Lists and mappings in one another in the arguments of a call: templates go through them by calling themselves."""

Message = dict[str, Any]
Mark = tuple[int, int]
"""Number of a message and of a mark in it."""


def written(mark: Mark) -> str:
    """The text of a mark."""
    return f"{_head(mark[0])}{mark[1]:05d}z"


def _head(message: int) -> str:
    return f"zq{SALT}m{message:05d}n"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a message that a template shows or leaves out as a whole.

    message: its number, from 0. key: where in the message it is. first, last: its marks; the name of an argument has one mark
    behind it. is_thought: a template may leave it out of earlier turns.
    """

    message: int
    key: str
    first: Mark
    last: Mark
    is_thought: bool


class Place(NamedTuple):
    """Place of a part: its first character, the end of its last one, and its index among the places of the same part."""

    start: int
    stop: int
    part: Part
    number: int


class Marker:
    """Marker of one message: it puts marks around the parts.

    Args:
        number: of the message.
        tags: those that the template knows.
        has_words: False leaves the marks alone, without the texts that they are around: the bones of a message.
    """

    def __init__(self, number: int, tags: frozenset[str], has_words: bool = True) -> None:
        self.number, self.tags, self.has_words = number, tags, has_words
        self.parts: list[Part] = []
        self._count = 0

    def message(self, message: Message) -> Message:
        """The message with marks; `parts` then has its parts."""
        is_assistant = message["role"] == "assistant"
        out = dict(message)
        for key in ("content", *THOUGHTS):
            value = message.get(key)
            if isinstance(value, str):
                out[key] = self._text(value, key, key in THOUGHTS, is_assistant)
            elif isinstance(value, list):
                out[key] = [self._block(block, key, is_assistant) for block in value]
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [self._call(call, f"tool_calls[{number}]") for number, call in enumerate(calls)]
        return out

    def _new(self) -> tuple[Mark, str]:
        mark = self.number, self._count
        self._count += 1
        return mark, written(mark)

    def _block(self, block: Any, key: str, is_assistant: bool) -> Any:
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            return block | {"text": self._text(block["text"], key, False, is_assistant)}
        return block

    def _text(self, text: str, key: str, is_thought: bool = False, is_cut: bool = False) -> str:
        """A text with marks around what is visible of each piece between the template's tags.

        Args:
            is_cut: a template may take what is before a tag for a thought.
        """
        edges = [0]
        for match in TAG.finditer(text) if "<" in text or "[" in text else ():
            if match[0] in self.tags:
                edges += match.span()
        edges.append(len(text))
        if not any(text[start:stop].strip() for start, stop in zip(edges[::2], edges[1::2], strict=True)):
            edges = [0, len(text)]  # nothing but tags
        out = []
        for index in range(0, len(edges), 2):
            start, stop = edges[index : index + 2]
            out.append(self._piece(text[start:stop], key, is_thought or (is_cut and stop < len(text))))
            out.append(text[stop : edges[index + 2]] if index + 2 < len(edges) else "")
        return "".join(out)

    def _piece(self, piece: str, key: str, is_thought: bool) -> str:
        core = piece.strip()
        if not core:
            return piece
        (first, before), (last, behind) = self._new(), self._new()
        self.parts.append(Part(self.number, key, first, last, is_thought))
        left = len(piece) - len(piece.lstrip())
        return piece[:left] + before + (core if self.has_words else "") + behind + piece[left + len(core) :]

    def _call(self, call: Message, key: str) -> Message:
        inner = call.get("function", call)
        out = inner | {"name": self._text(inner["name"], f"{key}.name")}
        if inner.get("arguments") is not None:
            out["arguments"] = self._value(inner["arguments"], f"{key}.arguments")
        return call | {"function": out} if "function" in call else out

    def _value(self, value: Any, key: str) -> Any:
        """Argument with marks around its texts and after its names. A number has no room for one."""
        if isinstance(value, str):
            return self._text(value, key)
        if isinstance(value, list):
            return [self._value(item, key) for item in value]
        if isinstance(value, dict):
            return {self._name(name, value, key): self._value(item, key) for name, item in value.items()}
        return value

    def _name(self, name: str, among: dict[str, Any], key: str) -> str:
        """Name with a mark after it, so that a template that sorts names keeps their order."""
        if not isinstance(name, str) or any(_goes_on(name, other) for other in among):
            return name  # sorted, the mark might come behind what the other goes on with
        last, mark = self._new()
        self.parts.append(Part(self.number, key, last, last, False))
        return name + mark


def _goes_on(name: str, other: Any) -> bool:
    return other != name and str(other).lower().startswith(name.lower())


@lru_cache
def tags_of(source: str) -> frozenset[str]:
    """The tags that a chat template knows."""
    return frozenset(TAG.findall(source))


def bones_of(message: Message, tags: frozenset[str]) -> str:
    """The shape of a message: the JSON of it with marks alone. Messages of one shape are written alike but for their words."""
    return json.dumps(Marker(0, tags, has_words=False).message(message), ensure_ascii=False, default=str)


def message_of(bones: str, number: int) -> Message:
    """The message that bones are the shape of, with the marks of another number."""
    made: Message = json.loads(bones.replace(_head(0), _head(number)))
    return made


def without_marks(text: str) -> tuple[str, dict[Mark, list[int]]]:
    """A text without its marks, and the places of each in it."""
    pieces: list[str] = []
    places: dict[Mark, list[int]] = {}
    end = size = 0
    for match in MARK.finditer(text):
        pieces.append(text[end : match.start()])
        size += len(pieces[-1])
        end = match.end()
        places.setdefault((int(match[1]), int(match[2])), []).append(size)
    return "".join([*pieces, text[end:]]), places


def forms(messages: list[Message], names: list[str]) -> Iterator[list[Message]]:
    """A conversation as templates want it: with the arguments of calls as mappings, and else as JSON texts.

    Keys that hold nothing are left out, as some templates look only whether a key is there.

    Args:
        names: of the messages, for what is said of them.
    """
    said = list(map(_plain, messages))
    for message, name in zip(said, names, strict=True):
        _check_calls(message, name)
    yield [_with_calls(message, as_mapping) for message in said]
    if any("tool_calls" in message for message in said):
        yield [_with_calls(message, _as_text) for message in said]


def _plain(message: Message) -> Message:
    out = {key: value for key, value in message.items() if key != "weight"}
    for key in ("tool_calls", *THOUGHTS):
        if key in out and not (out[key].strip() if isinstance(out[key], str) else out[key]):
            del out[key]
    thoughts = [key for key in THOUGHTS if key in out]
    for key in thoughts[1:]:  # transformers fills these from the first
        if out[key] == out[thoughts[0]]:
            del out[key]
    out["content"] = "" if out.get("content") is None else out["content"]
    return out


def _check_calls(message: Message, name: str) -> None:
    """Raises InputError where a call has no name, or arguments that cannot be written as JSON."""
    for number, call in enumerate(message.get("tool_calls", ())):
        inner = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"].strip():
            raise InputError(f"{name}: tool_calls[{number}] is {quoted(call)}; a call is a mapping with a name")
        value = as_mapping(inner.get("arguments"))
        if _depth(value) > DEEPEST:
            raise InputError(
                f"{name}: tool_calls[{number}] has lists or mappings more than {DEEPEST} deep in one another"
            )
        try:
            json.dumps([inner["name"], value], ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}: tool_calls[{number}] cannot be written as JSON: {error}") from None


def _depth(value: Any) -> int:
    """Depth of nested lists and mappings."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, list | dict)]:
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
        depth += 1
    return depth


def _with_calls(message: Message, form: Any) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        inner = call.get("function", call)
        if inner.get("arguments") is not None:
            inner = inner | {"arguments": form(inner["arguments"])}
        calls.append(call | {"function": inner} if "function" in call else inner)
    return message | {"tool_calls": calls}


def as_mapping(value: Any) -> Any:
    """Mapping that a text holds as JSON; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value or "{}")
    except (ValueError, RecursionError):
        return value
    return read if isinstance(read, dict) else value


def _as_text(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
