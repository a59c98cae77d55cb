"""Reader of the files that a run writes: run.json, the jsonl files and sweep.json, once or repeatedly while it trains.

Any of them may be missing, empty or still growing.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from packlora.config.trainers import built_in
from packlora.files import LOCK
from packlora.report.charts import Point
from packlora.report.follow import Followed, Line, is_held, read_object
from packlora.report.journal import EDITION, JOURNAL, RECORD, fold
from packlora.report.metrics import EVALS, METRICS, MICROBATCHES, SAMPLES, WINDOWS

EARLY_END = re.compile(r"job (.+?) ends at (?:step \d+ of \d+(?:, |: )?)?(.*)", re.DOTALL)
"""Note of a job that ends early."""


def loss_of(train: Line) -> tuple[str, str]:
    """Kind of a job's loss, and the unit; losses of one kind can be compared. train: of the job, as in a run file."""
    if train.get("objective"):
        return Path(str(train["objective"])).name, ""
    trainer, types = str(train.get("trainer") or "sft"), train.get("loss_type")
    own, named = built_in().get(trainer), [types] if isinstance(types, str) else types
    units = own.units if own else ("",)
    if named is None or (own and len(units) > 1 and named == [own.losses[0]]):
        return trainer.upper(), units[0]
    return f"{trainer.upper()} ({', '.join(map(str, named))})", units[-1]


@dataclass
class JobFiles:
    """Files of one job: its configuration, its adapter, and its progress."""

    name: str
    style: str
    config: Line
    info: Line
    result: Line
    metrics: list[Line]
    evals: list[Line]
    samples: list[Line] = field(default_factory=list)

    def series(self, key: str) -> list[Point]:
        return _series(self.metrics, key)

    @property
    def loss(self) -> tuple[str, str]:
        return loss_of(self.config.get("train", {}))

    @property
    def held_out(self) -> list[Point]:
        return _series(self.evals, "eval_loss")

    @property
    def adapter(self) -> Line:
        """Settings of the adapter: of one that began from a folder the folder's, as far as it has them."""
        return {**self.config.get("adapter", {}), **self.info.get("adapter", {})}

    @property
    def kind(self) -> str:
        return ("rs" if self.adapter.get("use_rslora") else "") + ("DoRA" if self.adapter.get("use_dora") else "LoRA")

    @property
    def step(self) -> int:
        return max(int(self.result.get("step") or 0), int(self.metrics[-1]["step"]) if self.metrics else 0)

    @property
    def tokens(self) -> int:
        return sum(int(number_at(line, "tokens")) for line in self.metrics)


@dataclass
class RunFiles:
    """Everything read from an output folder. alive: whether a process holds the folder, None where that cannot be told."""

    folder: Path
    about: Line
    jobs: list[JobFiles]
    microbatches: list[Line]
    windows: list[Line]
    alive: bool | None = None

    @property
    def has_steps(self) -> bool:
        return any(job.metrics for job in self.jobs)

    @property
    def name(self) -> str:
        """Name of the run: that of its folder."""
        return self.folder.resolve().name

    @property
    def notes(self) -> list[str]:
        return [str(text) for text in self.about.get("warnings") or []]

    def early_end(self, note: str) -> tuple[str, str] | None:
        """Job that a note says has ended early, with the words after that; None for another note."""
        found = EARLY_END.match(note)
        name = self._names.get(found[1]) if found else None
        return None if found is None or name is None else (name, found[2])

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        """Names of the jobs as notes quote them."""
        return {repr(job.name): job.name for job in self.jobs}

    @functools.cached_property
    def ends(self) -> dict[str, str]:
        """Words on the end of each job that has ended early, as a sweep or a person has decided."""
        return dict(found for text in self.notes if (found := self.early_end(text)))

    @property
    def config(self) -> Line:
        return self.about.get("config") or {}

    @property
    def result(self) -> Line:
        return self.about.get("result") or {}

    @property
    def elapsed(self) -> float:
        last = [line for job in self.jobs for line in job.metrics[-1:]]
        return max((number_at(line, "elapsed") for line in last), default=0.0)

    @property
    def is_broken_off(self) -> bool:
        """Whether it ended without saying so: killed, or by an error."""
        return bool(self.about) and not self.result and self.alive is False

    @property
    def status(self) -> str:
        if self.is_broken_off:
            return "broken off"
        return str(self.result.get("status") or ("running" if self.has_steps else "waiting"))

    def status_of(self, job: JobFiles) -> str:
        status = str(job.result.get("status") or "")
        if status in {"done", "failed"}:
            return "ended early" if status == "done" and job.name in self.ends else status
        if self.result or self.is_broken_off:
            return "stopped"
        if job.step and job.step >= (job.info.get("steps") or math.inf):
            return "done"
        return "running" if job.step else "waiting"


