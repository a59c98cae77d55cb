"""Formats of a row of data: prompts and completions, conversations, plain texts, token ids, and the forms of other tools.

    {prompt, completion}            texts, or lists of messages (TRL's conversational form), of which the completion is learnt
    {messages}                      a conversation, of which the assistant's turns are learnt
    {conversations}                 ShareGPT's: from and value in the place of role and content
    {instruction, input, output}    Alpaca's: a prompt of one or two paragraphs, and its completion
    {text}                          of which everything is learnt
    {input_ids, labels}             tokens, of which those are learnt whose label is not -100; or with soft targets (soft.py)
    {prompt, chosen, rejected}      TRL's preferences, texts or lists of messages; the prompt may be what both begin with
    {prompt, completion, label}     TRL's judged completions

A conversation or a prompt may come with `system`, a message of the system, and with `images` (images/rows.py), of two
completions those of the prompt; a conversation with `tools`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from packlora.data import flags
from packlora.data.flags import FIELDS, KINDS, MASKS, PACKED, TARGETS
from packlora.data.values import Bad, check_text, holds_something
from packlora.errors import InputError, kind_of, quoted

FORMATS = (
    "rows are {prompt, completion}, {messages}, {text}, {input_ids, labels}, {conversations}, {instruction, output} or "
    "{prompt, chosen, rejected}"
)
KEYS = frozenset({
    *FIELDS, "input", "history", "system", "tools", "functions", "images", "image", "label", "labels", "attention_mask",
    "conversation", *MASKS, *PACKED, *TARGETS, *flags.KEYS,
})  # fmt: skip
"""Fields of a row that are read; other fields are the author's own notes."""
SHAREGPT = "ShareGPT's conversations (from, value), read as messages"
ALPACA = (
    "Alpaca's instructions, read as prompts (instruction, and input as a second paragraph) and completions (output)"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. Exactly one of the kinds is filled: prompt and completion, messages, text, ids and is_label, or pair."""

    where: str
    """File and line (or row number), for error messages."""
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    """Messages; a message's weight, 0 or 1, says whether an assistant turn is learnt, and is not passed to the template."""
    text: str | None = None
    tools: list[Any] | None = None
    """Tools that the assistant of `messages` may call, for the chat template."""
    system: str | None = None
    """A message of the system before a prompt or a conversation that has none."""
    ids: np.ndarray | None = None
    """Token ids [T], int32."""
    is_label: np.ndarray | None = None
    """Mask of the tokens that are learnt, bool [T]."""
    targets: Any = None
    """Their soft.SoftTargets, if they have some."""
    form: str | None = None
    """Name of the other tool's form in which the row was written."""
    pair: tuple[Row, Row] | None = None
    """The prompt with the chosen and with the rejected completion."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template beside the messages."""
    label: Any = None
    """Value of the field `label` for the row's completion, unchecked."""
    files: tuple[str, ...] = ()
    """Paths of the files that blocks of `messages` show beside texts, in their order; a message that has some is a list of
    blocks."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the row, and `label`, unchecked: columns of a loss that reads fields, see with_fields."""


@dataclass(frozen=True, slots=True)
class How:
    """Settings by which a source is read.

    columns: by field of a row, the column that holds it. fields: rows keep their other fields. pairs: see check_row. subset,
    split: of a data set.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    fields: bool = False
    pairs: bool = False
    subset: str | None = None
    split: str | None = None

    def reads(self, name: str) -> bool:
        """Whether a row may be made of a column."""
        return name in KEYS or name in self.columns.values()


def check_row(value: Any, where: str, job: str, folder: str | None = None, pairs: bool = False) -> Row:
    """The row that a value of a data file is.

    Args:
        folder: where its files are.
        pairs: of a row that is a pair, and a conversation which repeats the chosen one, the pair is read.

    Raises:
        InputError: it is none.
    """

    def odd(problem: str) -> InputError:
        return InputError(f"job {job!r}: {where}: {problem}")

    def bad(problem: str) -> InputError:
        return odd(f"{problem}; {FORMATS}")

    if not isinstance(value, dict):
        raise bad(f"a row must be a mapping, found {kind_of(value)}")
    has = {key for key in FIELDS if value.get(key) is not None}
    kinds = [kind for kind in KINDS if has.issuperset(kind)]
    if len(kinds) != 1:
        from packlora.data.foreign import no_kind, told_apart

        kinds = told_apart(kinds, value, pairs)
        if len(kinds) != 1:
            raise bad(no_kind(value, several=bool(kinds)))
    (kind,) = kinds
    flags.check_flags(value, odd)
    if kind == ("input_ids",):
        flags.check_no_conversation(value, "token ids", odd)
        from packlora.data.token_ids import tokens_of

        return Row(where, **tokens_of(value, bad))
    for key in (*MASKS, *TARGETS):
        if holds_something(value.get(key)):
            raise odd(
                f"{key!r} goes with 'input_ids', one entry for each token; of messages say by weight what is learnt"
            )
    if kind == ("text",):
        return _text(value, where, bad, odd)
    if kind == ("chosen", "rejected"):
        from packlora.data.pairs import halves

        halved = zip(halves(value, bad), ("chosen", "rejected"), strict=True)
        chosen, rejected = (check_row(half, f"{where}, {name}", job, folder) for half, name in halved)
        return Row(where, pair=(chosen, rejected))
    return _conversation(value, kind, where, bad, folder)


def with_fields(row: Row, value: Mapping[str, Any]) -> Row:
    """A row with the fields of its value that it is not made of, and `label`."""
    return replace(row, fields={key: value[key] for key in value.keys() - KEYS | (value.keys() & {"label"})})


def _text(value: dict[str, Any], where: str, bad: Bad, odd: Bad) -> Row:
    flags.check_no_conversation(value, "a text", odd)
    check_text(value["text"], "'text'", bad)
    return Row(where, text=value["text"])


def _conversation(value: dict[str, Any], kind: tuple[str, ...], where: str, bad: Bad, folder: str | None) -> Row:
    """A row of messages, or of a prompt and a completion."""
    from packlora.data.messages import check_messages, check_nulls, check_single_calls, check_tools, last_alone

    form = None
    if kind in (("instruction", "output"), ("conversations",)):
        from packlora.data.foreign import of_alpaca, of_sharegpt

        if kind == ("conversations",):
            value, form = value | {"messages": of_sharegpt(value["conversations"], bad)}, SHAREGPT
        else:
            value, form = of_alpaca(value, bad), ALPACA
    if isinstance(value.get("prompt"), list) and isinstance(value.get("completion"), list):
        value = value | {"messages": _conversational(value["prompt"], value["completion"], bad)}
    files: tuple[str, ...] = ()
    if _shows_more(value):
        from packlora.modality import plugin

        value, files = plugin().with_images(value, folder, bad)
    tools, variables, system = check_tools(value, bad), flags.variables(value, bad), value.get("system") or None
    if system is not None:
        check_text(system, "'system'", bad)
    label = value.get("label")
    if value.get("messages") is None:
        if tools:
            raise bad("'tools' go with messages, as they are shown to the model by the chat template")
        for key in ("prompt", "completion"):
            check_text(value[key], repr(key), bad)
        prompt, completion = value["prompt"], value["completion"]
        return Row(where, prompt, completion, system=system, form=form, variables=variables, label=label)
    messages = check_messages(value["messages"], bad)
    if system is not None and messages[0]["role"] == "system" and messages[0]["content"] != system:
        raise bad("the row has a 'system' and a message of the system that says something else; leave one of them")
    check_nulls(messages, tools or [], bad)
    if value.get(flags.LAST):
        messages = last_alone(messages)
    if value.get(flags.SINGLE) is False:
        check_single_calls(messages, bad)
    return Row(
        where, messages=messages, tools=tools, system=system, form=form, variables=variables, label=label, files=files
    )  # fmt: skip


def _shows_more(value: dict[str, Any]) -> bool:
    """Whether a row has images, or a message in blocks."""
    messages = value.get("messages")
    some = messages if isinstance(messages, list) else []
    in_blocks = any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in some)
    return in_blocks or value.get("images") is not None or value.get("image") is not None


def with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """A conversation with a message of the system, unless it has one."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _is_call(messages: list[Any]) -> bool:
    """Whether messages are a call of tools and its results, which may come again, as where a tool is asked until it is done."""
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    return len(roles) > 1 and roles[0] == "assistant" and set(roles[1:]) == {"tool"}


def _conversational(prompt: list[Any], completion: list[Any], bad: Bad) -> list[Any]:
    """TRL's form: of a conversation in two parts the turns of the second are learnt."""
    from packlora.data.messages import FLAGS, WEIGHT

    if not completion:
        raise bad("'completion' must be a list of at least one {role, content}")
    again = (prompt[-count:] for count in range(1, len(prompt) + 1) if completion[:count] == prompt[-count:])
    if not all(map(_is_call, again)):
        raise bad(
            "the completion begins with the messages of the prompt, so the model would see them twice; leave them out"
        )
    for number, message in enumerate(prompt, 1):
        for key in (WEIGHT, *FLAGS) if isinstance(message, dict) else ():
            if message.get(key) not in (None, 0):
                raise bad(
                    f"message {number} of 'prompt' has the {key} {quoted(message[key])}, but a prompt is not learnt"
                )
    return [message | {"weight": 0} if isinstance(message, dict) else message for message in prompt] + completion
