"""Integer programs for one packing problem, solved by HiGHS through scipy.

First the fewest bins, then, with their number fixed, the emptiest last one (LoRAFusion's two stages). Only fewer bins than the
heuristics found are looked for. The first stage chooses among patterns (columns.py). In the second stage each sample is
assigned to a bin: samples of the same length are one integer variable per bin instead of a binary
each, and the i-th longest sample goes into one of the first i bins, since bins have no names. Node limits stop a search, so
that the result does not depend on the machine; a time limit is for emergencies, and what it stops is thrown away.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from packlora.schedule.columns import Class, choose_patterns, make_patterns

SMALL = 250
"""Samples times bins up to which samples are assigned one by one where the patterns give no packing, and the last bin is
emptied to the last token; in larger problems only where a tenth of a bin or more can be gained."""


@dataclass(slots=True)
class Problem:
    """A unit to pack, see solve.py. opened and bins: what the heuristics found."""

    lengths: list[int]
    capacity: int
    room: int
    allowed: list[bool] | None
    bound: int
    opened: list[int]
    bins: list[list[int]]
    node_limit: int
    emptiest: bool

    def load(self, content: list[int]) -> int:
        return sum(self.lengths[index] for index in content)


def solve(tree: dict[str, Any], time_limit_s: float) -> dict[str, Any]:
    """Returns opened, bins (None: keep what the heuristics found), a bound of new bins, why it stopped, and perhaps a note.

    stopped: optimal (no better packing exists), no patterns (those made give none, others may), node limit, time limit, failed.
    """
    problem = Problem(**tree)
    end = time.monotonic() + time_limit_s
    too_long = [content for content in problem.bins if problem.load(content) > problem.capacity]
    others = [content for content in problem.bins if problem.load(content) <= problem.capacity]
    problem.bound -= len(too_long)
    opened, bins, better, stopped = problem.opened, others, False, "optimal"
    if len(others) > max(problem.bound, 0):
        found, stopped = _by_patterns(problem, others, end)
        if stopped in ("no patterns", "node limit") and len(problem.lengths) * len(others) <= SMALL:
            fewest = len(others) if found is None else len(found) - 1
            fewer, stopped = _program(problem, fewest - 1, False, end)
            found = found if fewer is None else fewer
        if found is not None:
            (opened, *bins), better = found, True
            bins = [content for content in bins if content]
    tail = min(map(problem.load, bins), default=0)
    gain = tail - _least_tail(problem, len(bins))
    small = len(problem.lengths) * len(bins) <= SMALL
    if (
        problem.emptiest
        and len(bins) > 1
        and stopped != "time limit"
        and gain > (0 if small else problem.capacity // 10)
    ):
        found, why = _program(problem, len(bins), True, end)
        if found is not None and min(problem.load(content) for content in found[1:]) < tail:
            (opened, *bins), better = found, True
        stopped = why if stopped == "optimal" else stopped
    bound = problem.bound + len(too_long)
    if stopped == "time limit":
        note = f"integer program: stopped by the time limit of {time_limit_s:g} s"
        return {"opened": None, "bins": None, "stopped": stopped, "bound": bound, "note": note}
    if not better:
        return {"opened": None, "bins": None, "stopped": stopped, "bound": bound}
    bins = sorted(too_long + bins, key=lambda content: -problem.load(content))
    return {"opened": opened, "bins": bins, "stopped": stopped, "bound": bound}


def _by_patterns(problem: Problem, bins: list[list[int]], end: float) -> tuple[list[list[int]] | None, str]:
    """Fewest bins out of patterns; raises the problem's bound to what the linear program proves."""
    indices = [index for content in [problem.opened, *bins] for index in content]
    lengths = [problem.lengths[index] for index in indices]
    allowed = [problem.allowed is None or problem.allowed[index] for index in indices]
    made = make_patterns(lengths, allowed, problem.capacity, problem.room, len(bins), end)
    problem.bound = max(problem.bound, made.bound)
    if problem.bound >= len(bins):
        return None, "optimal"
    chosen = choose_patterns(made, len(bins), problem.node_limit, end)
    late = time.monotonic() >= end
    if chosen is None or late:
        return None, "time limit" if late else "no patterns"
    waiting: dict[Class, list[int]] = {}
    for index in sorted(indices, reverse=True):
        may = problem.allowed is None or problem.allowed[index]
        length = problem.lengths[index]
        waiting.setdefault((length, may and length <= problem.room), []).append(index)
    contents = [[waiting[key].pop() for key in content] for content in [chosen[0], *chosen[1]]]
    return contents, "optimal" if len(chosen[1]) <= problem.bound else "node limit"


def _least_tail(problem: Problem, bins: int) -> int:
    """Least tokens of the last bin: those that the open bin and the other bins cannot hold."""
    total = sum(length for length in problem.lengths if length <= problem.capacity)
    return max(total - problem.room - (bins - 1) * problem.capacity, 0)


def _program(problem: Problem, bins: int, emptiest: bool, end: float) -> tuple[list[list[int]] | None, str]:
    """Contents of the open bin and of `bins` new ones, or None; and why it stopped.

    emptiest: use all the bins and empty the last one; else use as few as can be.
    """
    from scipy.optimize import Bounds, milp

    program = _Assignment(problem, bins, emptiest)
    constraints = program.constraints()
    left = end - time.monotonic()
    if left <= 0:
        return None, "time limit"
    result = milp(
        program.objective(),
        integrality=np.ones(program.size),
        bounds=Bounds(np.zeros(program.size), program.upper()),
        constraints=constraints,
        options={"node_limit": problem.node_limit, "time_limit": left, "mip_rel_gap": 0.0},
    )
    stopped = _stopped(result.status, str(result.message).lower())
    if result.x is None or stopped in ("time limit", "failed"):
        return None, stopped
    contents = program.contents(result.x)
    return contents, "failed" if contents is None else stopped


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

    def __init__(self, problem: Problem, bins: int, emptiest: bool) -> None:
        self.problem, self.bins, self.emptiest = problem, bins, emptiest
        self.members: dict[Class, list[int]] = {}
        for index in sorted(range(len(problem.lengths)), key=lambda i: (-problem.lengths[i], i)):
            length = problem.lengths[index]
            if length <= problem.capacity:
                may = problem.room > 0 and (problem.allowed is None or problem.allowed[index])
                self.members.setdefault((length, may), []).append(index)
        self.classes = sorted(self.members, key=lambda key: (-key[0], key[1]))
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
        for c, (length, may) in enumerate(self.classes):
            count = len(self.members[self.classes[c]])
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
        for c, key in enumerate(self.classes):
            count = float(len(self.members[key]))
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
            rows.append((used, float(max(self.problem.bound, 0)), float(self.bins)))
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
        for c, key in enumerate(self.classes):
            waiting = list(self.members[key])
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