class _ByJob:
    """Lines of a file by job, kept while it grows."""

    def __init__(self, path: Path, *keys: str) -> None:
        self.file = Followed(path, "job", "step", *keys, is_sound=_is_of_a_job)
        self.jobs: dict[str, list[Line]] = {}
        self._known, self._times = 0, 0

    def look(self) -> bool:
        changed = self.file.look()
        if self.file.times != self._times:
            self.jobs, self._known, self._times = {}, 0, self.file.times
        for line in self.file.lines[self._known :]:
            self.jobs.setdefault(line["job"], []).append(line)
        self._known = len(self.file.lines)
        return changed


class FollowedRun:
    """A run's output folder, which may not be there yet; each look reads what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics, self.samples = _ByJob(folder / METRICS), _ByJob(folder / SAMPLES, "samples")
        self.evals = _ByJob(folder / EVALS, "eval_loss")
        self.microbatches = Followed(folder / MICROBATCHES, "capacity", "tokens", is_sound=_is_microbatch)
        self.windows = Followed(folder / WINDOWS, "window", "microbatches", "bound", is_sound=_is_window)
        self.journal = Followed(folder / JOURNAL, EDITION)
        self.about: Line = {}
        self.alive: bool | None = None
        self._state: Any = None
        self._folded = 0
        """Lines of the journal that are in `about`, or in run.json."""
        self._ends: dict[str, tuple[Any, Line]] = {}

    @property
    def times(self) -> tuple[int, ...]:
        """Another value where a file became another one."""
        files = (self.metrics.file, self.evals.file, self.samples.file, self.microbatches, self.windows)
        return tuple(file.times for file in files)

    def look(self) -> bool:
        """Whether anything is new."""
        files = (self.metrics, self.evals, self.samples, self.microbatches, self.windows, self.journal)
        changed = [file.look() for file in files]  # all of them
        alive = is_held(self.folder / LOCK)
        state = alive, self.journal.times, *(_stamp(self.folder / name) for name in (RECORD, "sweep.json"))
        if state != self._state:
            self._state, self.alive, self._folded = state, alive, 0
            self.about = read_object(self.folder / RECORD) or {}
            changed.append(True)
        for line in self.journal.lines[self._folded :]:
            if line[EDITION] == self.about.get(EDITION):
                with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                    fold(self.about, line)
        self._folded = len(self.journal.lines)
        return any(changed)

    def files(self) -> RunFiles:
        """Files as they have been read so far."""
        config = self.about.get("config") or {}
        template = (config.get("sweep") or {}).get("job")  # the template is not trained itself
        configs = {str(job["name"]): job for job in config.get("jobs", []) if job["name"] != template}
        names = list(configs) or list(self.metrics.jobs)
        information, results = self.about.get("jobs") or {}, (self.about.get("result") or {}).get("jobs") or {}
        jobs = [
            JobFiles(
                name, f"job-{index}", configs.get(name, {}), information.get(name) or {},
                results.get(name) or self._ended(name, configs), self.metrics.jobs.get(name, []),
                self.evals.jobs.get(name, []), self.samples.jobs.get(name, []),
            )
            for index, name in enumerate(names)
        ]  # fmt: skip
        # a window that was planned again, after memory ran out, stands there twice
        windows = {line["window"]: line for line in self.windows.lines}
        return RunFiles(
            self.folder, self.about, jobs, self.microbatches.lines, list(windows.values()), self.alive
        )  # fmt: skip

    def _ended(self, name: str, known: Mapping[str, Any]) -> Line:
        """Status of a job that has already ended in a run in progress; empty otherwise. Only names in run.json are those of
        folders."""
        if name not in known or "/" in name:
            return {}
        file = self.folder / name / "trainer_state.json"
        stamp = _stamp(file)
        if name not in self._ends or self._ends[name][0] != stamp:
            state = read_object(file) or {} if stamp is not None else {}
            self._ends[name] = stamp, {key: state.get(key) for key in ("status", "failure")}
        return self._ends[name][1]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is one that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_of_a_job(line: Line) -> bool:
    return isinstance(line["job"], str) and is_number(line["step"])


def _is_microbatch(line: Line) -> bool:
    tokens = line["tokens"]
    return isinstance(tokens, dict) and all(map(is_number, [line["capacity"], *tokens.values()]))


def _is_window(line: Line) -> bool:
    return all(is_number(line[key]) for key in ("window", "microbatches", "bound"))


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _series(lines: list[Line], key: str) -> list[Point]:
    """(step, value) of every line with a finite number at `key`."""
    return [(float(line["step"]), float(value)) for line in lines if is_number(value := line.get(key))]


def number_at(line: Line, key: str) -> float:
    """Number of a line; 0 where there is none."""
    value = line.get(key)
    return value if is_number(value) else 0.0
