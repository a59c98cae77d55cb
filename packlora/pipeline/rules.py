"""Rules of the search for a window on a pipeline: groups of jobs that keep all stages at work, the shortest simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from packlora.pipeline.timeline import makespan
from packlora.schedule.cost import CostModel
from packlora.schedule.rules import C, JobShape, Rules, pair_up
from packlora.schedule.types import Microbatch

FILLS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.42, 0.35, 0.29, 0.24, 0.2, 0.16, 0.13, 0.11)
"""Parts of the capacity that are tried: stages wait less where microbatches are smaller and more alike."""
PATIENCE = 3
"""Fills in a row that bring nothing before the search stops."""
SPREADS = 0.25
"""Standard deviations by which a batch is taken to be smaller than its mean (LoRAFusion: k sigma)."""


@dataclass(frozen=True, slots=True)
class StageRules(Rules):
    """Search for the shortest time by the cost of each stage; without a cost, for the fewest slots."""

    stages: int
    cost: CostModel | None

    def groups(self, shapes: Sequence[JobShape], capacity: int) -> list[list[int]]:
        """See Rules. As few as keep each one's batches apart."""
        counts = range(min(2, len(shapes)), len(shapes) + 1)
        tried = [pair_up(shapes, count) for count in counts]
        return next((groups for groups in tried if keeps_apart(groups, shapes, capacity, self.stages)), tried[-1])

    def candidates(self, capacity: int, groups: int, lay_out: Callable[[int, bool], C]) -> Iterator[C]:
        """See Rules."""
        if self.cost is None:
            yield lay_out(capacity, True)
            return
        best, worse, fullest = None, 0, capacity + 1
        for part in FILLS:
            fill = max(int(capacity * part), 1)
            if fill >= fullest:  # nothing was filled so far: the layout would be the same
                continue
            yield (candidate := lay_out(fill, True))
            fullest = candidate.fullest
            if best is None or candidate.score < best:
                best, worse = candidate.score, 0
            else:
                worse += 1
            if worse == PATIENCE:
                break
        if groups > 1:
            yield lay_out(capacity, False)

    def length(self, microbatches: Sequence[Microbatch], slots: int) -> float:
        """See Rules."""
        return float(slots) if self.cost is None else makespan(microbatches, self.cost) * slots / len(microbatches)


def keeps_apart(groups: Sequence[Sequence[int]], shapes: Sequence[JobShape], capacity: int, stages: int) -> bool:
    """The bubble condition: without any one group, the others fill the stages - 1 slots between two of its batches."""
    low = [
        max(sum(shapes[j].batch_tokens - SPREADS * shapes[j].batch_deviation for j in group), 0) / capacity
        for group in groups
    ]
    total = sum(low)
    return all(total - one >= stages - 1 for one in low)
