"""Sizes of microbatches that have CUDA graphs of their own, and what the others are computed by."""

from __future__ import annotations

from collections.abc import Iterable

from packlora.engine.recorded import Shape


class Sizes:
    """When a shape is recorded. A recording takes as long as several microbatches, and tokens of nobody take time as well.

    Args:
        patience: microbatches of a shape that run without a graph before one is recorded.
        lent: tokens of nobody that are computed before a shape has graphs of its own, while its microbatches run by those of a
            larger one that they fill half of. It is recorded after one microbatch without a graph then: it comes often.
    """

    def __init__(self, patience: int, lent: int) -> None:
        self.lent, self._patience = lent, patience
        self._lends = dict[Shape, int]()
        """Tokens of nobody with which a shape has run by the graphs of another."""
        self.recorded = self.padding = 0
        """Shapes that were recorded, and tokens of nobody that were computed, since the start."""

    def choose(self, own: Shape, recorded: Iterable[Shape], tokens: int) -> Shape:
        """The shape by whose graphs so many tokens run now. recorded: those that can."""
        if self._lends.get(own, 0) >= self.lent:
            return own
        best = min(recorded, default=own)
        if best != own:
            self._lends[own] = self._lends.get(own, 0) + best.tokens - tokens
        return best

    def is_due(self, shape: Shape, runs: int) -> bool:
        """Whether a shape is recorded now that has run so often without a graph."""
        return runs >= (min(self._patience, 1) if shape in self._lends else self._patience)

    def forget(self, shape: Shape) -> None:
        """The graphs of a shape are gone."""
        self._lends.pop(shape, None)

    def clear(self) -> None:
        """All graphs are gone."""
        self._lends.clear()
