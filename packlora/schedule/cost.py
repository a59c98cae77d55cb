"""How long a microbatch takes on a pipeline stage: an affine function of its tokens and of the squares of its lengths."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from packlora.schedule.types import Microbatch, ScheduleError


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds (or any unit) of a forward over all layers, and how they are spread over the stages.

    per_token: all layers, linear in tokens. per_token_squared: attention, times the sum of length^2 of the samples.
    fixed: per microbatch. head_per_token: output layer and loss, on the last stage. backward_ratio: backward of the layers
    over their forward; head_backward_ratio: the same of the head. stage_shares: part of the layers on each stage; sums to 1.
    """

    per_token: float = 1.0
    per_token_squared: float = 0.0
    fixed: float = 0.0
    head_per_token: float = 0.0
    backward_ratio: float = 1.0
    stage_shares: tuple[float, ...] = (1.0,)
    head_backward_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not self.stage_shares or abs(sum(self.stage_shares) - 1) > 1e-6 or min(self.stage_shares) < 0:
            raise ScheduleError(f"cost model: stage_shares {self.stage_shares} must be 0 or more and sum to 1")

    @property
    def stages(self) -> int:
        return len(self.stage_shares)

    def layers(self, microbatch: Microbatch) -> float:
        """Forward of all layers, without the head; 0 for a no-op."""
        if microbatch.is_noop:
            return 0.0
        tokens = squares = 0
        for placed in microbatch.samples:
            tokens += placed.length
            squares += placed.length * placed.length
        return self.per_token * tokens + self.per_token_squared * squares + self.fixed

    def both(self, microbatch: Microbatch, stage: int) -> tuple[float, float]:
        """Forward and backward of a microbatch on a stage."""
        body = self.layers(microbatch) * self.stage_shares[stage]
        head = self.head_per_token * microbatch.num_tokens if stage == len(self.stage_shares) - 1 else 0.0
        return body + head, body * self.backward_ratio + head * self.head_backward_ratio


def balance(stages: int, layers: int, head_in_layers: float = 0.0, costs: Sequence[float] = ()) -> tuple[int, ...]:
    """Layers per stage with the shortest slowest stage, the last stage also holding a head that costs so many layers.

    Args:
        costs: of each layer, 1 on average; empty: all cost as much.

    Raises:
        ScheduleError: fewer layers than stages.
    """
    if stages < 1 or layers < stages:
        raise ScheduleError(f"{layers} layers cannot be cut into {stages} stages; each stage needs at least one layer")
    if stages == 1:
        return (layers,)
    if len(set(costs)) > 1:
        return _of_unlike(stages, costs, head_in_layers)
    others = stages - 1

    def slowest(last: int) -> tuple[float, int]:
        return max(-(-(layers - last) // others), last + head_in_layers), -last

    last = min(range(1, layers - others + 1), key=slowest)
    each, more = divmod(layers - last, others)
    return (*(each + (stage < more) for stage in range(others)), last)


def _of_unlike(stages: int, costs: Sequence[float], head: float) -> tuple[int, ...]:
    """Layers per stage with the shortest slowest stage, where layers differ in cost."""
    until = [0.0, *accumulate(costs)]

    def filled(most: float) -> tuple[int, ...] | None:
        """Every stage as full as `most` allows, and one layer left for each of those behind it."""
        ends = [0]
        for stage in range(1, stages):
            last = len(costs) - (stages - stage)
            ends.append(min(bisect_right(until, until[ends[-1]] + most) - 1, last))
            if ends[-1] == ends[-2]:
                return None
        ends.append(len(costs))
        fits = until[-1] - until[ends[-2]] + head <= most
        return tuple(end - start for start, end in pairwise(ends)) if fits else None

    low, high = 0.0, until[-1] + head
    found = filled(high)
    for _ in range(40):
        middle = (low + high) / 2
        tried = filled(middle)
        low, high, found = (middle, high, found) if tried is None else (low, middle, tried)
    assert found is not None
    return found
