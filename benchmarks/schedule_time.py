"""Time and memory of planning, in a process of its own that does nothing else.

    python -m benchmarks.schedule_time SAMPLES METHOD WORKERS

It prints one JSON line. Samples are those of four jobs with mixed lengths (estimates), four stages, windows handed out one by
one as in training; the time is that of making, proving and counting them.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.schedule_cases import SETS, make_cost, make_jobs
from packlora.schedule.background import BackgroundPlanner
from packlora.schedule.planner import Planner
from packlora.schedule.types import Window

CAPACITY, BATCH, STAGES = 4096, 16, 4


def measure(samples: int, method: str, workers: int) -> dict[str, Any]:
    """In a fresh process. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "benchmarks.schedule_time", str(samples), method, str(workers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def main(samples: int, method: str, workers: int) -> None:
    """Plan everything once and print what it took."""
    before = _resident_mib("VmRSS")
    jobs = make_jobs(SETS["mix"], samples // 4, BATCH)
    planner = Planner(jobs, CAPACITY, stages=STAGES, method=method, cost=make_cost("70b", STAGES))
    begun, cpu = time.perf_counter(), _cpu_s()
    first, microbatches, noops, bound = 0.0, 0, 0, 0
    for window in _windows(planner, workers):
        first = first or time.perf_counter() - begun
        microbatches += window.report.microbatches
        noops += window.report.noops
        bound += window.report.bound
    seconds = time.perf_counter() - begun
    print(
        json.dumps(
            {
                "samples": samples, "method": method, "workers": workers, "seconds": seconds, "first_window_s": first,
                "microbatches": microbatches, "noops": noops, "bound": bound,
                "rss_mib": _resident_mib("VmHWM") - before,
                "rss_of_children_mib": _peak_mib(resource.RUSAGE_CHILDREN),
                "cpu_s": _cpu_s() - cpu,
            }
        )
    )  # fmt: skip


def _windows(planner: Planner, workers: int) -> Iterator[Window]:
    """Made in this process, or ahead by another."""
    if not workers:
        yield from planner.windows()
        return
    with BackgroundPlanner(planner) as background:
        yield from background.windows()


def _resident_mib(field: str) -> float:
    """VmRSS: resident now; VmHWM: at most so far. Unlike getrusage it knows nothing of the process that started this one."""
    status = Path("/proc/self/status")
    if not status.exists():
        return _peak_mib(resource.RUSAGE_SELF)
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field)) / 2**10


def _cpu_s() -> float:
    """Of this process and of its children that have ended: what a machine that does other things as well does not stretch."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _peak_mib(who: int) -> float:
    return resource.getrusage(who).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
