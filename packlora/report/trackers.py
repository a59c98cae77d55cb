"""Trackers of other projects as subscribers: TensorBoard, Trackio, Weights & Biases, MLflow.

Each job of a run is a run of the tracker, in a group that has the name of the output folder; a resumed run goes on with the
same ones. Nothing leaves this machine unless the tracker's own environment variables say so. What a tracker raises costs the
run a note, and it is told nothing more.

Jobs that learn from rewards and have `log_completions` also show completions of each logged step. They are read from the step's
file once the step is taken: completions may be drawn steps ahead, and Weights & Biases drops what does not come in the order of
steps.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from packlora.errors import InputError
from packlora.events import (
    Evaluated,
    Event,
    JobDone,
    JobFailed,
    JobJoined,
    RunBegan,
    RunEnded,
    SavePointReached,
    Stepped,
    Subscriber,
)
from packlora.report.metrics import LoggedSteps

FOLDER = "trackers"
COMPLETIONS = "completions"
"""Name of what is shown of a step's completions, which is TRL's."""
WRITTEN_EVERY, MOST_KEPT = 10.0, 900
"""Seconds between transactions with mlflow, and the most numbers in one; mlflow takes 1000."""
PACKAGES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb", "mlflow": "mlflow"}
"""Package that each tracker needs."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises InputError where the package of a tracker is not there."""
    for name in names:
        package = PACKAGES[name]
        if sys.modules.get(package) is None and (package in sys.modules or importlib.util.find_spec(package) is None):
            raise InputError(
                f"trackers: {name} needs the package {package}: pip install {package}, or 'packlora[trackers]' for tensorboard "
                "and trackio; or leave it out"
            )


class JobRun(Protocol):
    """A job in a tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def show(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log completions; all rows have the same keys."""

    def flush(self) -> None: ...

    def finish(self, status: str) -> None: ...


class Tracker:
    """Base class of trackers: it turns events into numbers of jobs by step.

    Args:
        open_job: makes a job's run, from the run's id, the name of the group, the job's name, its configuration and its step.
        tells_all: the numbers that earlier sessions of a resumed run logged are logged again.
    """

    def __init__(
        self, open_job: Callable[[str, str, str, Mapping[str, Any], int], JobRun], tells_all: bool = False
    ) -> None:
        self._open, self._tells_all = open_job, tells_all
        self._runs: dict[str, JobRun] = {}
        self._logged: set[str] = set()
        """Jobs with numbers that were logged since they were last flushed."""
        self._showing: dict[str, Path] = {}
        """Folders of the jobs that show completions."""
        self._run, self._group, self._folder = "", "", Path()
        self._steps = LoggedSteps()

    def __call__(self, event: Event) -> None:
        logged = self._steps.takes(event)
        match event:
            case RunBegan():
                self._run, self._group, self._folder = event.run, event.output_dir.resolve().name, event.output_dir
                configs = {job["name"]: job for job in event.config["jobs"]}
                for job in event.jobs:
                    self._begin(job.name, configs[job.name], job.step)
                for earlier in event.earlier if self._tells_all else ():
                    self(earlier)
            case JobJoined(job=name, config=config):
                self._begin(name, config, 0)
            case Stepped() if logged:
                rate = event.tokens / max(event.seconds, 1e-9)
                values = {"loss": event.loss, "grad_norm": event.grad_norm, "learning_rate": event.lr}
                self._log(event.job, event.step, values | {"tokens_per_second": rate} | _known(event.metrics))
                self._show(event.job, event.step)
            case Evaluated(job=name, step=step, eval_loss=loss, metrics=more):
                self._log(name, step, {"eval_loss": loss} | _known(more))
            case SavePointReached():
                for name in self._logged & self._runs.keys():
                    self._runs[name].flush()
                self._logged.clear()
            case JobDone(job=name) | JobFailed(job=name):
                if name in self._runs:
                    self._runs.pop(name).finish("done" if isinstance(event, JobDone) else "failed")
            case RunEnded():
                for run in self._runs.values():
                    run.finish("interrupted")
                self._runs.clear()

    def _begin(self, name: str, config: Mapping[str, Any], step: int) -> None:
        self._runs[name] = self._open(self._run, self._group, name, config, step)
        if (config.get("rollout") or {}).get("log_completions"):
            self._showing[name] = self._folder / name

    def _log(self, job: str, step: int, values: Mapping[str, float]) -> None:
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        if job in self._runs and finite:
            self._runs[job].log(step, finite)
            self._logged.add(job)

    def _show(self, job: str, step: int) -> None:
        if job not in self._runs or job not in self._showing:
            return
        if rows := import_module("packlora.rl.examples").examples(self._showing[job], step):
            self._runs[job].show(step, rows)
            self._logged.add(job)


def _known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if value is not None}


