"""Fields of JSON bodies, checked: refusals name the field, what was found and what is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packlora.errors import quoted
from packlora.serve.errors import Refused
from packlora.serve.journal import as_json


def text_of(value: Any) -> str:
    """An id as a request has it; what is no text is the id of nothing."""
    return value if isinstance(value, str) else ""


def number_of(body: Mapping[str, Any], field: str, low: int) -> int:
    """A whole number of a request. Raises Refused."""
    value = body.get(field)
    if type(value) is not int or not low <= value < 2**62:
        raise Refused(f"{field}: {quoted(value)} is no whole number from {low} on")
    return value


def seconds_of(body: Mapping[str, Any], field: str = "ttl_seconds") -> int | None:
    """Seconds for which something is kept; None: for good. Raises Refused."""
    value = body.get(field)
    if value is not None and (type(value) is not int or not 1 <= value < 2**31):
        raise Refused(f"{field}: {quoted(value)} is no whole number of seconds, 1 to {2**31 - 1}")
    return value


def check_switches(body: Mapping[str, Any], *fields: str) -> None:
    """Raises Refused where one that is given is neither true nor false."""
    for field in fields:
        if body.get(field) not in (None, True, False) or type(body.get(field)) in (int, float):
            raise Refused(f"{field}: {quoted(body[field])} is neither true nor false")


def checked_seq(value: Any) -> int:
    """Number of a request of a model. Raises Refused."""
    return number_of({"seq_id": value}, "seq_id", 1)


def metadata_of(body: Mapping[str, Any], most: int) -> Mapping[str, Any]:
    """user_metadata of a request. Raises Refused."""
    found = body.get("user_metadata")
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise Refused(f"user_metadata: {quoted(found)} is no object")
    if len(as_json(found)) > most:
        raise Refused(f"user_metadata: {len(as_json(found))} bytes, above the limit metadata_bytes of {most}")
    return found
