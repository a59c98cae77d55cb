"""Read rows from jsonl, json, parquet or a Hugging Face data set, each with the place it came from.

Owns file formats and the check that a row is one of the three accepted kinds. What the text becomes is encode.py's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packlora.errors import InputError, quoted, shown
from packlora.terminal import Told, silent

FORMATS = "rows are {prompt, completion}, {messages} or {text}"
ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "human": "user", "gpt": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
}  # fmt: skip
"""What chat templates call the roles that go by these names. Under another name most would take a turn for one of nobody."""
FILE_KINDS = {".jsonl", ".json", ".parquet"}


@dataclass(frozen=True, slots=True)
class Row:
    """One sample as text. Exactly one of the three kinds is filled."""

    where: str
    """File and line (or row number), for error messages."""
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    """A message's weight, 0 or 1, says whether an assistant turn is learnt; it is no part of what the template is given."""
    text: str | None = None
    tools: list[Any] | None = None
    """What the assistant of `messages` may call, for the chat template."""


def read_rows(path: str, job: str, told: Told = silent) -> list[Row]:
    """All rows of a data file or data set, checked.

    Args:
        path: of the file, or the id of a Hugging Face data set.
        job: name for messages.
        told: hears how far it is.

    Raises:
        InputError: the file is missing, empty, unreadable or malformed, or a row lacks the fields it needs; the message
            names the job, the file and the line.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise InputError(
            f"job {job!r}: data path {path} is an address; download the file and give the path of the copy, or give the id "
            "of a Hugging Face data set"
        )
    if os.path.isdir(path):
        raise InputError(f"job {job!r}: data path {path} is a folder; give a .jsonl, .json or .parquet file")
    file = Path(path)
    rows = []
    for where, value in _read_file(file, job) if is_file_name(path) else _read_hub(path, job):
        rows.append(_check(value, where, job))
        told(f"job {job}: reading {file.name}, rows", len(rows))
    if not rows:
        raise InputError(f"job {job!r}: {path} has no rows")
    return rows


def is_file_name(path: str) -> bool:
    """Whether a data path means a file here, which may be missing, and not a data set of the hub."""
    return os.path.lexists(path) or Path(path).suffix in FILE_KINDS | {".txt", ".csv"}


def _read_file(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    if not os.path.exists(file):
        raise InputError(f"job {job!r}: the data file {file} does not exist")
    if file.suffix not in FILE_KINDS:
        raise InputError(f"job {job!r}: {file} ends in {file.suffix!r}; accepted are .jsonl, .json and .parquet")
    if not os.path.isfile(file):
        raise InputError(f"job {job!r}: {file} is a pipe, a socket or a device; a data file is read more than once")
    try:
        if file.suffix == ".jsonl":
            yield from _read_jsonl(file, job)
        elif file.suffix == ".json":
            yield from _read_json(file, job)
        else:
            yield from _read_parquet(file, job)
    except OSError as error:
        raise InputError(f"job {job!r}: cannot read {file}: {error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"job {job!r}: {file} is not UTF-8 text: {error}") from None


class _TwiceError(Exception):
    """A key that a JSON object has twice; which of the values counts, nobody knows."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(next(key for key in keys if keys.count(key) > 1))
    return out


def _parse(text: str, bad: Callable[[str, int | None], InputError]) -> Any:
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


