"""Conversations as rows hold them: roles, contents, calls of tools, and which turns are learnt.

What other tools write differently becomes one form, `weight` for their flags and `tool_calls` for `function_call`, or is
refused by its name: a key that is passed over would be learnt, or not be, without a word.
"""

from __future__ import annotations

from typing import Any

from packlora.data.values import Bad, check_parts, check_text, holds_something, parse_json, unpacked
from packlora.errors import kind_of, quoted, shown

ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "human": "user", "gpt": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
}  # fmt: skip
"""Roles under the names that chat templates use, by the names found in data. Most templates would render an unknown name as a
turn without a role."""
CALL_ROLES = {
    "function_call": "the assistant, with tool_calls", "tool_call": "the assistant, with tool_calls",
    "observation": "tool", "tool_response": "tool",
}  # fmt: skip
"""Roles of LLaMA-Factory and ms-swift, with what stands for them here."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message has its reasoning, in the order in which transformers takes the first that is there."""
WEIGHT = "weight"
FLAGS = ("loss", "train", "training", "trainable", "loss_mask", "loss_scale", "loss_weight")
"""Keys by which ms-swift, Axolotl, verl and others say whether a turn is learnt: true and false, or 1 and 0."""
PARTS_LEARNT = (
    "which parts of a turn are learnt cannot be said here; a turn is learnt whole or, with weight: 0, not at all"
)
_BLOCKS = "write images as blocks {type: image, path} of the content, or as the row's images"
_ONLY_IMAGES = "of texts and images alone a model is trained here"
ELSEWHERE = ("arguments", "parameters", "args", "input", "kwargs", "params")
"""Keys of a call, or of the mapping around it, under which other tools have its arguments."""
UNREAD = {
    "train_detail": PARTS_LEARNT, "training_detail": PARTS_LEARNT, "mask": "say by weight: 0 that a turn is not learnt",
    "masked": "say by weight: 0 that a turn is not learnt",
    "channel": "write thoughts as reasoning_content, and what the assistant says as its content",
    "images": _BLOCKS, "image": _BLOCKS, "videos": _ONLY_IMAGES, "video": _ONLY_IMAGES, "audios": _ONLY_IMAGES,
    "audio": _ONLY_IMAGES, "refusal": "write what the assistant says as its content",
}  # fmt: skip
"""Keys of a message that are refused where they hold something, with what to do."""


def check_messages(messages: Any, bad: Bad) -> list[dict[str, Any]]:
    """A row's conversation, in which the weight of a turn, 0 or 1, says whether it is learnt."""
    if not isinstance(messages, list) or not messages:
        raise bad("'messages' must be a list of at least one {role, content}")
    return [_message(message, number, bad) for number, message in enumerate(messages, 1)]


def _message(message: Any, number: int, bad: Bad) -> dict[str, Any]:
    if isinstance(message, dict) and {"from", "value"} <= message.keys():
        raise bad(
            f"message {number} has from and value, which is ShareGPT's form; write role (user for human, assistant for gpt) "
            "and content"
        )
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"].strip():
        raise bad(f"message {number} must be a mapping with a role and a content")
    role, where = message["role"], f"message {number} ({shown(message['role'])})"
    if role != (usual := ROLES.get(role.strip().lower(), role)):
        raise bad(f"message {number} has the role {quoted(role)}; chat templates call it {usual}")
    if usual := CALL_ROLES.get(role):
        raise bad(f"message {number} has the role {quoted(role)}; write it as a message of {usual}")
    for key, remedy in UNREAD.items():
        if holds_something(message.get(key)):
            raise bad(f"{where} has {key!r}, which is not read; {remedy}")
    message = _with_calls(_newer(message, where, bad), where, bad)
    alone = ("tool_calls", *THOUGHTS)
    if message.get("content") is None and any(map(message.get, alone)):  # OpenAI's form of a turn that only calls
        message = message | {"content": ""}
    content, what = message.get("content"), f"the content of {where}"
    for text in [block.get("text", "") for block in content] if isinstance(content, list) else [content]:
        check_text(text, what, bad)
    for key in THOUGHTS:
        if holds_something(message.get(key)):
            check_text(message[key], f"the {key} of {where}", bad)
    check_parts([message.get(key) for key in ("tool_calls", "name", "tool_call_id")], where, bad)
    return _weighed(message, where, bad)


# --- which turns are learnt -----------------------------------------------------------------------------------------------


def _weighed(message: dict[str, Any], where: str, bad: Bad) -> dict[str, Any]:
    """A message with `weight` in the place of all flags that say whether it is learnt."""
    said = {key: message[key] for key in (WEIGHT, *FLAGS) if message.get(key) is not None}
    for key, value in said.items():
        if isinstance(value, bool) and key != WEIGHT:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in (0, 1):
            accepted = "0 (not learnt) and 1" if key == WEIGHT else "true and false, or 1 and 0,"
            raise bad(f"{where} has the {key} {quoted(value)}; only {accepted} are accepted")
    if len(set(map(bool, said.values()))) > 1:
        both = " and ".join(f"{key} {quoted(value)}" for key, value in said.items())
        raise bad(f"{where} has {both}, of which one says that it is learnt and one that it is not; leave one of them")
    first = next(iter(said.items()), None)
    if first is not None and first[1] and message["role"] != "assistant":
        raise bad(
            f"{where} has the {first[0]} {quoted(first[1])}, but only turns of the assistant are learnt; give 0 or none"
        )
    rest = {key: value for key, value in message.items() if key != WEIGHT and key not in FLAGS}
    return rest | {WEIGHT: int(bool(first[1]))} if first is not None else rest


