"""Log files that a run writes from its events while it trains: metrics.jsonl, evals.jsonl, samples.jsonl and others, see LINES.

Training depends on none of these files: lines that cannot be written are lost, with one warning.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from packlora.errors import unwritten
from packlora.events import (
    CheckpointBegins,
    Evaluated,
    Event,
    JobJoined,
    MicrobatchDone,
    PipelineRan,
    RunBegan,
    RunEnded,
    Sampled,
    Stepped,
    WindowPlanned,
)
from packlora.files import write_text
from packlora.portable import flags
from packlora.report.follow import Followed

METRICS, EVALS, MICROBATCHES, WINDOWS = "metrics.jsonl", "evals.jsonl", "microbatches.jsonl", "windows.jsonl"
PIPELINE, SAMPLES = "pipeline.jsonl", "samples.jsonl"
"""The first is there where a pipeline trains."""
LINES = {
    Stepped: METRICS,
    Evaluated: EVALS,
    MicrobatchDone: MICROBATCHES,
    WindowPlanned: WINDOWS,
    Sampled: SAMPLES,
    PipelineRan: PIPELINE,
}
"""Events that are written as one line each, and their files; the keys are the names of their fields."""


class BestEffort:
    """Writes files that training does not depend on: what fails costs a note, once for each file."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.incomplete: dict[str, str] = {}
        """Files that lack something, and why it could not be written."""

    def write(self, name: str, write: Callable[[], object]) -> None:
        """Write a whole file; it lacks nothing any more where that succeeds."""
        try:
            write()
            self.incomplete.pop(name, None)
        except Exception as error:  # a defect of the report's own, too, must not cost the run
            self.failed(name, error)

    def failed(self, name: str, error: Exception) -> None:
        """A file lacks something from now on."""
        if name not in self.incomplete:
            self.incomplete[name] = reason = unwritten(error) or f"{type(error).__name__}: {error}"
            self._note(f"{name} is incomplete: {reason}; training goes on")


class LoggedSteps:
    """Filter of the steps that are logged, by the jobs' logging_steps; it receives all events of a run."""

    def __init__(self) -> None:
        self._every: dict[str, int] = {}

    def takes(self, event: Event) -> bool:
        """Whether an event is to be logged: not a step between two that are due."""
        match event:
            case RunBegan(config=config):
                self._every |= {job["name"]: logging_steps(job) for job in config.get("jobs", ())}
            case JobJoined(job=name, config=job):
                self._every[name] = logging_steps(job)
            case Stepped(job=name, step=step):
                return step % self._every.get(name, 1) == 0
        return True


def logging_steps(job: Mapping[str, Any]) -> int:
    """logging_steps of a job given as in a run file."""
    every: int = job.get("train", {}).get("logging_steps", 1)
    return every


class Logs:
    """The jsonl files of a run, a subscriber. A checkpoint waits until they are on the disk."""

    def __init__(self, folder: Path, files: BestEffort) -> None:
        self._steps = LoggedSteps()
        self._files: dict[type, JsonLines] = {
            kind: JsonLines(folder / name, files.failed) for kind, name in LINES.items() if name != PIPELINE
        }
        self._new = lambda name: JsonLines(folder / name, files.failed)

    def __call__(self, event: Event) -> None:
        if not self._steps.takes(event):
            return
        if isinstance(event, CheckpointBegins):
            for file in self._files.values():
                file.sync()
        elif isinstance(event, RunEnded):
            for file in self._files.values():
                file.close()
        elif type(event) in LINES:
            if type(event) not in self._files:
                self._files[type(event)] = self._new(LINES[type(event)])
            line = {field.name: getattr(event, field.name) for field in fields(event)}
            if isinstance(event, Evaluated | Stepped):
                line |= line.pop("metrics")
            self._files[type(event)].write(**line)


class JsonLines:
    """An append-only jsonl file; each line reaches the file before `write` returns. NaN becomes null.

    A line that cannot be written is lost and costs nothing else: `failed` is told why, each time.
    """

    def __init__(self, path: Path, failed: Callable[[str, OSError], None]) -> None:
        self.path, self._failed = path, failed
        self._file: int | None = None
        self._torn = self._grown = False
        with contextlib.suppress(OSError):  # the first line tries again
            self._open()

    def write(self, **line: Any) -> None:
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        text = json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"
        data = ("\n" * self._torn + text).encode()
        try:
            file, self._grown = self._open(), True
            while data:
                data = data[os.write(file, data) :]
                self._torn = bool(data)
        except OSError as error:
            self._failed(self.path.name, error)

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self.path, flags("O_WRONLY", "O_APPEND", "O_CREAT"), 0o666)
        return self._file

    def sync(self) -> None:
        """Wait until all lines are on the disk; where there is no new one, they are."""
        if not self._grown:
            return
        try:
            os.fsync(self._open())
            self._grown = False
        except OSError as error:
            self._failed(self.path.name, error)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


def read_lines(path: Path, *keys: str) -> list[dict[str, Any]]:
    """Lines of a jsonl file that hold all the keys, but for those that are cut short; none where there is no such file."""
    file = Followed(path, *keys)
    while file.look():
        pass
    return file.lines


def metric_lines(
    histories: Mapping[str, list[dict[str, Any]]], every: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl for jobs with these log histories, in the order of time. every: logging_steps by job; 1 where it
    is absent."""
    each = every or {}
    steps = [
        (line["elapsed"], name, line)
        for name, own in histories.items()
        for line in own
        if "loss" in line and line["step"] % each.get(name, 1) == 0
    ]
    return [
        {
            "job": name, "step": line["step"], "loss": line["loss"], "grad_norm": line["grad_norm"],
            "lr": line["learning_rate"], "tokens": line["tokens"], "seconds": line["seconds"], "elapsed": elapsed,
            **told_in(line),
        }
        for elapsed, name, line in sorted(steps, key=lambda step: step[0])
    ]  # fmt: skip


def told_in(line: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a job's objective and terms in a step's line of a log history."""
    return {key: value for key, value in line.items() if key not in OF_A_STEP}


OF_A_STEP = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "seconds", "elapsed")
"""Keys of such a line that every step has."""


def eval_lines(histories: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Lines of evals.jsonl for jobs with these log histories, in the order of time."""
    evals = [(line["elapsed"], name, line) for name, own in histories.items() for line in own if "eval_loss" in line]
    return [
        {"job": name, "step": line["step"]} | {key: value for key, value in line.items() if key.startswith("eval_")}
        for _, name, line in sorted(evals, key=lambda found: found[0])
    ]


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rewrite a jsonl file with the lines to keep: what came after the checkpoint that a run resumes from goes, and so do lines
    that are not what a run writes there, on which `keep` raises KeyError, TypeError or AttributeError.
    """

    def kept(line: dict[str, Any]) -> bool:
        try:
            return keep(line)
        except (KeyError, TypeError, AttributeError):
            return False

    lines = [line for line in read_lines(path) if kept(line)]
    if path.exists():
        write_lines(path, lines)
    return lines


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Replace a jsonl file."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
