"""What a row of data may be: prompts and completions, conversations, plain texts, token ids, and the forms of other tools.

    {prompt, completion}            texts, or lists of messages (TRL's conversational form), of which the completion is learnt
    {messages}                      a conversation, of which the assistant's turns are learnt
    {conversations}                 ShareGPT's: from and value in the place of role and content
    {instruction, input, output}    Alpaca's: a prompt of one or two paragraphs, and its completion
    {text}                          of which everything is learnt
    {input_ids, labels}             tokens, of which those are learnt whose label is not -100
    {prompt, chosen, rejected}      TRL's preferences, texts or lists of messages; the prompt may be what both begin with
    {prompt, completion, label}     TRL's judged completions

A conversation or a prompt may come with `system`, a message of the system, and with `images` (images.py), of two
completions those of the prompt; a conversation with `tools`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from packlora.data.images import with_images
from packlora.data.pairs import halves
from packlora.errors import InputError, quoted, shown

FORMATS = (
    "rows are {prompt, completion}, {messages}, {text}, {input_ids, labels}, {conversations}, {instruction, output} or "
    "{prompt, chosen, rejected}"
)
ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "human": "user", "gpt": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
}  # fmt: skip
"""What chat templates call the roles that go by these names. Under another name most would take a turn for one of nobody."""
KINDS: tuple[tuple[str, ...], ...] = (
    ("prompt", "completion"), ("messages",), ("text",), ("input_ids",), ("conversations",), ("instruction", "output"),
    ("chosen", "rejected"),
)  # fmt: skip
"""Fields that a row of each kind has; of two kinds at once it is none."""
FIELDS = (
    "prompt", "completion", "messages", "text", "input_ids", "conversations", "instruction", "output", "chosen", "rejected",
)  # fmt: skip
KEYS = frozenset({
    *FIELDS, "input", "history", "system", "tools", "functions", "images", "image", "label", "labels", "attention_mask",
    "conversation",
})  # fmt: skip
"""All that is looked at in a row. Others are notes of whoever made the data."""
UNLEARNT = -100
"""The label of a token that is not learnt."""
SHAREGPT = "ShareGPT's conversations (from, value), read as messages"
ALPACA = (
    "Alpaca's instructions, read as prompts (instruction, and input as a second paragraph) and completions (output)"
)

Bad = Callable[[str], InputError]


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. Exactly one of the kinds is filled: prompt and completion, messages, text, ids and is_label, or pair."""

    where: str
    """File and line (or row number), for error messages."""
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    """A message's weight, 0 or 1, says whether an assistant turn is learnt; it is no part of what the template is given."""
    text: str | None = None
    tools: list[Any] | None = None
    """What the assistant of `messages` may call, for the chat template."""
    system: str | None = None
    """A message of the system before a prompt."""
    ids: np.ndarray | None = None
    """Token ids [T], int32."""
    is_label: np.ndarray | None = None
    """Which of them are learnt [T], bool."""
    form: str | None = None
    """That of another tool, in words, that the row was written in."""
    pair: tuple[Row, Row] | None = None
    """The prompt with the chosen and with the rejected completion."""
    label: Any = None
    """What the row says of its completion under `label`, unchecked."""
    images: tuple[str, ...] = ()
    """Paths of the blocks {"type": "image"} in `messages`, in their order; a message that has some is a list of blocks."""


