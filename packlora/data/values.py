"""Checks of values that rows and their parts share: JSON texts, texts, lists of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from packlora.errors import InputError, kind_of, quoted

Bad = Callable[[str], InputError]
"""Makes the error of a problem."""


class _TwiceError(Exception):
    """Error: a JSON object has a key twice, and it is unclear which value counts."""


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


def unpacked(value: Any, what: str, bad: Bad) -> Any:
    """Value, or the result of decoding it where it is a text of JSON, as tables store lists and mappings. An empty text is
    none."""
    if not isinstance(value, str):
        return value
    return parse_json(value, lambda text, _: bad(f"the text in {what}: {text}")) if value.strip() else None


def holds_something(value: Any) -> bool:
    """Whether a key says anything: tables have all keys in all rows."""
    return not (value is None or value is False or value in ("", 0) or (isinstance(value, list | dict) and not value))


def check_text(value: Any, what: str, bad: Bad) -> None:
    """Raises an error where a value is no text."""
    if not isinstance(value, str):
        raise bad(f"{what} must be a text, found {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell such a thing, e.g. "\\ud800"
        raise bad(f"{what} holds half of a surrogate pair at character {error.start + 1}") from None


def check_parts(value: Any, what: str, bad: Bad) -> None:
    """Raises an error where something in a value has no place in JSON: half of a surrogate pair, or no number."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            check_text(part, f"a text in {what}", bad)
        elif isinstance(part, float) and not math.isfinite(part):
            raise bad(f"{what} has the number {part}, which JSON does not have")
        elif isinstance(part, dict):
            left += [*part, *part.values()]
        elif isinstance(part, list):
            left += part


def integers(value: Any, what: str, least: int, bad: Bad) -> np.ndarray:
    """A list of whole numbers, [T] int64."""
    if not isinstance(value, list) or not value:
        raise bad(f"{what} must be a list of at least one number")
    for number, one in enumerate(value, 1):
        if isinstance(one, bool) or not isinstance(one, int) or not least <= one < 2**31:
            raise bad(f"{what} has {quoted(one)} at number {number}; only whole numbers from {least} are accepted")
    return np.array(value, np.int64)
