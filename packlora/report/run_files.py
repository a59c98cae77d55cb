"""What a run has written, read back: run.json, metrics.jsonl, evals.jsonl, microbatches.jsonl and windows.jsonl.

Any of them may be missing, empty or still growing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packlora.report.charts import Point
from packlora.report.metrics import read_lines

Line = dict[str, Any]


@dataclass
class JobFiles:
    """One job: what was asked for, what it consists of, what has happened."""

    name: str
    style: str
    config: Line
    info: Line
    result: Line
    metrics: list[Line]
    evals: list[Line]

    def series(self, key: str) -> list[Point]:
        return _series(self.metrics, key)

    @property
    def held_out(self) -> list[Point]:
        return _series(self.evals, "eval_loss")

    @property
    def kind(self) -> str:
        adapter = self.config.get("adapter", {})
        return ("rs" if adapter.get("use_rslora") else "") + ("DoRA" if adapter.get("use_dora") else "LoRA")

    @property
    def step(self) -> int:
        return max([int(self.result.get("step") or 0), *(int(line["step"]) for line in self.metrics)])

    @property
    def tokens(self) -> int:
        return sum(int(line.get("tokens") or 0) for line in self.metrics)


@dataclass
class RunFiles:
    """Everything read from an output folder."""

    folder: Path
    about: Line
    jobs: list[JobFiles]
    metrics: list[Line]
    microbatches: list[Line]
    windows: list[Line]

    @property
    def config(self) -> Line:
        return self.about.get("config") or {}

    @property
    def result(self) -> Line:
        return self.about.get("result") or {}

    @property
    def elapsed(self) -> float:
        return max((float(line.get("elapsed") or 0.0) for line in self.metrics), default=0.0)

    @property
    def status(self) -> str:
        return str(self.result.get("status") or ("running" if self.metrics else "waiting"))

    def status_of(self, job: JobFiles) -> str:
        status = str(job.result.get("status") or "")
        if status in {"done", "failed"}:
            return status
        if self.result:
            return "stopped"
        if job.step and job.step >= (job.info.get("steps") or math.inf):
            return "done"
        return "running" if job.step else "waiting"


def read_run(folder: Path) -> RunFiles:
    """Everything in an output folder."""
    about = _parse(_read_text(folder / "run.json")) or {}
    metrics = read_lines(folder / "metrics.jsonl", "job", "step")
    evals = read_lines(folder / "evals.jsonl", "job", "step", "eval_loss")
    config = about.get("config") or {}
    template = (config.get("sweep") or {}).get("job")  # which is not trained itself
    configs = {str(job["name"]): job for job in config.get("jobs", []) if job["name"] != template}
    names = list(configs) or list(dict.fromkeys(str(line["job"]) for line in metrics))
    information, results = about.get("jobs") or {}, (about.get("result") or {}).get("jobs") or {}
    jobs = [
        JobFiles(
            name,
            style=f"job-{index}",
            config=configs.get(name, {}),
            info=information.get(name) or {},
            result=results.get(name) or _ended(folder / name),
            metrics=[line for line in metrics if line["job"] == name],
            evals=[line for line in evals if line["job"] == name],
        )
        for index, name in enumerate(names)
    ]
    microbatches = read_lines(folder / "microbatches.jsonl", "capacity", "tokens")
    # a window that was planned again, after memory ran out, stands there twice
    windows = {line["window"]: line for line in read_lines(folder / "windows.jsonl", "window", "microbatches", "bound")}
    return RunFiles(folder, about, jobs, metrics, microbatches, list(windows.values()))


def _ended(folder: Path) -> Line:
    """How a job of a run in progress has ended already, if it has."""
    state = _parse(_read_text(folder / "trainer_state.json")) or {}
    return {key: state.get(key) for key in ("status", "failure")}


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _parse(text: str) -> Line | None:
    """A JSON object, or None where the text is not one, as a line that is still being written."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _series(lines: list[Line], key: str) -> list[Point]:
    """(step, value) of every line with a finite number at `key`."""
    points = [(float(line["step"]), line.get(key)) for line in lines]
    return [(step, float(value)) for step, value in points if isinstance(value, (int, float)) and math.isfinite(value)]
