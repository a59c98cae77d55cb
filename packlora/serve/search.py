"""The search of an owner's sessions: which match, newest first, page by page."""

from __future__ import annotations

import datetime
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from packlora.errors import quoted
from packlora.serve.errors import Refused
from packlora.serve.fields import text_of

PROJECT = "local"
"""The project that all sessions are in."""
REASONS = ("success", "errored", "interrupted")
"""Reasons for which a client ends its session."""
STATUSES = ("active", "client_finished", "failed", "cancelled")
MOST = 1000
"""Most sessions of a page."""
Query = Callable[[sqlite3.Row, Mapping[str, Any]], bool]
"""Whether a session matches, from its row and the body that it was created with."""


def texts_of(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """user_metadata as clients read it: what is no text is JSON."""
    return {key: own if isinstance(own, str) else json.dumps(own) for key, own in (metadata or {}).items()}


def iso(seconds: float) -> str:
    """A time as clients read it. seconds: since 1970."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def status_of(row: sqlite3.Row) -> Mapping[str, Any] | None:
    """Status of a session; None where it was ended for its silence."""
    if row["ended"] is None:
        return {"type": "active"}
    return {"type": "client_finished", "reason": {"type": row["ended"]}} if row["ended"] in REASONS else None


def found_sessions(rows: Sequence[sqlite3.Row], owner: str, body: Mapping[str, Any]) -> tuple[list[sqlite3.Row], Any]:
    """Sessions of a page, and where the next page begins. Raises Refused.

    Args:
        rows: the owner's sessions, newest first.
        body: a SessionSearchRequest.
    """
    queries, limit = list(_queries(owner, body)), _limit(body)
    found: list[sqlite3.Row] = []
    for row in _behind(rows, _mapping(body, "cursor")):
        created = json.loads(row["body"])
        if all(query(row, created) for query in queries):
            if len(found) == limit:
                last = found[-1]
                return found, {"last_created_at": iso(last["created"]), "last_session_id": last["id"]}
            found.append(row)
    return found, None


def _behind(rows: Sequence[sqlite3.Row], cursor: Mapping[str, Any]) -> Sequence[sqlite3.Row]:
    if not cursor:
        return rows
    at = next((at for at, row in enumerate(rows) if row["id"] == cursor.get("last_session_id")), None)
    if at is None:
        raise Refused(f"cursor: {quoted(cursor)} is of no page; give back a next_cursor as it came")
    return rows[at + 1 :]


def _queries(owner: str, body: Mapping[str, Any]) -> Iterator[Query]:
    if (projects := body.get("project_ids")) is not None and (
        not isinstance(projects, list) or PROJECT not in projects
    ):
        raise Refused(f"project_ids: {quoted(projects)}; all sessions are in {PROJECT!r}")
    metadata = _mapping(body, "user_metadata")
    if metadata:
        yield lambda row, created: metadata.items() <= texts_of(created.get("user_metadata")).items()
    wanted, words = text_of(body.get("session_id")), text_of(body.get("display_name")).lower().split()
    if wanted or words:
        yield lambda row, created: row["id"] == wanted or (bool(words) and _is_named(created, words))
    urns = _mapping(body, "owner").get("owner_urns")
    if urns is not None:
        yield lambda row, created: isinstance(urns, list) and owner in urns
    if body.get("statuses") is not None:
        yield _of_status(body["statuses"])


def _is_named(created: Mapping[str, Any], words: Sequence[str]) -> bool:
    return all(word in (created.get("display_name") or "").lower() for word in words)


def _of_status(statuses: Any) -> Query:
    asked = statuses if isinstance(statuses, list) and all(isinstance(own, Mapping) for own in statuses) else [{}]
    if odd := [
        own for own in asked if own.get("type") not in STATUSES or not isinstance(own.get("reasons") or [], list)
    ]:
        raise Refused(f"statuses: {quoted(odd[0])}; types are {', '.join(STATUSES)}, reasons a list")

    def matches(row: sqlite3.Row, created: Mapping[str, Any]) -> bool:
        status = status_of(row)
        return status is not None and any(
            own["type"] == status["type"] and (not own.get("reasons") or row["ended"] in own["reasons"])
            for own in asked
        )

    return matches


def _mapping(body: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    found = body.get(field)
    if found is not None and not isinstance(found, Mapping):
        raise Refused(f"{field}: {quoted(found)} is no object")
    return found or {}


def _limit(body: Mapping[str, Any]) -> int:
    limit = body.get("limit", 50)
    if type(limit) is not int or not 1 <= limit <= MOST:
        raise Refused(f"limit: {quoted(limit)} is no whole number from 1 to {MOST}")
    return limit