def last_alone(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation of which at most the last turn of the assistant is learnt."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return [message | {WEIGHT: 0} if n in turns[:-1] else message for n, message in enumerate(messages)]


# --- tools and calls ---------------------------------------------------------------------------------------------------------


def check_tools(row: dict[str, Any], bad: Bad) -> list[Any] | None:
    """The tools of a row: a list of mappings, or JSON of one, as tables hold it. OpenAI's older `functions` become tools."""
    found = dict[str, list[Any]]()
    for key in ("tools", "functions"):
        listed: Any = unpacked(row.get(key), repr(key), bad)
        if not holds_something(listed) and not isinstance(listed, dict):
            continue
        tools = [_mapping(tool, key, bad) for tool in listed] if isinstance(listed, list) else [None]
        if not all(isinstance(tool, dict) and tool for tool in tools):
            raise bad(f"{key!r} must be a list of mappings, each the JSON schema of a function")
        check_parts(tools, repr(key), bad)
        found[key] = tools
    if len(found) == 2:
        raise bad("'functions' is an older form of 'tools'; give one of them")
    if "functions" in found:
        return [one if "function" in one else {"type": "function", "function": one} for one in found["functions"]]
    return found.get("tools")


def _mapping(tool: Any, key: str, bad: Bad) -> Any:
    return unpacked(tool, repr(key), bad) if isinstance(tool, str) and tool.lstrip().startswith("{") else tool


def check_nulls(messages: list[dict[str, Any]], tools: list[Any], bad: Bad) -> None:
    """Raise an error for a null that is no value: tables have the keys of all rows in each, and tools that write them as texts
    leave null in a row for the properties of other tools."""
    known = dict[str, dict[str, Any]]()
    for tool in tools:
        inner = tool.get("function", tool)
        schema = inner.get("parameters") if isinstance(inner, dict) else None
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if not isinstance(schema, dict) or not isinstance(properties, dict) or not isinstance(inner.get("name"), str):
            continue
        if (key := next((key for key, own in properties.items() if own is None), None)) is not None:
            raise bad(f"the tool {quoted(inner['name'])} has null for its property {quoted(key)}; leave that out")
        if not schema.get("additionalProperties"):
            known[inner["name"]] = properties
    for number, message in enumerate(messages, 1):
        for function in (call["function"] for call in message.get("tool_calls", ())):
            given, own = unpacked(function["arguments"], "arguments", bad) or {}, known.get(function["name"])
            if own is not None and (key := next((k for k in given if given[k] is None and k not in own), None)):
                raise bad(
                    f"message {number} ({shown(message['role'])}) calls {quoted(function['name'])} with null for "
                    f"{quoted(key)}, which the tool does not have; leave that out"
                )


def check_single_calls(messages: list[dict[str, Any]], bad: Bad) -> None:
    """Raises an error where a turn has several calls, though the row says parallel_tool_calls: false."""
    for number, message in enumerate(messages, 1):
        if len(message.get("tool_calls", ())) > 1:
            raise bad(
                f"message {number} ({shown(message['role'])}) has {len(message['tool_calls'])} tool_calls, but the row says "
                "parallel_tool_calls: false; leave that out, or write one call a turn"
            )


def _newer(message: dict[str, Any], where: str, bad: Bad) -> dict[str, Any]:
    """A message in which OpenAI's older forms, `function_call` and the role `function`, are those of today."""
    if message["role"] == "function":
        message = message | {"role": "tool"}
    if "function_call" not in message:
        return message
    call = unpacked(message["function_call"], f"the function_call of {where}", bad)
    message = {key: value for key, value in message.items() if key != "function_call"}
    if not holds_something(call):
        return message
    if holds_something(message.get("tool_calls")):
        raise bad(f"{where} has function_call, an older form of tool_calls, and tool_calls; give one of them")
    return message | {"tool_calls": [{"type": "function", "function": call}]}


def _with_calls(message: dict[str, Any], where: str, bad: Bad) -> dict[str, Any]:
    """A message with its calls as a list of {function: {name, arguments}}; without the key where it calls nothing.

    Arguments stay as they are, a mapping or the JSON of one; what a chat template wants is template.py's.
    """
    if "tool_calls" not in message:
        return message
    calls = unpacked(message["tool_calls"], f"the tool_calls of {where}", bad)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if not holds_something(calls):
        return rest
    if not isinstance(calls, list):
        raise bad(f"the tool_calls of {where} must be a list, found {kind_of(calls)}")
    if message["role"] != "assistant":
        raise bad(f"{where} has tool_calls, but only the assistant calls tools")
    return rest | {"tool_calls": [_call(call, f"call {n} of {where}", bad) for n, call in enumerate(calls, 1)]}


def _call(call: Any, what: str, bad: Bad) -> dict[str, Any]:
    call = unpacked(call, what, bad)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise bad(
            f"{what} must be {{function: {{name, arguments}}}} with the name of the function, found {quoted(call)}"
        )
    check_text(function["name"], f"the name of {what}", bad)
    given = function.get("arguments")
    for key in ELSEWHERE if given is None else ():
        if any(holds_something(part.get(key)) for part in (call, function)):
            raise bad(f"{what} has {key!r} and no arguments beside its name; write {{function: {{name, arguments}}}}")
    arguments = {} if given is None or given == "" else given
    if isinstance(arguments, str):
        arguments = parse_json(arguments, lambda text, _: bad(f"the arguments of {what}: {text}"))
    if not isinstance(arguments, dict):
        raise bad(f"the arguments of {what} must be a mapping or the JSON of one, found {quoted(given)}")
    check_parts(arguments, f"the arguments of {what}", bad)
    function = function | {"arguments": given if isinstance(given, str) and given else arguments}
    return call | {"function": function} if "function" in call else {"type": "function", "function": function}
