"""Dynamic sampling (DAPO): groups that teach nothing give their places in a step to groups of further prompts.

The prompts of a step and those that come after them are numbered through: the k-th group that a step draws has the k-th of
these prompts and random numbers of its own, so that what is drawn depends on the rewards of earlier groups of the step alone.
Further prompts come in an order of their own for each step, and so shift no other step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packlora.rl.drawing import Drawn
from packlora.rl.refilled import Refilled
from packlora.rl.rewards import Judged


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities [l] of each completion's tokens: by the trainer, and where asked for by the base model, to which the
    divergence is counted, and by the teacher."""

    own: list[np.ndarray]
    base: list[np.ndarray] | None
    teacher: list[np.ndarray] | None


@dataclass(frozen=True, slots=True)
class Found:
    """Groups that were drawn, judged and scored. totals: sums of rewards [G] by group, NaN for no reward."""

    drawn: Drawn
    judged: list[Judged]
    totals: list[np.ndarray]
    scores: Scores

    def teaches(self, group: int) -> bool:
        """Whether the rewards of a group are there and differ."""
        there = self.totals[group][~np.isnan(self.totals[group])]
        return self.judged[group].lost is None and bool((there != there[:1]).any())

    def put(self, place: int, other: Found, group: int) -> None:
        """Put a group of another draw in a place."""
        own, more, size = self.drawn, other.drawn, self.drawn.size
        own.prompts[place] = more.prompts[group]
        self.judged[place], self.totals[place] = other.judged[group], other.totals[group]
        to, source = (slice(at * size, (at + 1) * size) for at in (place, group))
        own.talks[to] = more.talks[source]
        for mine, others in zip(_lists(self.scores), _lists(other.scores), strict=True):
            mine[to] = others[source]


def _lists(scores: Scores) -> list[list[np.ndarray]]:
    return [one for one in (scores.own, scores.base, scores.teacher) if one is not None]


class Refill:
    """Refilling of a step.

    Args:
        first: its own groups, which others replace.
        most: rounds at most.
    """

    def __init__(self, first: Found, most: int) -> None:
        self.first, self._most = first, most
        self.numbers = list(range(len(first.totals)))
        """Number of the drawn group that stands in each place."""
        self.rounds, self.drawn = 0, len(first.totals)
        self._open = [place for place in self.numbers if not first.teaches(place)]

    def wanted(self) -> int:
        """Groups that the next round draws; 0: there is none."""
        return len(self._open) if self.rounds < self._most else 0

    def told(self) -> Refilled:
        """Record of the refilling so far."""
        return Refilled(self.rounds, self.drawn, len(self._open), self.numbers)

    def take(self, found: Found) -> None:
        """Put the groups of a round that teach something in the places that are open."""
        for group in range(len(found.totals)):
            if found.teaches(group):
                place = self._open.pop(0)
                self.first.put(place, found, group)
                self.numbers[place] = self.drawn + group
        self.first.drawn.seconds += found.drawn.seconds
        self.rounds, self.drawn = self.rounds + 1, self.drawn + len(found.totals)