class _TwiceError(Exception):
    """A key that a JSON object has twice; which of the values counts, nobody knows."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(next(key for key in keys if keys.count(key) > 1))
    return out


def parse_json(text: str, bad: Callable[[str, int | None], InputError]) -> Any:
    """JSON in which every key stands once. bad: makes the error of a problem and its line, where that is known."""
    try:
        return json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        raise bad(f"not valid JSON: {error.msg} (column {error.colno})", error.lineno) from None
    except _TwiceError as error:
        raise bad(f"the key {quoted(error.args[0])} stands twice in one mapping", None) from None
    except RecursionError:
        raise bad("lists or mappings are nested too deep in one another to be read", None) from None
    except ValueError as error:  # e.g. a number of thousands of digits
        raise bad(f"not valid JSON: {error}", None) from None


def check_row(value: Any, where: str, job: str, folder: str | None = None) -> Row:
    """The row that a value of a data file is. folder: where its images are. Raises InputError where it is none."""

    def bad(problem: str) -> InputError:
        return InputError(f"job {job!r}: {where}: {problem}; {FORMATS}")

    if not isinstance(value, dict):
        raise bad(f"a row must be a mapping, found {type(value).__name__}")
    has = {key for key in FIELDS if value.get(key) is not None}
    kinds = [kind for kind in KINDS if has.issuperset(kind)]
    if len(kinds) != 1:
        raise bad(_no_kind(value, several=bool(kinds)))
    (kind,) = kinds
    if kind == ("input_ids",):
        return _tokens(value, where, bad)
    if kind == ("chosen", "rejected"):
        chosen, rejected = halves(value, bad)
        pair = (
            check_row(chosen, f"{where}, chosen", job, folder),
            check_row(rejected, f"{where}, rejected", job, folder),
        )
        return Row(where, pair=pair)
    label = value.get("label")
    if kind == ("instruction", "output"):
        value, form = _of_alpaca(value, bad), ALPACA
    elif kind == ("conversations",):
        value, form = value | {"messages": _of_sharegpt(value["conversations"], bad)}, SHAREGPT
    else:
        form = None
    if isinstance(value.get("prompt"), list) and isinstance(value.get("completion"), list):
        value = value | {"messages": _conversational(value["prompt"], value["completion"], bad)}
    value, images = with_images(value, folder, bad)
    tools = _check_tools(value, bad) if value.get("tools") else None
    system = value.get("system") or None
    if system is not None:
        _check_text(system, "'system'", bad)
    if "messages" in value and value["messages"] is not None:
        if "functions" in value:
            raise bad("'functions' is an older form of 'tools'; write it as tools")
        messages = _check_messages(value["messages"], bad)
        return Row(where, messages=with_system(messages, system), tools=tools, form=form, label=label, images=images)
    if tools:
        raise bad("'tools' go with messages, as they are shown to the model by the chat template")
    if kind == ("text",):
        if system is not None:
            raise bad("'system' goes with a prompt or messages, as it is shown to the model by the chat template")
        _check_text(value["text"], "'text'", bad)
        return Row(where, text=value["text"])
    for key in ("prompt", "completion"):
        _check_text(value[key], repr(key), bad)
    prompt, completion = value["prompt"], value["completion"]
    return Row(where, prompt=prompt, completion=completion, system=system, form=form, label=label)


def with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """A conversation with a message of the system, unless it has one."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _tokens(value: dict[str, Any], where: str, bad: Bad) -> Row:
    """A row of token ids; without labels all of them are learnt, as of a text."""
    ids = _integers(value["input_ids"], "'input_ids'", 0, bad)
    is_label = np.ones(len(ids), bool)
    if value.get("labels") is not None:
        labels = _integers(value["labels"], "'labels'", UNLEARNT, bad)
        if len(labels) != len(ids):
            raise bad(f"'labels' has {len(labels)} numbers, 'input_ids' {len(ids)}; there is one for each token")
        is_label = labels != UNLEARNT
        if (odd := np.flatnonzero(is_label & (labels != ids))).size:
            at = int(odd[0])
            raise bad(
                f"'labels' has {labels[at]} where 'input_ids' has {ids[at]}, at number {at + 1}; a label is its own token, "
                f"which is not shifted here, or {UNLEARNT}"
            )
    if (
        value.get("attention_mask") is not None
        and (_integers(value["attention_mask"], "'attention_mask'", 0, bad) != 1).any()
    ):
        raise bad("'attention_mask' has other numbers than 1; leave the padding out")
    return Row(where, ids=ids.astype(np.int32), is_label=is_label)


def _integers(value: Any, what: str, least: int, bad: Bad) -> np.ndarray:
    """[T] int64"""
    if not isinstance(value, list) or not value:
        raise bad(f"{what} must be a list of at least one number")
    for number, one in enumerate(value, 1):
        if isinstance(one, bool) or not isinstance(one, int) or not least <= one < 2**31:
            raise bad(f"{what} has {quoted(one)} at number {number}; only whole numbers from {least} are accepted")
    return np.array(value, np.int64)


def _of_alpaca(value: dict[str, Any], bad: Bad) -> dict[str, Any]:
    for key in ("instruction", "input", "output"):
        if value.get(key) is not None:
            _check_text(value[key], repr(key), bad)
    if value.get("history"):
        raise bad("'history', earlier turns, is not read; write such a row as messages")
    parts = [value["instruction"], value.get("input") or ""]
    prompt = "\n\n".join(part for part in parts if part)
    return {"prompt": prompt, "completion": value["output"], "system": value.get("system"), "tools": value.get("tools")}


