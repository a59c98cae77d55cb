"""Integer programs for one packing problem, solved by HiGHS through scipy.

First the fewest bins, then, with their number fixed, the emptiest last one (LoRAFusion's two stages). Only fewer bins than the
heuristics found are looked for. Each sample is assigned to a bin: samples of the same length are one integer variable per bin
instead of a binary each, and the i-th longest sample goes into one of the first i bins, since bins have no names. Node limits
stop a search, so that the result does not depend on the machine; a time limit is for emergencies, and what it stops is thrown
away.
"""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from packlora.schedule.bins import Packing

SMALL = 250
"""Samples times bins up to which the last bin is emptied to the last token; in larger problems only where a tenth of a bin or
more can be gained."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Samples to pack: their lengths, and which may go into the open bin, whose room is left (None: all). bound: fewest new
    bins."""

    lengths: Sequence[int]
    capacity: int
    room: int
    allowed: Sequence[bool] | None
    bound: int

    def load(self, content: Sequence[int]) -> int:
        return sum(self.lengths[index] for index in content)


def solve(problem: Problem, packing: Packing, node_limit: int, time_limit_s: float) -> tuple[Packing, int, str]:
    """A packing that is better than the heuristics' one, or that one; a bound of its new bins; and why the search stopped:
    optimal (no better packing exists), node limit, time limit, failed."""
    end = time.monotonic() + time_limit_s
    too_long = [content for content in packing.bins if problem.load(content) > problem.capacity]
    others = [content for content in packing.bins if problem.load(content) <= problem.capacity]
    best, bound, stopped = [packing.opened, *others], problem.bound - len(too_long), "optimal"
    if len(others) > max(bound, 0):
        found, stopped = _program(problem, len(others) - 1, bound, False, node_limit, end)
        best = best if found is None else [found[0], *(content for content in found[1:] if content)]
        bound = len(best) - 1 if stopped == "optimal" else bound
    tail = min(map(problem.load, best[1:]), default=0)
    small = len(problem.lengths) * (len(best) - 1) <= SMALL
    gain = tail - _least_tail(problem, len(best) - 1)
    if len(best) > 2 and stopped != "time limit" and gain > (0 if small else problem.capacity // 10):
        found, why = _program(problem, len(best) - 1, bound, True, node_limit, end)
        if found is not None and min(map(problem.load, found[1:])) < tail:
            best = found
        stopped = why if stopped == "optimal" else stopped
    if stopped == "time limit":
        return packing, problem.bound, stopped
    bins = sorted(too_long + best[1:], key=lambda content: -problem.load(content))
    return Packing(best[0], bins), bound + len(too_long), stopped


def _least_tail(problem: Problem, bins: int) -> int:
    """Least tokens of the last bin: those that the open bin and the other bins cannot hold."""
    total = sum(length for length in problem.lengths if length <= problem.capacity)
    return max(total - problem.room - (bins - 1) * problem.capacity, 0)


def _program(
    problem: Problem, bins: int, bound: int, emptiest: bool, node_limit: int, end: float
) -> tuple[list[list[int]] | None, str]:
    """Contents of the open bin and of `bins` new ones, or None; and why it stopped.

    emptiest: use all the bins and empty the last one; else use as few as can be.
    """
    from scipy.optimize import Bounds, milp

    program = _Assignment(problem, bins, bound, emptiest)
    constraints = program.constraints()
    left = end - time.monotonic()
    if left <= 0:
        return None, "time limit"
    with _unheard():
        result = milp(
            program.objective(),
            integrality=np.ones(program.size),
            bounds=Bounds(np.zeros(program.size), program.upper()),
            constraints=constraints,
            options={"node_limit": node_limit, "time_limit": left, "mip_rel_gap": 0.0},
        )
    stopped = _stopped(result.status, str(result.message).lower())
    if result.x is None or stopped in ("time limit", "failed"):
        return None, stopped
    contents = program.contents(result.x)
    return contents, "failed" if contents is None else stopped


@contextmanager
def _unheard() -> Iterator[None]:
    """Leave out what HiGHS prints on standard output whatever its options are. What other threads print meanwhile follows."""
    try:
        own = os.dup(1) if os.name == "posix" else None
    except OSError:  # it is closed
        own = None
    if own is None:
        yield
        return
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 1)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(own, 1)
            said.seek(0)
            with suppress(OSError), os.fdopen(own, "wb") as out:
                out.writelines(line for line in said if not line.startswith(b"Highs"))


def _stopped(status: int, message: str) -> str:
    if status == 0:
        return "optimal"
    if "time limit" in message:
        return "time limit"
    if "limit" in message:
        return "node limit"
    return "optimal" if "infeasible" in message else "failed"  # infeasible: there is no such packing


