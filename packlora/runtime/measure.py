"""Measurements of what a microbatch costs in time and memory: the model runs on microbatches of the run's own samples, up to
the budget that memory does not hold.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Literal

import numpy as np
import torch

from packlora.base.model import Base
from packlora.engine.memory import free_memory, synchronize
from packlora.engine.parts import Part, num_tokens, rows_of
from packlora.engine.passes import Executor, run_microbatch
from packlora.engine.rows import Row
from packlora.runtime.job import Job
from packlora.runtime.profiles import Point, Profile
from packlora.schedule.cost import CostModel

MEASURED_SECONDS = 60.0
"""After this time no larger budget is measured."""
REPEATS = 2
"""Timed runs of a microbatch after one to warm up."""


def measure(base: Base, executor: Executor, jobs: Sequence[Job], tried: Sequence[int]) -> list[Point]:
    """Run forward and backward of the jobs' own samples at the budgets, the smallest first, until memory does not hold one.

    Leaves the jobs as they were: no step is taken, gradients are dropped.
    """
    points: list[Point] = []
    start = time.perf_counter()
    for budget in sorted(tried):
        parts = sample_mix(jobs, budget)
        tokens = num_tokens(parts)
        squared = sum(row.sample.num_tokens**2 for row in rows_of(parts))
        figures = None
        with contextlib.suppress(torch.OutOfMemoryError):  # and of what it holds in memory, before that is freed
            figures = _measure_one(base, executor, parts)
        for job in jobs:
            job.discard()
        free_memory(base.device)
        points.append(Point(tokens, squared, *(figures or (None, None))))
        if figures is None or time.perf_counter() - start > MEASURED_SECONDS:
            break
    if base.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(base.device)
    return points


def sample_mix(jobs: Sequence[Job], budget: int) -> list[Part]:
    """Parts of samples of all jobs in turn, up to the budget; at least one. They learn the cross entropy of their labels."""
    sources = cycle([(job, cycle(range(len(job.data.samples)))) for job in jobs])
    picked: dict[int, tuple[Job, list[Row]]] = {}
    total = 0
    for job, numbers in sources:
        number = next(numbers)
        sample = job.data.samples[number]
        if picked and total + sample.num_tokens > budget:
            break
        picked.setdefault(job.adapter.number, (job, []))[1].append(Row(sample, (job.dropout_key, 0, number)))
        total += sample.num_tokens
    facts = {"units": 1, "samples": 1}
    return [
        Part(adapter, rows, weight=job.state.grad_scale / 1000, terms=job.learning.terms, facts=facts)
        for adapter, (job, rows) in sorted(picked.items(), key=lambda found: found[0])
    ]


def _measure_one(base: Base, executor: Executor, parts: Sequence[Part]) -> tuple[float, int | None]:
    """Seconds of the fastest of the timed runs, and the peak of memory on a GPU."""
    gpu = base.device.type == "cuda"
    seconds = []
    for number in range(1 + REPEATS):
        if gpu:
            torch.cuda.reset_peak_memory_stats(base.device)
        synchronize(base.device)
        start = time.perf_counter()
        run_microbatch(executor, parts)
        synchronize(base.device)
        if number:
            seconds.append(time.perf_counter() - start)
    return min(seconds), torch.cuda.max_memory_allocated(base.device) if gpu else None


def fitted(
    guess: Profile, points: Sequence[Point], origin: Literal["measured", "remembered"], more_bytes: int = 0
) -> Profile:
    """The estimate, corrected to what was measured: a time per microbatch and a factor on everything else.

    Args:
        more_bytes: kept by training, but not there while it was measured: the optimizer's state.
    """
    timed = [point for point in points if point.seconds is not None]
    linear = [_seconds(replace(guess.cost, fixed=0.0), point) for point in timed]
    fixed = [
        _seconds(replace(guess.cost, per_token=0.0, per_token_squared=0.0, head_per_token=0.0), point)
        for point in timed
    ]
    goal = np.array([point.seconds for point in timed], np.float64)
    a, b = _non_negative(np.array([fixed, linear]).T / goal[:, None])
    cost = replace(
        guess.cost,
        per_token=guess.cost.per_token * b,
        per_token_squared=guess.cost.per_token_squared * b,
        head_per_token=guess.cost.head_per_token * b,
        fixed=guess.cost.fixed * a,
    )
    kept, each = guess.kept_bytes, guess.bytes_per_token
    peaks = [(point.tokens, point.bytes) for point in timed if point.bytes is not None]
    if peaks:
        tokens, peak = np.array(peaks, np.float64).T
        if np.ptp(tokens) > 0:  # budgets that hold the same samples give no slope
            each = float(
                ((tokens - tokens.mean()) * (peak - peak.mean())).sum() / ((tokens - tokens.mean()) ** 2).sum()
            )
        kept = float((peak - each * tokens).max())  # no measured peak lies above what is predicted
    return Profile(origin, cost, kept + more_bytes, each, guess.room, tuple(points))


def _non_negative(matrix: np.ndarray) -> tuple[float, float]:
    """Non-negative (a, b) with a least-squares error of a * column 0 + b * column 1 against 1; b is above 0."""
    ones = np.ones(len(matrix))
    if len(matrix) > 1:
        a, b = np.linalg.lstsq(matrix, ones, rcond=None)[0]
        if a >= 0 and b > 0:
            return float(a), float(b)
    only = matrix[:, 1]
    return 0.0, float(only @ ones / (only @ only))


def _seconds(cost: CostModel, point: Point) -> float:
    body = cost.per_token * point.tokens + cost.per_token_squared * point.squared + cost.fixed
    head = cost.head_per_token * point.tokens
    return body * (1 + cost.backward_ratio) + head * (1 + cost.head_backward_ratio)
