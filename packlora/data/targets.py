"""Samples whose labels are given beside their tokens: any token at any place, several at a place for soft targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from packlora.config import BUILT_IN
from packlora.config.trainers import trainers
from packlora.data.encode import NO_COLUMNS, Sample
from packlora.data.soft import TOKENS, SoftTargets

NOWHERE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class TargetSample(Sample):
    """Tokens with targets.

    predicting: places [l] of the tokens whose logits predict, ascending; one place may come several times. labels: token ids
    [l] that are predicted there. `is_label` marks the tokens in whose place targets of a row stand, and says nothing where
    targets come from elsewhere.
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

    @property
    def num_learnt(self) -> int:
        """Places with targets."""
        return len(np.unique(self.predicting))

    @property
    def structure(self) -> bytes:  # type: ignore[override]
        """Targets and their places."""
        return self.predicting.tobytes() + self.labels.tobytes()

    def first(self, limit: int) -> TargetSample:
        """Cut the sample to at most `limit` tokens and their targets."""
        kept = self.predicting < limit - 1
        columns = {name: own[kept] if own.shape == kept.shape else own for name, own in self.columns.items()}
        return TargetSample(
            self.ids[:limit], self.is_label[:limit], columns=columns, predicting=self.predicting[kept],
            labels=self.labels[kept],
        )  # fmt: skip


def with_targets(sample: Sample, targets: SoftTargets) -> TargetSample:
    """The sample of a row, up to its last token with targets, with these."""
    return TargetSample(
        sample.ids, sample.is_label, columns={"weights": targets.weights}, predicting=targets.places - 1,
        labels=targets.tokens,
    )  # fmt: skip


def problem_of(targets: SoftTargets, trainer: str, vocabulary: int | None) -> str | None:
    """Why a row's targets are not learnt; None: they are."""
    if not BUILT_IN[trainer].takes_targets:
        taking = " or ".join(trainers(lambda own: own.takes_targets))
        return f"{TOKENS!r} are soft targets, which are learnt by train.trainer: {taking}"
    if vocabulary is not None and (beyond := np.flatnonzero(targets.tokens >= vocabulary)).size:
        at = int(beyond[0])
        token, number = targets.tokens[at], targets.places[at] + 1
        return f"{TOKENS!r} has {token} at number {number}; the model's tokens are 0 to {vocabulary - 1}"
    return None
