"""Layers of each stage, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from packlora.schedule.types import ScheduleError


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
