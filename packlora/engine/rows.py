"""A row: a sample on its way into a microbatch, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass

from packlora.data.encode import Sample

NO_ADAPTER = -1
"""Number of the adapter of tokens that see the base model alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A packed sample.

    draw: dropout key (None: no dropout), step and number of the sample, from which everything random is drawn; None in an
        evaluation, which draws nothing.
    """

    sample: Sample
    draw: tuple[int | None, int, int] | None = None