class _Assignment:
    """The integer program that puts every sample in a bin; the open bin is number 0.

    Variables: y[class, bin], samples of a class (of one length, which may go into the same bins); for the fewest bins u[bin],
    1 where a new bin is used.
    """

    def __init__(self, problem: Problem, bins: int, bound: int, emptiest: bool) -> None:
        self.problem, self.bins, self.bound, self.emptiest = problem, bins, bound, emptiest
        classes: dict[tuple[int, bool], list[int]] = {}
        for index in sorted(range(len(problem.lengths)), key=lambda i: (-problem.lengths[i], i)):
            length = problem.lengths[index]
            if length <= problem.capacity:
                may = problem.room > 0 and (problem.allowed is None or problem.allowed[index])
                classes.setdefault((length, may), []).append(index)
        self.classes = dict(sorted(classes.items(), key=lambda one: (-one[0][0], one[0][1])))
        """Samples by length and by whether they may go into the open bin."""
        self.places = bins + 1
        self.first_u = len(self.classes) * self.places
        self.size = self.first_u + (0 if emptiest else bins)

    def y(self, c: int, b: int) -> int:
        return c * self.places + b

    def u(self, b: int) -> int:
        return self.first_u + b - 1

    def upper(self) -> Any:
        """Upper bounds of the variables: the i-th longest sample goes into one of the first i bins."""
        upper = np.zeros(self.size)
        upper[self.first_u :] = 1
        seen = 0
        alike = self.bins - 1 if self.emptiest else self.bins  # the last one is not, where it is to be emptied
        for c, ((length, may), samples) in enumerate(self.classes.items()):
            count = len(samples)
            seen += count
            for b in range(self.places):
                fits = (may and length <= self.problem.room) if b == 0 else (b <= seen or b > alike)
                upper[self.y(c, b)] = count if fits else 0
        return upper

    def constraints(self) -> Any:
        """Constraints: every sample is in one bin, no bin holds too much, and used bins come first."""
        from scipy.optimize import LinearConstraint
        from scipy.sparse import coo_array

        entries, least, most = zip(*self._rows(), strict=True)
        at = [number for number, row in enumerate(entries) for _ in row]
        columns = [column for row in entries for column, _ in row]
        factors = [factor for row in entries for _, factor in row]
        matrix = coo_array((factors, (at, columns)), shape=(len(entries), self.size)).tocsr()
        return LinearConstraint(matrix, least, most)

    def _rows(self) -> list[tuple[list[tuple[int, float]], float, float]]:
        """(variable, factor) of each row, and the least and most of their sum."""
        rows: list[tuple[list[tuple[int, float]], float, float]] = []
        for c, samples in enumerate(self.classes.values()):
            count = float(len(samples))
            rows.append(([(self.y(c, b), 1.0) for b in range(self.places)], count, count))
        for b in range(self.places):
            load = self._load(b)
            capacity = float(self.problem.capacity if b else self.problem.room)
            if b and not self.emptiest:
                rows.append(([*load, (self.u(b), -capacity)], -math.inf, 0.0))
            else:
                rows.append((load, -math.inf, capacity))
        if not self.emptiest:
            rows += [([(self.u(b + 1), 1.0), (self.u(b), -1.0)], -math.inf, 0.0) for b in range(1, self.bins)]
            used = [(self.u(b), 1.0) for b in range(1, self.places)]
            rows.append((used, float(max(self.bound, 0)), float(self.bins)))
        return rows

    def _load(self, b: int) -> list[tuple[int, float]]:
        """Tokens in a bin."""
        return [(self.y(c, b), float(length)) for c, (length, _) in enumerate(self.classes)]

    def objective(self) -> Any:
        """New bins, or tokens in the last one."""
        objective = np.zeros(self.size)
        if not self.emptiest:
            objective[self.first_u :] = 1
        else:
            for column, tokens in self._load(self.bins):
                objective[column] = tokens
        return objective

    def contents(self, values: Any) -> list[list[int]] | None:
        """Samples of every bin; None where the values fit within the solver's tolerances, but not in whole numbers."""
        contents: list[list[int]] = [[] for _ in range(self.places)]
        for c, samples in enumerate(self.classes.values()):
            waiting = list(samples)
            for b in range(self.places):
                count = round(values[self.y(c, b)])
                contents[b] += waiting[:count]
                if count > len(waiting):
                    return None
                del waiting[:count]
            if waiting:
                return None
        room = [self.problem.room] + [self.problem.capacity] * self.bins
        fits = all(self.problem.load(content) <= most for content, most in zip(contents, room, strict=True))
        return contents if fits else None
