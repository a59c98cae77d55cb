"""Samples on their way into a microbatch, as tests write them, and the parts that they are packed as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from packlora.data.encode import Sample
from packlora.engine.objective import Term
from packlora.engine.objectives.balance import Balance
from packlora.engine.objectives.neftune import Neftune
from packlora.engine.objectives.smoothing import LabelSmoothing
from packlora.engine.parts import Part
from packlora.engine.rows import Row


@dataclass(frozen=True, eq=False)
class PackedSample:
    """A sample of an adapter that learns the cross entropy of its labels.

    noise: key and alpha of NEFTune's. balance: share of its load-balancing loss in the sum of its adapter's losses.
    """

    owner: int
    sample: Sample
    number: int
    step: int
    dropout_key: int | None
    smoothing: float = 0.0
    noise: tuple[int, float] | None = None
    balance: float = 0.0

    @property
    def row(self) -> Row:
        return Row(self.sample, (self.dropout_key, self.step, self.number))

    @property
    def terms(self) -> tuple[Term, ...]:
        found: list[Term] = [LabelSmoothing(self.smoothing)] if self.smoothing else []
        found += [Neftune(*self.noise)] if self.noise is not None else []
        return tuple(found + ([Balance(self.balance)] if self.balance else []))


def parts(samples: Sequence[PackedSample], weights: np.ndarray | None = None) -> list[Part]:
    """Samples, which come ordered by owner, as parts. weights: by owner, of each label's loss in the gradient; None: 1."""
    out = []
    for (owner, *_), own in groupby(samples, lambda item: (item.owner, item.smoothing, item.noise, item.balance)):
        items = list(own)
        weight, facts = 1.0 if weights is None else float(weights[owner]), {"units": 1, "samples": 1}
        out.append(Part(owner, [item.row for item in items], weight=weight, terms=items[0].terms, facts=facts))
    return out