def _read_jsonl(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{file}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise InputError(f"job {job!r}: {where}: not UTF-8 text: {error}") from None
            if line:
                yield where, _parse(line, _at(job, where))


def _at(job: str, where: str) -> Callable[[str, int | None], InputError]:
    """Makes the errors of one line of a file."""
    return lambda text, _: InputError(f"job {job!r}: {where}: {text}")


def _read_json(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    def bad(text: str, line: int | None) -> InputError:
        return InputError(f"job {job!r}: {file}" + (f", line {line}" if line else "") + f": {text}")

    rows = _parse(file.read_text(encoding="utf-8-sig"), bad)
    if not isinstance(rows, list):
        raise InputError(f"job {job!r}: {file} must hold a list of rows; found {type(rows).__name__}")
    for number, value in enumerate(rows, 1):
        yield f"{file}, row {number}", value


def _read_parquet(file: Path, job: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowException as error:
        raise InputError(f"job {job!r}: cannot read {file} as parquet: {error}") from None
    for number, value in enumerate(table.to_pylist(), 1):
        yield f"{file}, row {number}", _without_nulls(value)


def _read_hub(name: str, job: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise InputError(
            f"job {job!r}: {name} is not a file here; to read it as a Hugging Face data set, "
            "install the extra: pip install 'packlora[datasets]'"
        ) from None
    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:  # the library raises many unrelated types for "not there"
        raise InputError(f"job {job!r}: {name} is neither a file nor a data set that loads: {error}") from None
    for number, value in enumerate(rows, 1):
        yield f"{name}, row {number}", _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    """A row of a table, in which every mapping has the keys of all others, with those gone that its file did not have."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _check(value: Any, where: str, job: str) -> Row:
    def bad(problem: str) -> InputError:
        return InputError(f"job {job!r}: {where}: {problem}; {FORMATS}")

    if not isinstance(value, dict):
        raise bad(f"a row must be a mapping, found {type(value).__name__}")
    has = {key for key in ("prompt", "completion", "messages", "text") if value.get(key) is not None}
    kinds = [kind for kind in ({"prompt", "completion"}, {"messages"}, {"text"}) if kind <= has]
    if len(kinds) != 1:
        raise bad(_no_kind(value, several=bool(kinds)))
    tools = _check_tools(value, bad) if value.get("tools") else None
    if kinds[0] == {"messages"}:
        if "functions" in value:
            raise bad("'functions' is an older form of 'tools'; write it as tools")
        return Row(where, messages=_check_messages(value["messages"], bad), tools=tools)
    if tools:
        raise bad("'tools' go with messages, as they are shown to the model by the chat template")
    for key in kinds[0]:
        _check_text(value[key], repr(key), bad)
    if kinds[0] == {"text"}:
        return Row(where, text=value["text"])
    return Row(where, prompt=value["prompt"], completion=value["completion"])


def _no_kind(value: dict[Any, Any], several: bool) -> str:
    """What to say of a row that is of no kind, or of several."""
    found = shown(", ".join(map(str, value)) or "no fields")
    if several:
        return f"has fields of several kinds ({found})"
    if nulls := [key for key in ("prompt", "completion", "messages", "text") if key in value and value[key] is None]:
        return f"found {found}, where {' and '.join(nulls)} is null; a row needs a text there, or must be left out"
    if "conversations" in value or "conversation" in value:
        return (
            f"found {found}: ShareGPT's form; write it as messages, with role for from (user for human, assistant for gpt) and "
            "content for value"
        )
    if {"instruction", "output"} <= value.keys():
        return f"found {found}: Alpaca's form; write instruction and input as the prompt, and output as the completion"
    return f"found {found}"


def _check_tools(row: dict[str, Any], bad: Any) -> list[Any]:
    """The tools of a row: a list of mappings, or JSON of one, as tables hold it."""
    tools = row["tools"]
    if isinstance(tools, str):
        tools = _parse(tools, lambda text, _: bad(f"the text in 'tools': {text}"))
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad("'tools' must be a list of mappings, each the JSON schema of a function")
    return tools


def _check_messages(messages: Any, bad: Any) -> list[dict[str, Any]]:
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
        _check_text(message.get("content"), f"the content of message {number} ({shown(role)})", bad)
        _check_weight(message, number, bad)
        out.append(message)
    return out


def _check_weight(message: dict[str, Any], number: int, bad: Any) -> None:
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


def _check_text(value: Any, what: str, bad: Any) -> None:
    if not isinstance(value, str):
        raise bad(f"{what} must be a text, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell such a thing, e.g. "\\ud800"
        raise bad(f"{what} holds half of a surrogate pair at character {error.start + 1}") from None
