"""How full may microbatches be planned that several devices share? Sets packlora.parallel.layout.FULL.

    python -m packlora.bench.studies.waves           # a CPU, two minutes; nothing is trained
    python -m packlora.bench.studies.waves --quick   # a few cases, seconds

Jobs of the scheduler's benchmark are planned and cut into waves as training does it, by runtime/spread.py, for 2, 4 and 8
devices that share all jobs. Full microbatches cannot be cut evenly, emptier ones make more waves. Time is counted in tokens of
the costliest microbatch of each wave, and once more with a fixed cost of each wave.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from packlora.bench.schedule_cases import SETS, make_jobs
from packlora.config import ParallelConfig
from packlora.parallel.layout import choose
from packlora.runtime.spread import candidates, spread
from packlora.schedule.types import Microbatch

KINDS: tuple[tuple[str, ...], ...] = (
    SETS["real"], SETS["het"], SETS["mix"], ("xsum",), ("wikisum",), ("py_docstrings",), ("manpages",), ("newsgroups20",),
    ("email_subject",),
)  # fmt: skip
CAPACITIES, BATCHES, DEVICES = (4096, 8192, 16384), (8, 32, 128), (2, 4, 8)
SAMPLES = 512
"""Of each job."""
SHARES = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.84, 0.8)
FIXED = 0.05
"""Of a wave, as a part of the cost of a full microbatch: launches, sums, reading all weights."""


@dataclass(frozen=True, slots=True)
class Found:
    """By share: of the layout whose devices share all jobs the time, waves and idle share; the time of the one `auto` takes."""

    capacity: int
    times: list[float]
    waves: list[int]
    idle: list[float]
    auto: list[float]


def tokens(microbatch: Microbatch) -> float:
    return float(microbatch.num_tokens)


def prepared_run(kinds: Sequence[str], capacity: int, batch: int) -> Any:
    """What runtime/spread.py reads of a PreparedRun."""
    jobs = [
        SimpleNamespace(name=job.name, planned=job, tokens=int(job.lengths.sum()))
        for job in make_jobs(kinds, SAMPLES, batch)
    ]
    run = SimpleNamespace(
        schedule=SimpleNamespace(method="auto"),
        parallel=ParallelConfig(shard_base=False, pipeline=1),
    )
    return SimpleNamespace(run=run, budget=capacity, jobs=[SimpleNamespace(data=job) for job in jobs])


def measure(kinds: Sequence[str], capacity: int, batch: int, devices: int, shares: Sequence[float]) -> Found:
    """Plan a set of jobs with each of the shares."""
    found, run = Found(capacity, [], [], [], []), prepared_run(kinds, capacity, batch)
    work = {job.data.name: float(job.data.tokens) for job in run.jobs}
    for share in shares:
        with mock.patch("packlora.parallel.layout.FULL", share):
            predictions = [spread(run, layout).predict(tokens) for layout in candidates(run, devices, work)]
        shared = predictions[-1]
        found.times.append(shared.time)
        found.waves.append(shared.waves)
        found.idle.append(shared.idle)
        found.auto.append(choose(predictions).time)
    return found


def table(found: Sequence[Found], shares: Sequence[float]) -> list[str]:
    """Lines for the screen: times over those with the first share."""
    times, waves = np.array([one.times for one in found]), np.array([one.waves for one in found])
    fixed = times + FIXED * np.array([[one.capacity] for one in found]) * waves
    auto, idle = np.array([one.auto for one in found]), np.array([one.idle for one in found])
    gains = times.min(1) < 0.97 * times[:, 0]

    def mean(values: np.ndarray) -> list[float]:
        """Geometric, of the ratios to the first column."""
        return [float(value) for value in np.exp(np.log(values / values[:, :1]).mean(0))]

    rows = {
        "time": mean(times), "time, waves with a fixed cost": mean(fixed), "time of the layout that auto takes": mean(auto),
        "worst case over its best share": (fixed / fixed.min(1, keepdims=True)).max(0),
    }  # fmt: skip
    if gains.any():
        rows |= {
            f"time of the {gains.sum()} that gain 3 %": mean(times[gains]), "their idle share": idle[gains].mean(0),
            "their largest idle share": idle[gains].max(0),
        }  # fmt: skip
    lines = [f"{f'{len(found)} cases':40}" + "".join(f"{share:7.2f}" for share in shares)]
    return lines + [f"{name:40}" + "".join(f"{value:7.3f}" for value in values) for name, values in rows.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases")
    quick = parser.parse_args().quick
    cases = list(itertools.product(KINDS, CAPACITIES, BATCHES, DEVICES))[:: 27 if quick else 1]
    print("\n".join(table([measure(*case, SHARES) for case in cases], SHARES)))


if __name__ == "__main__":
    main()
