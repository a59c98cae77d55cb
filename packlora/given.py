"""Objects that a Python program hands to a run in the place of what a run file names: rows, a model, a tokenizer, losses.

The run's keys have a text that begins with `memory:` there, and run.json has no more than that text. The objects themselves
are found here while the run is prepared and trained. `packlora.Trainer` hands them over.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

MEMORY = "memory:"
"""Prefix of the keys' texts that stand for an object."""


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows of a job's data.

    kind: the type that they were given as. values: of each row its place, for messages, and its mapping, or the error of a row
    that cannot be read. digest: SHA-256 of what is read of them.
    """

    kind: str
    values: Sequence[tuple[str, Any]]
    digest: str

    @property
    def described(self) -> dict[str, Any]:
        """Description in run.json."""
        return {"kind": self.kind, "rows": len(self.values), "sha256": self.digest}


@dataclass(frozen=True, slots=True)
class Given:
    """Objects of one run. rows: by data path. losses: by train.objective. model, tokenizer: of the base; None: as base_model
    says."""

    rows: Mapping[str, GivenRows] = field(default_factory=dict)
    losses: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    model: Any = None
    tokenizer: Any = None


_NOTHING = Given()
_GIVEN: ContextVar[Given] = ContextVar("given", default=_NOTHING)


def given() -> Given:
    """Objects of the run that this thread prepares or trains; none for a run file."""
    return _GIVEN.get()


@contextmanager
def give(objects: Given) -> Iterator[None]:
    """Hand objects to the run that is prepared and trained in the block."""
    token = _GIVEN.set(objects)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def source_digest(function: Callable[..., Any]) -> str | None:
    """SHA-256 of a function's source; None where Python does not have it."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return None
