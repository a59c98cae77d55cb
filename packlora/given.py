"""Objects that a Python program hands to a run in the place of what a run file names: rows, a model, a tokenizer, losses.

The run's keys have a text that begins with `memory:` there, and run.json has no more than that text. The objects themselves
are found here while the run is prepared and trained. `packlora.Trainer` hands them over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Given:
    """Objects of one run. rows: by data path. losses: functions with SHA-256 of their source, by train.objective. model,
    tokenizer: of the base; None: as base_model says. See api/borrowed.py, Borrowed."""

    rows: Mapping[str, GivenRows] = field(default_factory=dict)
    losses: Mapping[str, tuple[Any, str | None]] = field(default_factory=dict)
    model: Any = None
    tokenizer: Any = None


_NOTHING = Given()
GIVEN: ContextVar[Given] = ContextVar("given", default=_NOTHING)
"""Set while a run of objects is prepared and trained."""


def given() -> Given:
    """Objects of the run that this thread prepares or trains; none for a run file."""
    return GIVEN.get()
