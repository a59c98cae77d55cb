"""Result of a run: the value that packlora.train and packlora.Trainer return."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOADING, TABLES = "packlora.api.loading", "packlora.report.tables"
"""Modules that load adapters and write tables, imported by their names where that is asked for."""


@dataclass(slots=True)
class JobResult:
    """Result of one job."""

    status: str
    """done, failed, running (interrupted) or stopped (left out of a resumed run: its data is gone)."""
    step: int
    """Optimizer steps that were taken, with those of earlier sessions."""
    folder: Path
    """Folder of its checkpoints, and of its PEFT adapter once it is done."""
    failure: str | None = None
    """Reason why it failed or was left out, in a sentence."""
    eval_before: float | None = None
    """Held-out loss before training: mean cross entropy, in nats, of a label token. None without eval_path or eval_on_start."""
    eval_after: float | None = None
    """Held-out loss at the last evaluation after a step; None also where there was none."""
    tokens_per_second: float = 0.0
    """Tokens of the job in this session, divided by the seconds of the session."""
    steps_left: int = 0
    """Optimizer steps of the run file that it was not to take yet, as max_steps said."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Metrics of preferences, by TRL's names: eval_rewards/accuracies and others at the evaluation of eval_after; without one,
    rewards/accuracies and others of the last step. None for a value that was not finite."""
    idle_since: int | None = None
    """The step from which on its gradient was exactly 0, to its last one: it learnt nothing any more."""
    overflows: int = 0
    """Steps in float16 that were skipped, since a gradient overflowed at the loss scale of then. `step` counts them."""
    base: Any = field(default=None, repr=False, compare=False)
    """The loaded model that it was trained on; None where the adapter names its base model."""

    @property
    def path(self) -> Path:
        """Folder of the adapter; another name of `folder`."""
        return self.folder

    @property
    def eval_loss(self) -> float | None:
        """Held-out loss of the adapter; another name of `eval_after`."""
        return self.eval_after

    def load(self) -> Any:
        """Load the finished adapter on its base model.

        Returns:
            A PeftModel, in evaluation mode. The base is read once more, in the dtype of the run; where a loaded model was
            trained, its weights are shared, and the model itself stays without PEFT layers.

        Raises:
            InputError: the adapter is not there yet, or its base model cannot be loaded.
        """
        return importlib.import_module(LOADING).load(self.folder, self.base)

    def _repr_html_(self) -> str:
        """Table for a notebook."""
        return str(importlib.import_module(TABLES).of_jobs({self.folder.name: self}))


@dataclass(slots=True)
class Result:
    """Result of a run."""

    status: str
    """done, failed (a job failed or was left out, the others finished) or interrupted (by `signal` or a subscriber)."""
    seconds: float
    """Seconds of this session."""
    tokens: int
    """Tokens that all jobs were trained on in this session."""
    output_dir: Path
    """The folder of the run."""
    report: Path
    """The page (HTML, in one file) that shows the run."""
    jobs: dict[str, JobResult] = field(default_factory=dict)
    """Result of each job, by its name."""
    signal: int | None = None
    """Number of the signal that stopped the run."""
    incomplete: dict[str, str] = field(default_factory=dict)
    """Logs that lack something because it could not be written, and why. Adapters are never among them."""

    def __getitem__(self, name: str) -> JobResult:
        """Result of a job. Raises KeyError, which names the jobs, where there is none of this name."""
        if name not in self.jobs:
            raise KeyError(f"there is no job {name!r}; there are {', '.join(self.jobs)}")
        return self.jobs[name]

    def __iter__(self) -> Iterator[str]:
        """Names of the jobs."""
        return iter(self.jobs)

    def _repr_html_(self) -> str:
        """Table for a notebook."""
        return str(importlib.import_module(TABLES).of_run(self))

    @property
    def exit_code(self) -> int:
        """Exit status of the `packlora train` command: 0 done, 1 a job failed, 128 + n stopped by signal n."""
        if self.signal is not None:
            return 128 + self.signal
        return 1 if self.status == "failed" else 0
