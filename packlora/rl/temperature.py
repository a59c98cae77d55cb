"""Temperature: log-probabilities of labels are those of logits that are divided by it, as a sampler draws with.

The output layer divides; an objective then sees the log-probabilities of the tempered distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from packlora.engine.objective import COOLING, Column, Term
from packlora.engine.rows import Row


class Temperature(Term):
    """One temperature for every label."""

    columns = MappingProxyType({COOLING: Column("label")})

    def __init__(self, temperature: float) -> None:
        self.factor = 1.0 / temperature

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """The factor of each label [L]."""
        return {COOLING: np.full(sum(row.sample.num_labels for row in rows), self.factor)}
