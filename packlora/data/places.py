"""Search for every part of a conversation in the text that a chat template renders; all parts must be there.

The model would silently neither see nor learn a part that the template does not show. Such a conversation is refused with the
message and its key. Only thoughts may be missing, as templates leave them out of earlier turns.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from packlora.data.marks import Mark, Marker, Message, Part, Place, as_mapping, forms, tags_of, without_marks
from packlora.data.template import EndlessTemplateError, Template
from packlora.data.windows import Windows, attempt
from packlora.errors import InputError, quoted, shown


class NotShownError(InputError):
    """A chat template does not show a part of a message."""


class UntoldError(InputError):
    """Error: the place of a message cannot be determined, because the chat template depends on its words."""


@dataclass(slots=True)
class Placed:
    """A conversation as a template writes it.

    Attributes:
        messages: in the form that the template takes.
        names: of the messages, for what is said of them.
        text: what the template writes.
        marked: the messages with marks.
        parts: of all messages.
        places: of every mark in the text.
    """

    template: Template
    messages: list[Message]
    names: Sequence[str]
    text: str
    marked: list[Message]
    parts: list[Part]
    places: dict[Mark, list[int]] = field(default_factory=dict)
    _windows: Windows | None = None

    @property
    def windows(self) -> Windows:
        if self._windows is None:
            self._windows = Windows(self.template, self.messages)
        return self._windows

    def of(self, part: Part) -> list[tuple[int, int]]:
        """Places of a part."""
        return list(zip(self.places.get(part.first, ()), self.places.get(part.last, ()), strict=False))

    def in_order(self) -> list[list[Place]]:
        """The places of parts in the order of the text, those of one message that follow one another together.

        Of an assistant's part those places count that it has while its turn is the last one: the name of a call may come again
        above its result.
        """
        laid: list[Place] = []
        for part in self.parts:
            found = self.of(part)
            if len(found) > 1 and self.messages[part.message]["role"] == "assistant":
                found = found[: max(self.windows.shown_last(part), 1)]
            laid += [Place(start, stop, part, number) for number, (start, stop) in enumerate(found)]
        laid.sort(key=lambda place: place[:2])
        return [list(group) for _, group in itertools.groupby(laid, key=lambda place: place.part.message)]


def placed(template: Template, messages: list[Message], names: Sequence[str], generation: bool = False) -> Placed:
    """Find every part of a conversation in the text that a template renders.

    Args:
        generation: with what an assistant's turn begins with.

    Raises:
        InputError: the template refuses the conversation, or writes it in another way when its words change.
    """
    tags, parts, marked = tags_of(template.source), [], []
    for number, message in enumerate(messages):
        marker = Marker(number, tags)
        marked.append(marker.message(message))
        parts += marker.parts
    out = Placed(template, messages, names, template.render(messages, generation), marked, parts)
    if parts:
        _find(out, range(len(messages)), generation)
    return out


def _find(out: Placed, numbers: Sequence[int], generation: bool) -> None:
    """Find the parts of some messages: of all at once, and where the template looks at words, of each half by itself."""
    first, stop = numbers[0], numbers[-1] + 1
    mixed = [*out.messages[:first], *out.marked[first:stop], *out.messages[stop:]]
    clean, places = without_marks(attempt(out.template, mixed, generation) or "")
    if clean == out.text:
        out.places |= places
    elif len(numbers) > 1:
        _find(out, numbers[: len(numbers) // 2], generation)
        _find(out, numbers[len(numbers) // 2 :], generation)
    else:
        raise UntoldError(
            f"{out.names[first]}: its place cannot be told, as the chat template writes the conversation in another way when "
            "the words of this message change"
        )


def check_shown(out: Placed, learnt: Iterable[int]) -> set[int]:
    """Check that every part is shown, and one that is learnt in one place only.

    Args:
        learnt: the numbers of messages that are learnt.

    Returns:
        The numbers of the messages with earlier thoughts that the template leaves out.

    Raises:
        NotShownError: a part is not shown.
        InputError: a part is shown twice, or as Python writes it.
    """
    learnt, forgotten = set(learnt), set[int]()
    for part in out.parts:
        found, name = out.of(part), out.names[part.message]
        is_call = part.key.startswith("tool_calls")
        if not found and part.is_thought and part.message + 1 < len(out.messages) and out.windows.shown_last(part):
            forgotten.add(part.message)
        elif not found:
            raise _not_shown(out, part)
        elif len(found) > 1 and part.message in learnt and not is_call:
            raise InputError(f"{name}: the chat template shows its {part.key} in several places")
    return forgotten


def prompt_text(template: Template, messages: list[Message], names: Sequence[str] = ()) -> str:
    """A conversation that the model is to go on with, as a template writes it.

    Args:
        names: of the messages, for what is said of them.

    Raises:
        InputError: the template refuses the conversation, or does not show all of it but earlier thoughts.
    """
    names = names or names_of(messages)
    first: InputError | None = None
    for form in forms(messages, list(names)):
        try:
            check_tools(template, form)
            text = template.render(form, generation=True)
            with contextlib.suppress(UntoldError):  # a template that looks at words: it cannot be told what is shown
                found = placed(template, form, names, generation=True)
                check_calls(found)
                for part in found.parts:
                    if not part.is_thought and not found.of(part):
                        raise _not_shown(found, part)
            return text
        except EndlessTemplateError:
            raise
        except InputError as error:
            first = error if first is None or isinstance(error, NotShownError) else first
    assert first is not None
    raise first


def names_of(messages: Sequence[Message]) -> list[str]:
    """Names of messages for texts of errors, counted from 1."""
    return [f"message {number} ({shown(message['role'])})" for number, message in enumerate(messages, 1)]


def _not_shown(out: Placed, part: Part) -> NotShownError:
    role, key = out.messages[part.message]["role"], part.key
    what = f"thought in {key}" if part.is_thought and key == "content" else key
    remedy = "name the role system" if role == "developer" else "leave it out, or use a model whose template shows it"
    return NotShownError(
        f"{out.names[part.message]}: the chat template does not show its {what}, so the model would not "
        f"{'learn' if role == 'assistant' else 'see'} it; {remedy}"
    )


def check_calls(out: Placed) -> None:
    """Check that arguments are written as JSON: neither as Python writes a mapping, nor as a text in a text.

    Raises:
        InputError: they are not.
    """
    spans: dict[tuple[int, str], tuple[int, int]] = {}
    for part in out.parts:
        for start, stop in out.of(part)[:1] if part.key.endswith(".arguments") else ():
            first, last = spans.get((part.message, part.key), (start, stop))
            spans[part.message, part.key] = min(first, start), max(last, stop)
    for (message, key), (start, stop) in spans.items():
        call = out.messages[message]["tool_calls"][int(key[len("tool_calls[") : key.index("]")])]
        value = call.get("function", call)["arguments"]
        size = len(str(value))
        shown = out.text[max(0, start - size) : stop + size]
        if isinstance(value, dict) and str(value) in shown:
            raise InputError(f"{out.names[message]}: the chat template writes its {key} as Python does, not as JSON")
        if isinstance(value, str) and as_mapping(value) is not value and value.strip() not in shown:
            raise InputError(f"{out.names[message]}: the chat template writes its {key} as a text in a text")


def check_tools(template: Template, messages: list[Message]) -> None:
    """Check that a template shows its tools, if it has some.

    Raises:
        InputError: the template refuses the conversation.
        NotShownError: it writes the same without them, or one of them is missing.
    """
    if not template.tools:
        return
    alone = Template(template.tokenizer, None, template.variables)
    first = next((number for number, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    text = attempt(template, messages[:first])
    if text is None or text == attempt(alone, messages[:first]):
        text = template.render(messages)
        if text == attempt(alone, messages):
            raise NotShownError(
                "the chat template does not show the tools, so the model would not see them; leave 'tools' out, or use a model "
                "whose template shows tools, or a data.chat_template that does"
            )
    for tool in template.tools:
        name = tool.get("function", tool).get("name") if isinstance(tool.get("function", tool), dict) else None
        if isinstance(name, str) and name not in text:
            raise NotShownError(
                f"the chat template does not show the tool {quoted(name)}; tools are {{type: function, function: {{name, "
                "description, parameters}}"
            )


def check_variables(template: Template) -> None:
    """Check that a template knows the variables that it is given.

    Raises:
        NotShownError: its source does not hold the name of one.
    """
    for name in template.variables:
        if not re.search(rf"\b{re.escape(name)}\b", template.source):
            raise NotShownError(
                f"chat_template_kwargs has {quoted(name)}, which the chat template does not use; leave it out"
            )
