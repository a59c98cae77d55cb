"""Result of a run: the value that packlora.train returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


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

    @property
    def exit_code(self) -> int:
        """Exit status of the `packlora train` command: 0 done, 1 a job failed, 128 + n stopped by signal n."""
        if self.signal is not None:
            return 128 + self.signal
        return 1 if self.status == "failed" else 0