NEWLINE, TAB = "\n", "    "


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a text: numbers in bold, and each text below its name, indented, as it is."""
    return "\n\n---\n\n".join("\n\n".join(_parts(row)) for row in rows) + "\n"


def _parts(row: Mapping[str, Any]) -> list[str]:
    texts = {key: value for key, value in row.items() if isinstance(value, str)}
    others = {key: value for key, value in row.items() if key not in texts}
    numbers = ", ".join(f"**{key} {f'{own:.6g}' if isinstance(own, float) else own}**" for key, own in others.items())
    return [numbers, *(f"{key}:\n\n{TAB}{value.replace(NEWLINE, NEWLINE + TAB)}" for key, value in texts.items())]


# --- TensorBoard -----------------------------------------------------------------------------------------------------------


class TensorBoard(Tracker):
    """Event files in trackers/tensorboard/<job>, written anew when a run is resumed."""

    def __init__(self, output_dir: Path) -> None:
        super().__init__(lambda run, group, job, config, step: _TensorBoardRun(output_dir, job), tells_all=True)


class _TensorBoardRun:
    def __init__(self, output_dir: Path, job: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = output_dir / FOLDER / "tensorboard" / job
        shutil.rmtree(folder, ignore_errors=True)
        self.writer: Any = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def show(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.writer.add_text(COMPLETIONS, markdown(rows), step)

    def flush(self) -> None:
        self.writer.flush()

    def finish(self, status: str) -> None:
        self.writer.close()


# --- Trackio and Weights & Biases, which have one interface ----------------------------------------------------------------


class Trackio(Tracker):
    """Runs in the project of the group's name, resumed by their names; `trackio show` shows them."""

    def __init__(self) -> None:
        import trackio

        def open_job(run: str, group: str, job: str, config: Mapping[str, Any], step: int) -> JobRun:
            return _Logged(
                trackio.init(project=group, name=job, group=run, config=dict(config), resume="allow", embed=False),
                trackio.Table,
            )

        super().__init__(open_job)


class Wandb(Tracker):
    """Runs in trackers/wandb, offline where WANDB_MODE does not say otherwise; `wandb sync` sends them."""

    def __init__(self, output_dir: Path) -> None:
        import wandb

        folder = output_dir / FOLDER
        folder.mkdir(exist_ok=True)

        def open_job(run: str, group: str, job: str, config: Mapping[str, Any], step: int) -> JobRun:
            return _Logged(
                wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "packlora"), group=group, name=job, id=f"{run}-{job}",
                    resume="allow", config=dict(config), dir=str(folder), mode=os.environ.get("WANDB_MODE", "offline"),
                    reinit="create_new",
                ),
                wandb.Table,
            )  # fmt: skip

        super().__init__(open_job)


class _Logged:
    def __init__(self, run: Any, table: Callable[..., Any]) -> None:
        self.run, self._table = run, table

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def show(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({COMPLETIONS: table}, step=step)

    def flush(self) -> None:
        pass

    def finish(self, status: str) -> None:
        self.run.finish()


# --- MLflow ----------------------------------------------------------------------------------------------------------------


class Mlflow(Tracker):
    """Runs of the experiment of the group's name, in trackers/mlflow.db where MLFLOW_TRACKING_URI does not say otherwise."""

    def __init__(self, output_dir: Path) -> None:
        import mlflow

        (output_dir / FOLDER).mkdir(exist_ok=True)
        here = f"sqlite:///{(output_dir / FOLDER / 'mlflow.db').resolve()}"
        address = os.environ.get("MLFLOW_TRACKING_URI", here)
        client = mlflow.MlflowClient(tracking_uri=address)
        files = (output_dir / FOLDER / "mlflow").resolve().as_uri() if address == here else None
        super().__init__(lambda run, group, job, config, step: _MlflowRun(client, files, run, group, job, config))


class _MlflowRun:
    """A job's run. files: address of what runs of a new experiment store as files; None: the server chooses it."""

    def __init__(
        self, client: Any, files: str | None, run: str, group: str, job: str, config: Mapping[str, Any]
    ) -> None:
        from mlflow.entities import Metric

        self.client, self._metric = client, Metric
        self._kept: list[Any] = []
        """Numbers that are not written yet."""
        self._written = time.time()
        known = client.get_experiment_by_name(group)
        experiment = known.experiment_id if known is not None else client.create_experiment(group, files)
        tag = f"{run}-{job}"
        found = client.search_runs([experiment], filter_string=f"tags.`packlora.job` = '{tag}'", max_results=1)
        if found:
            self.id = found[0].info.run_id
            client.update_run(self.id, status="RUNNING")
            return
        self.id = client.create_run(experiment, tags={"packlora.job": tag}, run_name=job).info.run_id
        for section in ("adapter", "train"):
            for key, value in config.get(section, {}).items():
                client.log_param(self.id, f"{section}.{key}", value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Kept for WRITTEN_EVERY seconds: a transaction takes longer than many a step."""
        now = time.time()
        self._kept += [self._metric(name, value, int(now * 1000), step) for name, value in values.items()]
        if len(self._kept) > MOST_KEPT or now - self._written > WRITTEN_EVERY:
            self.flush()

    def show(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.client.log_text(self.id, markdown(rows), f"{COMPLETIONS}/step-{step}.md")

    def flush(self) -> None:
        kept, self._kept, self._written = self._kept, [], time.time()
        if kept:
            self.client.log_batch(self.id, kept)

    def finish(self, status: str) -> None:
        self.flush()
        ends = {"done": "FINISHED", "failed": "FAILED"}
        self.client.set_terminated(self.id, status=ends.get(status, "KILLED"))


def trackers(names: Sequence[str], output_dir: Path) -> tuple[list[Subscriber], list[str]]:
    """Trackers that a run requests, and notes about those that cannot start."""
    makes: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(output_dir), "trackio": Trackio,
        "wandb": lambda: Wandb(output_dir), "mlflow": lambda: Mlflow(output_dir),
    }  # fmt: skip
    out: list[Subscriber] = []
    notes = []
    for name in names:
        try:
            out.append(makes[name]())
        except Exception as error:  # raised by another project's code
            notes.append(f"tracker {name} cannot begin ({type(error).__name__}: {error}); training goes on without it")
    return out, notes
