"""Label smoothing: a share of every label that all words of the vocabulary have in equal parts.

The loss of a label grows by share * (logit of the label - mean of all logits), which the output layer adds: it is no function
of the label's log-probability alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from packlora.engine.objective import SMOOTHING, Column, Term
from packlora.engine.rows import Row


class LabelSmoothing(Term):
    """Smoothing by the same share of every label."""

    columns = MappingProxyType({SMOOTHING: Column("label")})

    def __init__(self, share: float) -> None:
        self.of_label = share

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """The share of each label [L]."""
        return {SMOOTHING: np.full(sum(row.sample.num_labels for row in rows), self.of_label)}
