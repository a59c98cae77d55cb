"""Tools: Python functions that a model calls by the format of its chat template, as TRL's GRPOTrainer has them.

A function's name, type hints and Google-style docstring become its JSON schema, which the chat template shows to the model. A
call is a JSON object between <tool_call> and </tool_call>, as Hermes, Qwen and SmolLM3 write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from packlora.data.template import Template
from packlora.errors import InputError, reason_of
from packlora.functions import RAISED
from packlora.rl.awaiting import awaited

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
TRIED: dict[str, Any] = {"name": "a_name", "arguments": {"key": "value"}}


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a completion makes. arguments: None where what is written is no call; name is then what is wrong with it."""

    name: str
    arguments: Mapping[str, Any] | None

    @property
    def message(self) -> dict[str, Any]:
        """The call as a message has it."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def calls_of(text: str) -> list[Call]:
    """Calls in a completion, in their order."""
    return [_call(found) for found in CALL.findall(text)]


def _call(text: str) -> Call:
    try:
        value = json.loads(text)
        name, arguments = value["name"], value.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Call(f"the call is no JSON object with a name and arguments: {reason_of(error)}", None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call("the call's name is no text, or its arguments are no JSON object", None)
    return Call(name, arguments)


def message_of(text: str, calls: Sequence[Call]) -> dict[str, Any]:
    """A completion as the assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if proper := [call.message for call in calls if call.arguments is not None]:
        message |= {"content": CALL.sub("", text).strip(), "tool_calls": proper}
    return message


def run_calls(calls: Sequence[Call], tools: Mapping[str, Callable[..., Any]]) -> tuple[list[dict[str, Any]], int]:
    """Messages with the results of calls, and how many have failed. A tool that raises tells the model so, as in TRL."""
    messages, failures = [], 0
    for call in calls:
        try:
            if call.arguments is None:
                raise ValueError(call.name)
            if call.name not in tools:
                raise ValueError(f"Tool {call.name} not found.")
            content = str(awaited(tools[call.name](**call.arguments)))
        except RAISED as error:
            failures += 1
            content = str({"error": str(error)})
        name = "unknown" if call.arguments is None else call.name
        messages.append({"role": "tool", "name": name, "content": content})
    return messages, failures


def schemas_of(tools: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """JSON schemas of tools, for a chat template. Raises InputError where a function lacks type hints or descriptions."""
    out = []
    for name, tool in tools.items():
        try:
            out.append(get_json_schema(tool))
        except Exception as error:  # transformers' own, of several kinds
            raise InputError(
                f"tool {name!r}: {reason_of(error)}; a tool has type hints, and a docstring that describes it and each of its "
                "arguments (Args:)"
            ) from None
    return out


def check_calls_are_read(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Raises InputError where calls as the chat template writes them would not be found in completions."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": TRIED}]},
    ]
    if Call(**TRIED) not in calls_of(Template(tokenizer, None, variables).render(messages)):
        raise InputError(
            "the chat template writes no tool calls, or in a form that is not read here; JSON between <tool_call> and "
            "</tool_call> is read. Use an environment with `step`, or a model with such a template"
        )
