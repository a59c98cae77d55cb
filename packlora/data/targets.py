"""Samples whose labels are given beside their tokens: any token at any place, several at a place for soft targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from packlora.data.encode import NO_COLUMNS, Sample

NOWHERE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class TargetSample(Sample):
    """Tokens with targets.

    predicting: places [l] of the tokens whose logits predict, ascending; one place may come several times. labels: token ids
    [l] that are predicted there. The base class' `is_label` says nothing here.
    """

    predicting: np.ndarray = field(default_factory=lambda: NOWHERE)
    labels: np.ndarray = field(default_factory=lambda: NOWHERE)

    @staticmethod
    def of(
        ids: np.ndarray, predicting: np.ndarray, labels: np.ndarray, columns: Mapping[str, np.ndarray] = NO_COLUMNS
    ) -> TargetSample:
        """A sample of tokens [T], places [l], targets [l] and columns, [] or [l] float64 each."""
        none = np.zeros(len(ids), bool)
        return TargetSample(
            ids.astype(np.int32), none, columns=columns,
            predicting=predicting.astype(np.int64), labels=labels.astype(np.int64),
        )  # fmt: skip

    @property
    def num_labels(self) -> int:
        """Targets."""
        return len(self.labels)
