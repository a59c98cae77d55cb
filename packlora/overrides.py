"""Overrides of a run file's keys: `--set KEY=VALUE`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from packlora.errors import InputError, kind_of, quoted, shown


def apply(tree: dict[str, Any], override: str, parse: Callable[[str, str], Any]) -> None:
    """Change one key of a tree, in place; jobs are named by their numbers or names.

    Args:
        override: `dotted.key=value`.
        parse: gives the value of a text; its second argument names the place for messages.

    Raises:
        InputError: there is no such place.
    """
    key, sign, value = override.partition("=")
    parts = key.strip().split(".")
    if not sign or not all(parts):
        raise InputError(
            f"--set {quoted(override)}: write it as dotted.key=value, e.g. jobs.0.train.learning_rate=1e-4"
        )
    node: Any = tree
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth]) or "the run file"
        last = depth == len(parts) - 1
        if isinstance(node, list):
            node_key: Any = _job_index(node, part, override)
        elif isinstance(node, dict):
            node_key = part
            if not last:
                node.setdefault(part, {})
        else:
            raise InputError(
                f"--set {quoted(override)}: {shown(here)} is {kind_of(node)} and has no key {quoted(part)}"
            )
        if last:
            node[node_key] = parse(value, f"--set {key}")
        else:
            node[node_key] = node = copy.copy(node[node_key])  # an alias of YAML may be its twin elsewhere


def _job_index(jobs: list[Any], part: str, override: str) -> int:
    names = [job.get("name") if isinstance(job, dict) else None for job in jobs]
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) < len(jobs):
        return int(part)
    known = shown(", ".join(map(str, names)))
    raise InputError(
        f"--set {quoted(override)}: there is no item {quoted(part)}; there are {len(jobs)}, counted from 0: {known}"
    )
