"""The strongest bound on the number of bins that is still cheap: the linear program over all ways to fill one bin.

Gilmore and Gomory (1961): min sum x_p over patterns p such that every sample is in sum x_p >= 1 patterns. Patterns are made as
they are needed, by knapsacks over the dual prices. Rounded up, its optimum hardly ever differs from the fewest bins. At any
time, prices scaled down to those of the best pattern give a bound already (Farley 1990), so it stops as soon as that proves
what was found to be best. The patterns made for the bound are also what good packings are made of: an integer program chooses
among them. The open bin is a bin that costs nothing, takes `room` tokens of the samples that are allowed in it, and is there
once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

ROUNDS = 300
"""Rounds in which new patterns are made."""
AT_ONCE = 6
"""New patterns without a common length that are made for the same prices."""
SAFETY = 1e-6
"""Floating-point error that a bound is taken down by before it is rounded up."""

Class = tuple[int, bool]
"""Samples that are alike: their length, and whether they are allowed in the open bin."""


@dataclass(slots=True)
class Patterns:
    """counts: samples per class. bins, opened: patterns of a new and of the open bin. bound: no packing has fewer new bins."""

    classes: list[Class]
    counts: list[int]
    capacity: int
    room: int
    bins: list[list[int]] = field(default_factory=list)
    opened: list[list[int]] = field(default_factory=list)
    bound: int = 0


def make_patterns(
    lengths: Sequence[int], allowed: Sequence[bool], capacity: int, room: int, enough: int, end: float
) -> Patterns:
    """Patterns for samples none of which is above the capacity, and a lower bound of the number of new bins.

    Args:
        lengths, allowed: of each sample.
        capacity, room: tokens of a new and of the open bin.
        enough: the search stops when this bound is reached.
        end: and at this time (time.monotonic).
    """
    from scipy.optimize import linprog

    keys = [(length, may and length <= room) for length, may in zip(lengths, allowed, strict=True)]
    classes = sorted(set(keys), reverse=True)
    made = Patterns(classes, [keys.count(key) for key in classes], capacity, room)
    made.bins = _first_patterns(made)
    counts = np.array(made.counts, dtype=float)
    for _ in range(ROUNDS):
        table = np.array(made.bins + made.opened, dtype=float).T
        once = np.array([[0.0] * len(made.bins) + [1.0] * len(made.opened)])
        cost = 1.0 - once[0]
        result = linprog(cost, A_ub=np.vstack([-table, once]), b_ub=np.append(-counts, 1.0), method="highs-ds")
        if result.status != 0:
            return made
        prices = np.maximum(-result.ineqlin.marginals[:-1], 0.0)
        paid = max(-float(result.ineqlin.marginals[-1]), 0.0)
        value, pattern = _best_pattern(made, prices, False)
        worth, other = _best_pattern(made, prices, True) if room > 0 else (0.0, [])
        # Prices over the best pattern's are feasible for the dual, with the open bin's best pattern as its price.
        proved = (float(prices @ counts) - worth) / max(value, 1.0)
        made.bound = max(made.bound, math.ceil(proved - SAFETY))
        more = value > 1 + 1e-9
        left = prices.copy()
        for _ in range(AT_ONCE):
            if value <= 1 + 1e-9:
                break
            made.bins.append(pattern)
            left[[count > 0 for count in pattern]] = 0.0  # another one, of other samples
            value, pattern = _best_pattern(made, left, False)
        if worth > paid + 1e-9:
            made.opened.append(other)
            more = True
        if made.bound >= enough or not more or time.monotonic() > end:
            break
    return made


def choose_patterns(
    made: Patterns, below: int, node_limit: int, end: float
) -> tuple[list[Class], list[list[Class]]] | None:
    """The open bin and fewer than `below` new ones, or None where the patterns and the limits allow none."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    left = end - time.monotonic()
    if left <= 0:
        return None
    table = np.array(made.bins + made.opened, dtype=float).T
    new = np.array([1.0] * len(made.bins) + [0.0] * len(made.opened))
    result = milp(
        new,
        integrality=np.ones(len(new)),
        bounds=Bounds(0, max(made.counts)),
        constraints=[
            LinearConstraint(table, np.array(made.counts, dtype=float), np.inf),
            LinearConstraint(np.vstack([new, 1 - new]), [made.bound, 0], [below - 1, 1]),
        ],
        options={"node_limit": node_limit, "time_limit": left},
    )
    if result.x is None or time.monotonic() >= end:
        return None
    waiting = dict(zip(made.classes, made.counts, strict=True))

    def fill(pattern: list[int]) -> list[Class]:
        content = []
        for key, count in zip(made.classes, pattern, strict=True):
            taken = min(count, waiting[key])
            waiting[key] -= taken
            content += [key] * taken
        return content

    times = np.rint(result.x).astype(int).tolist()
    opened: list[Class] = []
    for pattern, count in zip(made.opened, times[len(made.bins) :], strict=True):
        if count:
            opened = fill(pattern)
    bins = [fill(pattern) for pattern, count in zip(made.bins, times, strict=False) for _ in range(count)]
    bins = [content for content in bins if content]
    return (opened, bins) if len(bins) < below and not any(waiting.values()) else None


def _first_patterns(made: Patterns) -> list[list[int]]:
    """First pattern of each class: a bin that begins with it and takes what still fits, longest first."""
    patterns = []
    for first in range(len(made.classes)):
        pattern = [0] * len(made.classes)
        left = made.capacity
        for at in [first, *range(first + 1, len(made.classes)), *range(first)]:
            pattern[at] = min(made.counts[at], left // made.classes[at][0])
            left -= pattern[at] * made.classes[at][0]
        patterns.append(pattern)
    return patterns


def _best_pattern(made: Patterns, prices: np.ndarray, opened: bool) -> tuple[float, list[int]]:
    """The bin of the highest price, each class at most as often as it has samples."""
    capacity = made.room if opened else made.capacity
    worth = np.zeros(capacity + 1)
    takes: list[tuple[int, np.ndarray]] = []
    for at, (size, may) in enumerate(made.classes):
        if prices[at] <= 0 or size > capacity or (opened and not may):
            continue
        for _ in range(min(made.counts[at], capacity // size)):
            other = worth[:-size] + prices[at]
            better = other > worth[size:]
            worth[size:] = np.where(better, other, worth[size:])
            takes.append((at, better))
    pattern = [0] * len(made.classes)
    left = int(np.argmax(worth))
    value = float(worth[left])
    for at, better in reversed(takes):
        size = made.classes[at][0]
        if left >= size and better[left - size]:
            pattern[at] += 1
            left -= size
    return value, pattern