def _of_sharegpt(turns: Any, bad: Bad) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise bad("'conversations' must be a list of at least one {from, value}")
    out = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str) or "value" not in turn:
            raise bad(f"turn {number} of 'conversations' must be a mapping with from and value")
        role = ROLES.get(turn["from"].strip().lower())
        if role is None:
            raise bad(f"turn {number} is from {quoted(turn['from'])}; known are {', '.join(ROLES)}")
        out.append({"role": role, "content": turn["value"]} | ({"weight": turn["weight"]} if "weight" in turn else {}))
    return out


def _conversational(prompt: list[Any], completion: list[Any], bad: Bad) -> list[Any]:
    """TRL's form: of a conversation in two parts the turns of the second are learnt."""
    if not completion:
        raise bad("'completion' must be a list of at least one {role, content}")
    for number, message in enumerate(prompt, 1):
        if isinstance(message, dict) and message.get("weight") not in (None, 0):
            raise bad(
                f"message {number} of 'prompt' has the weight {quoted(message['weight'])}, but a prompt is not learnt"
            )
    return [message | {"weight": 0} if isinstance(message, dict) else message for message in prompt] + completion


def _no_kind(value: dict[Any, Any], several: bool) -> str:
    """What to say of a row that is of no kind, or of several."""
    found = shown(", ".join(map(str, value)) or "no fields")
    if several:
        return f"has fields of several kinds ({found})"
    if nulls := [key for key in FIELDS if key in value and value[key] is None]:
        return f"found {found}, where {' and '.join(nulls)} is null; a row needs a value there, or must be left out"
    if "conversation" in value:
        return f"found {found}: ShareGPT's form has the turns in 'conversations'"
    if len(value) == 2 and all(isinstance(part, str) for part in (*value, *value.values())):
        first, second = map(shown, value)
        return f"found {found}; where {first} is asked and {second} is to be learnt, name them prompt and completion"
    return f"found {found}"


def _check_tools(row: dict[str, Any], bad: Bad) -> list[Any]:
    """The tools of a row: a list of mappings, or JSON of one, as tables hold it."""
    tools = row["tools"]
    if isinstance(tools, str):
        tools = parse_json(tools, lambda text, _: bad(f"the text in 'tools': {text}"))
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad("'tools' must be a list of mappings, each the JSON schema of a function")
    return tools


def _check_messages(messages: Any, bad: Bad) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise bad("'messages' must be a list of at least one {role, content}")
    out = []
    for number, message in enumerate(messages, 1):
        if isinstance(message, dict) and {"from", "value"} <= message.keys():
            raise bad(
                f"message {number} has from and value, which is ShareGPT's form; write role (user for human, assistant for "
                "gpt) and content"
            )
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad(f"message {number} must be a mapping with a role and a content")
        role = message["role"]
        if role != (usual := ROLES.get(role.strip().lower(), role)):
            raise bad(f"message {number} has the role {quoted(role)}; chat templates call it {usual}")
        if message.get("content") is None and message.get("tool_calls"):  # as OpenAI writes a turn that only calls
            message = message | {"content": ""}
        content, what = message.get("content"), f"the content of message {number} ({shown(role)})"
        for text in [block.get("text", "") for block in content] if isinstance(content, list) else [content]:
            _check_text(text, what, bad)
        _check_weight(message, number, bad)
        out.append(message)
    return out


def _check_weight(message: dict[str, Any], number: int, bad: Bad) -> None:
    weight, role = message.get("weight"), message["role"]
    if weight is None:
        return
    if isinstance(weight, bool) or weight not in (0, 1):
        raise bad(
            f"message {number} ({shown(role)}) has the weight {quoted(weight)}; only 0 (not learnt) and 1 are accepted"
        )
    if weight == 1 and role != "assistant":
        raise bad(
            f"message {number} ({shown(role)}) has the weight 1, but only turns of the assistant are learnt; give 0 or none"
        )


def _check_text(value: Any, what: str, bad: Bad) -> None:
    if not isinstance(value, str):
        raise bad(f"{what} must be a text, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell such a thing, e.g. "\\ud800"
        raise bad(f"{what} holds half of a surrogate pair at character {error.start + 1}") from None
