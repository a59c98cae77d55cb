"""Parts of a microbatch: rows that one adapter learns under one objective, before they are packed and after.

A microbatch is a sequence of parts, ordered by adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from packlora.engine.objective import Objective, RowsView, Term
from packlora.engine.objectives.sft.loss import CROSS_ENTROPY
from packlora.engine.rows import Row


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of one adapter under one objective.

    adapter: its number, or rows.NO_ADAPTER.
    weight: factor of each unit's loss in the gradient; a unit is a label or a sample (Objective.unit).
    terms: what the objective is combined with.
    facts: numbers of the global batch that the rows belong to: `units` and `samples`, and those of Objective.facts.
    """

    adapter: int
    rows: Sequence[Row]
    objective: Objective = CROSS_ENTROPY
    weight: float = 1.0
    terms: tuple[Term, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)


Parts = Sequence[Part]


def rows_of(parts: Parts) -> Iterator[Row]:
    """Rows of all parts, in their order."""
    return (row for part in parts for row in part.rows)


def num_tokens(parts: Parts) -> int:
    """Tokens of all rows, without padding."""
    return sum(row.sample.num_tokens for row in rows_of(parts))


@dataclass(frozen=True, slots=True, eq=False)
class PackedPart:
    """Labels of a part in a microbatch. padding: rows behind them that are of no label, which its adapter counts."""

    adapter: int
    objective: Objective
    view: RowsView
    padding: int = 0

    @property
    def num_labels(self) -> int:
        """Labels of its samples."""
        return sum(self.view.lengths)

    @property
    def num_rows(self) -> int:
        """Rows of labels, padding included."""
        return self.num_labels + self.padding
