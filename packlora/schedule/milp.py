"""Integer programs for one packing problem, solved by HiGHS through scipy; runs in a process that can be killed.

First the fewest bins, then, with their number fixed, the emptiest last one (LoRAFusion's two stages). Only fewer bins than the
heuristics found are looked for. Without padding the first stage chooses among patterns (columns.py). With padding, and in the
second stage, each sample is assigned to a bin: samples of the same length are one integer variable per bin instead of a binary
each, and the i-th longest sample goes into one of the first i bins, since bins have no names. Node limits stop a search, so
that the result does not depend on the machine; a time limit is for emergencies, and what it stops is thrown away.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from packlora.schedule.bounds import padded
from packlora.schedule.columns import Class, choose_patterns, make_patterns

SMALL = 250
"""Samples times bins up to which samples are assigned one by one where the patterns give no packing, and the last bin is
emptied to the last token; in larger problems only where a tenth of a bin or more can be gained."""


@dataclass(slots=True)
class Problem:
    """A unit to pack, see solve.py. opened and bins: what the heuristics found."""

    lengths: list[int]
    owners: list[int]
    capacity: int
    multiple: int
    room: int
    allowed: list[bool] | None
    bound: int
    opened: list[int]
    bins: list[list[int]]
    node_limit: int
    emptiest: bool

    def load(self, content: list[int]) -> int:
        tokens: dict[int, int] = {}
        for index in content:
            owner = self.owners[index] if self.multiple > 1 else 0
            tokens[owner] = tokens.get(owner, 0) + self.lengths[index]
        return sum(padded(count, self.multiple) for count in tokens.values())


def solve(tree: dict[str, Any], time_limit_s: float) -> dict[str, Any]:
    """Answer of a solver: opened, bins (None: keep what the heuristics found), a bound of new bins, and why it stopped.

    stopped: optimal (no better packing exists), no patterns (those made give none, others may), node limit, time limit, failed.
    """
    problem = Problem(**tree)
    end = time.monotonic() + time_limit_s
    alone = [content for content in problem.bins if problem.load(content) > problem.capacity]  # too long for the fill
    others = [content for content in problem.bins if problem.load(content) <= problem.capacity]
    problem.bound -= len(alone)
    opened, bins, better, stopped = problem.opened, others, False, "optimal"
    if len(others) > max(problem.bound, 0):
        if problem.multiple == 1:
            found, stopped = _by_patterns(problem, others, end)
            if stopped in ("no patterns", "node limit") and len(problem.lengths) * len(others) <= SMALL:
                fewest = len(others) if found is None else len(found) - 1
                fewer, stopped = _program(problem, fewest - 1, False, end)
                found = found if fewer is None else fewer
        else:
            found, stopped = _program(problem, len(others) - 1, False, end)
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
    bound = problem.bound + len(alone)
    if not better or stopped == "time limit":
        return {"opened": None, "bins": None, "stopped": stopped, "bound": bound}
    bins = sorted(alone + bins, key=lambda content: -problem.load(content))
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
    """The last bin holds at least what the open one and the other bins cannot."""
    total = sum(length for length in problem.lengths if length <= problem.capacity)
    return max(total - problem.room - (bins - 1) * problem.capacity, 0)


def _program(problem: Problem, bins: int, emptiest: bool, end: float) -> tuple[list[list[int]] | None, str]:
    """Contents of the open bin and of `bins` new ones, or None; and why it stopped.

    emptiest: use all the bins and empty the last one; else use as few as can be.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    # --- variables: y[class, bin] samples; u[bin] used (fewest bins); k[owner, bin] multiples (padding) ---
    members: dict[tuple[int, int, bool], list[int]] = {}
    for index in sorted(range(len(problem.lengths)), key=lambda i: (-problem.lengths[i], i)):
        length = problem.lengths[index]
        if length <= problem.capacity:
            owner = problem.owners[index] if problem.multiple > 1 else 0
            may = problem.room > 0 and (problem.allowed is None or problem.allowed[index])
            members.setdefault((owner, length, may), []).append(index)
    classes = sorted(members, key=lambda key: (-key[1], key[0], key[2]))
    owners = sorted({owner for owner, _, _ in classes})
    places = bins + 1  # the open bin is number 0
    num_y = len(classes) * places
    num_k = len(owners) * places if problem.multiple > 1 else 0
    num_u = 0 if emptiest else bins
    size = num_y + num_k + num_u
    upper = np.zeros(size)
    upper[num_y : num_y + num_k] = problem.capacity // problem.multiple
    upper[num_y + num_k :] = 1
    seen = 0
    free = bins if not emptiest else bins - 1  # bins that are alike; the last one is not, where it is to be emptied
    for c, key in enumerate(classes):
        count = len(members[key])
        seen += count
        for b in range(places):
            if b == 0:
                ok = key[2] and key[1] <= problem.room
            else:
                ok = b <= seen or b > free
            upper[c * places + b] = count if ok else 0

    # --- rows ---
    rows: list[int] = []
    cols: list[int] = []
    values: list[float] = []
    low: list[float] = []
    high: list[float] = []

    def row(entries: list[tuple[int, float]], least: float, most: float) -> None:
        for column, value in entries:
            rows.append(len(low))
            cols.append(column)
            values.append(value)
        low.append(least)
        high.append(most)

    for c, key in enumerate(classes):
        row([(c * places + b, 1.0) for b in range(places)], len(members[key]), len(members[key]))
    for b in range(places):
        capacity = float(problem.room if b == 0 else problem.capacity)
        if problem.multiple > 1:
            for a, owner in enumerate(owners):
                mine = [(c * places + b, float(key[1])) for c, key in enumerate(classes) if key[0] == owner]
                row([*mine, (num_y + a * places + b, -float(problem.multiple))], -np.inf, 0.0)
            load = [(num_y + a * places + b, float(problem.multiple)) for a in range(len(owners))]
        else:
            load = [(c * places + b, float(key[1])) for c, key in enumerate(classes)]
        if b and not emptiest:
            row([*load, (num_y + num_k + b - 1, -capacity)], -np.inf, 0.0)
        else:
            row(load, -np.inf, capacity)
    if not emptiest:
        for b in range(1, bins):
            row([(num_y + num_k + b, 1.0), (num_y + num_k + b - 1, -1.0)], -np.inf, 0.0)
        row([(num_y + num_k + b, 1.0) for b in range(bins)], max(problem.bound, 0), bins)

    # --- objective ---
    objective = np.zeros(size)
    if not emptiest:
        objective[num_y + num_k :] = 1
    elif problem.multiple > 1:
        objective[[num_y + a * places + bins for a in range(len(owners))]] = problem.multiple
    else:
        for c, key in enumerate(classes):
            objective[c * places + bins] = key[1]

    left = end - time.monotonic()
    if left <= 0:
        return None, "time limit"
    result = milp(
        objective,
        integrality=np.ones(size),
        bounds=Bounds(np.zeros(size), upper),
        constraints=LinearConstraint(coo_array((values, (rows, cols)), shape=(len(low), size)).tocsr(), low, high),
        options={"node_limit": problem.node_limit, "time_limit": left, "mip_rel_gap": 0.0},
    )
    text = str(result.message).lower()
    if result.status == 0:
        stopped = "optimal"
    elif "time limit" in text:
        stopped = "time limit"
    elif "limit" in text:
        stopped = "node limit"
    elif "infeasible" in text:
        stopped = "optimal"  # there is no such packing
    else:
        stopped = "failed"
    if result.x is None or stopped in ("time limit", "failed"):
        return None, stopped
    contents: list[list[int]] = [[] for _ in range(places)]
    for c, key in enumerate(classes):
        waiting = iter(members[key])
        for b in range(places):
            contents[b] += [next(waiting) for _ in range(round(result.x[c * places + b]))]
        if next(waiting, None) is not None:
            return None, "failed"
    if any(problem.load(content) > (problem.capacity if b else problem.room) for b, content in enumerate(contents)):
        return None, "failed"  # within the solver's tolerances, but not in whole numbers
    return contents, stopped
