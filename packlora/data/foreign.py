"""Rows as other people write them: under names of their own, in the forms of other tools, as published data sets have them.

It is loaded where a row is not in a form of rows.py at once. Where a row could be read in two ways, it is refused with the key
that decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packlora.data.flags import FIELDS, KINDS
from packlora.data.messages import ROLES
from packlora.data.values import Bad, check_text
from packlora.errors import InputError, quoted, shown


def renamed(value: Any, columns: Mapping[str, str], where: str) -> Any:
    """A row with its fields under their own names.

    Fields that `columns` does not name stay, but for those of another kind of row: where prompt and completion are named, a
    column that happens to be called text is no field.

    Raises:
        InputError: a column is not there, or fields of several kinds are named.
    """
    if not isinstance(value, dict):
        return value
    if missing := next((name for name in columns.values() if name not in value), None):
        key = next(key for key, name in columns.items() if name == missing)
        raise InputError(
            f"{where}: there is no {quoted(missing)}, which data.columns names for {key}; the row has "
            f"{shown(', '.join(map(str, value)) or 'no fields')}"
        )
    named = set(columns) & set(FIELDS)
    kinds = [{*kind, "prompt"} if "chosen" in kind else set(kind) for kind in KINDS]
    fitting = set[str]().union(*(kind for kind in kinds if named <= kind))
    rest = {
        key: own for key, own in value.items() if key not in columns.values() and (key not in FIELDS or key in fitting)
    }
    return rest | {key: value[name] for key, name in columns.items()}


def told_apart(kinds: list[tuple[str, ...]], value: dict[str, Any], pairs: bool) -> list[tuple[str, ...]]:
    """Kinds of a row, without one that only repeats another: Alpaca's `text`, in which the row is rendered, and UltraFeedback's
    `messages`, which are the chosen ones."""
    if kinds == [("text",), ("instruction", "output")]:
        text, parts = value["text"], (value["instruction"], value["output"])
        if isinstance(text, str) and all(isinstance(part, str) and part in text for part in parts):
            return kinds[1:]
    if kinds == [("messages",), ("chosen", "rejected")] and value["messages"] == value["chosen"]:
        return kinds[1:] if pairs else kinds[:1]
    return kinds


def asked(prompt: str, chosen: list[Any], rejected: list[Any]) -> Any:
    """A prompt that is a text beside lists of messages, as in UltraFeedback: None where both lists begin with it, the user's
    message that it is where no user speaks in them; else as it is."""
    if not all(isinstance(one, dict) for one in chosen + rejected):
        return prompt
    said = [[one.get("content") for one in talk if one.get("role") == "user"] for talk in (chosen, rejected)]
    if not any(said):
        return [{"role": "user", "content": prompt}]
    return None if all(texts[:1] == [prompt] for texts in said) else prompt


def of_alpaca(value: dict[str, Any], bad: Bad) -> dict[str, Any]:
    """A row with `prompt` and `completion` of Alpaca's fields."""
    for key in ("instruction", "input", "output"):
        if value.get(key) is not None:
            check_text(value[key], repr(key), bad)
    if value.get("history"):
        raise bad("'history', earlier turns, is not read; write such a row as messages")
    parts = [value["instruction"], value.get("input") or ""]
    prompt = "\n\n".join(part for part in parts if part)
    return value | {"prompt": prompt, "completion": value["output"]}


def of_sharegpt(turns: Any, bad: Bad) -> list[dict[str, Any]]:
    """Messages of ShareGPT's turns; some data sets have messages there."""
    if not isinstance(turns, list) or not turns:
        raise bad("'conversations' must be a list of at least one {from, value}")
    if all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() and "from" not in turn for turn in turns):
        return turns
    out = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            raise bad(f"turn {number} of 'conversations' must be a mapping with from and value")
        role = ROLES.get(turn["from"].strip().lower())
        if role is None:
            raise bad(f"turn {number} is from {quoted(turn['from'])}; known are {', '.join(ROLES)}")
        if "value" not in turn:
            raise bad(f"turn {number} of 'conversations', message {number} ({role}), has no value")
        rest = {key: part for key, part in turn.items() if key not in ("from", "value")}
        out.append(rest | {"role": role, "content": turn["value"]})
    return out


ANSWERS = {"completion", "chosen", "rejected"}
"""Fields that make a row of a prompt."""


def no_kind(value: dict[Any, Any], several: bool) -> str:
    """Text of the error for a row of no kind, or of several."""
    found = shown(", ".join(map(str, value)) or "no fields")
    if several:
        return f"has fields of several kinds ({found}); data.columns says which are meant, as {{prompt: prompt}}"
    if nulls := [key for key in FIELDS if key in value and value[key] is None]:
        return f"found {found}, where {' and '.join(nulls)} is null; a row needs a value there, or must be left out"
    if "prompt" in value and not ANSWERS & value.keys():
        return f"found {found} without a completion, as rows of a job with rollout have it (learning from rewards)"
    if "conversation" in value:
        return f"found {found}: ShareGPT's form has the turns in 'conversations'"
    if len(value) == 2 and all(isinstance(part, str) for part in (*value, *value.values())):
        first, second = map(shown, value)
        return (
            f"found {found}; where {first} is asked and {second} is to be learnt, name them prompt and completion, or set "
            f"data.columns: {{prompt: {first}, completion: {second}}}"
        )
    return f"found {found}" + "; data.columns says which of these are fields of a row" * bool(value)
