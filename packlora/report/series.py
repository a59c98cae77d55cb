"""Series that the page draws: the numbers of a run's jobs by step and of its machine by time, thinned.

A run writes a line per optimizer step and per microbatch; a page holds a few hundred points of each. Lines are merged into
buckets of equally many, with mean, lowest and highest value. Where there are too many buckets, they are merged in pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packlora.report.follow import Line
from packlora.report.run_files import FollowedRun, RunFiles, is_number

MOST_BUCKETS = ((40, 800), (150, 300), (10**9, 120))
"""Most buckets of a job, by the number of jobs of the run."""
MOST_METRICS = 100
"""Kinds of numbers of a job."""
MOST_SAMPLED = 24
"""Evaluations of a job whose generated texts are kept."""
NO_METRICS = {"job", "step", "elapsed"}


class _Bucket:
    __slots__ = ("count", "numbers", "places")

    def __init__(self) -> None:
        self.count, self.places = 0, list[float]()
        self.numbers: dict[str, tuple[float, int, float, float]] = {}  # sum, how many, lowest, highest

    def add(self, places: list[float], numbers: Mapping[str, tuple[float, int, float, float]], count: int = 1) -> None:
        self.count, self.places = self.count + count, places
        for key, (total, many, low, high) in numbers.items():
            if (old := self.numbers.get(key)) is not None:
                self.numbers[key] = (old[0] + total, old[1] + many, min(old[2], low), max(old[3], high))
            else:
                self.numbers[key] = (total, many, low, high)


class Thinned:
    """A growing series of lines: `places`, columns of where they stand, of which the last of a bucket holds, and metrics."""

    def __init__(self, places: Sequence[str], most: int) -> None:
        self.places, self.most, self.every = places, most, 1
        self._buckets: list[_Bucket] = []

    def add(self, places: list[float], numbers: Mapping[str, float]) -> None:
        if not self._buckets or self._buckets[-1].count >= self.every:
            if len(self._buckets) >= self.most:
                self._halve()
            if not self._buckets or self._buckets[-1].count >= self.every:
                self._buckets.append(_Bucket())
        self._buckets[-1].add(places, {key: (value, 1, value, value) for key, value in numbers.items()})

    def _halve(self) -> None:
        buckets = []
        for start in range(0, len(self._buckets), 2):
            one = _Bucket()
            for other in self._buckets[start : start + 2]:
                one.add(other.places, other.numbers, other.count)
            buckets.append(one)
        self._buckets, self.every = buckets, 2 * self.every

    def columns(self) -> Line | None:
        """The series by column; None where there is none."""
        every = self._buckets
        if not every:
            return None
        keys = list(dict.fromkeys(key for bucket in every for key in bucket.numbers))
        columns = {name: [_short(one.places[at]) for one in every] for at, name in enumerate(self.places)}
        out: Line = {"every": self.every, "count": [one.count for one in every], **columns}
        found = {key: [one.numbers.get(key) for one in every] for key in keys}
        out["mean"] = {key: [n and _short(n[0] / n[1]) for n in column] for key, column in found.items()}
        if self.every > 1:
            out["low"] = {key: [n and _short(n[2]) for n in column] for key, column in found.items()}
            out["high"] = {key: [n and _short(n[3]) for n in column] for key, column in found.items()}
        return out


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def numbers_of(line: Line) -> dict[str, float]:
    """All finite numbers of a line by name, also those of an object in it."""
    out: dict[str, float] = {}
    for key, value in line.items():
        inner: Iterable[tuple[str, Any]] = value.items() if isinstance(value, dict) else [(key, value)]
        out.update((str(name), one) for name, one in inner if name not in NO_METRICS and is_number(one))
        if len(out) > MOST_METRICS:
            break
    if out.get("seconds", 0) > 0 and "tokens" in out:
        out["tokens_per_second"] = out["tokens"] / out["seconds"]
    return out


class _JobSeries:
    def __init__(self, most: int) -> None:
        self.steps, self.evals = Thinned(("step", "time", "seen"), most), Thinned(("step",), most)
        self.seen, self.known, self.judged = 0.0, 0, 0

    def follow(self, metrics: list[Line], evals: list[Line]) -> None:
        for line in metrics[self.known :]:
            numbers = numbers_of(line)
            self.seen += numbers.get("tokens", 0)
            elapsed = line.get("elapsed")
            time = float(elapsed) if is_number(elapsed) else 0.0
            self.steps.add([line["step"], time, self.seen], numbers)
        for line in evals[self.judged :]:
            numbers = {key[5:]: value for key, value in numbers_of(line).items() if key.startswith("eval_")}
            self.evals.add([line["step"]], numbers)
        self.known, self.judged = len(metrics), len(evals)


class PageData:
    """The numbers of a run for its page; grows with the run. look: number of the last look that found anything."""

    def __init__(self, run: FollowedRun) -> None:
        self.run, self.look = run, 0
        self.files: RunFiles = run.files()
        self._jobs: dict[str, _JobSeries] = {}
        self._machine = Thinned(("time",), MOST_BUCKETS[0][1])
        self._measured, self._ranks = 0, 1
        self._begun: Any = None

    def follow(self) -> bool:
        """Read on. Whether anything is new."""
        if not self.run.look():
            return False
        self.look += 1
        self.files = self.run.files()
        names = [job.name for job in self.files.jobs]
        most = next(buckets for jobs, buckets in MOST_BUCKETS if len(names) <= jobs)
        begun = self.run.times, most
        if begun != self._begun or list(self._jobs) != names[: len(self._jobs)]:
            self._begun, self._jobs = begun, {}
            self._machine, self._measured = Thinned(("time",), MOST_BUCKETS[0][1]), 0
        for job in self.files.jobs:
            self._jobs.setdefault(job.name, _JobSeries(most)).follow(job.metrics, job.evals)
        for line in self.files.microbatches[self._measured :]:
            time, seconds = line.get("elapsed"), line.get("seconds")
            if is_number(time) and is_number(seconds) and time:
                held = {"tokens": sum(line["tokens"].values()), "capacity": line["capacity"], "seconds": seconds}
                more = {key: line[key] for key in ("memory", "gpu") if is_number(line.get(key))}
                self._machine.add([time], held | more)
                self._ranks = max(self._ranks, 1 + int(line.get("rank") or 0))
        self._measured = len(self.files.microbatches)
        return True

    def numbers(self) -> Line:
        """All numbers of the page; those of the jobs in their order."""
        own = [self._jobs.get(job.name, _JobSeries(1)) for job in self.files.jobs]
        jobs = [
            {
                "name": job.name, "style": job.style, "status": self.files.status_of(job), "loss": job.loss,
                "steps": series.steps.columns(), "evals": series.evals.columns(),
                "samples": [_sampled(line) for line in _spread(job.samples, MOST_SAMPLED)],
            }
            for job, series in zip(self.files.jobs, own, strict=True)
        ]  # fmt: skip
        return {
            "look": self.look, "status": self.files.status, "jobs": jobs, "machine": self._machine.columns(),
            "ranks": self._ranks,
        }  # fmt: skip


def _sampled(line: Line) -> Line:
    pairs = line["samples"] if isinstance(line["samples"], list) else []
    texts = [(str(one.get("prompt")), str(one.get("text"))) for one in pairs if isinstance(one, dict)]
    return {"step": line["step"], "texts": texts}


def _spread(lines: list[Line], most: int) -> list[Line]:
    """Select up to `most` lines, evenly spread, with the first and the last."""
    if len(lines) <= most:
        return lines
    return [lines[round(number * (len(lines) - 1) / (most - 1))] for number in range(most)]
