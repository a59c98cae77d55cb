"""How a run ended: what packlora.train returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class JobResult:
    """How one job ended. folder: its PEFT adapter; losses: held-out, None without eval_path; rate: tokens/s in this session.

    status: done, failed, running (interrupted) or stopped (left out of a resumed run: its data is gone).
    """

    status: str
    step: int
    folder: Path
    failure: str | None = None
    eval_before: float | None = None
    eval_after: float | None = None
    tokens_per_second: float = 0.0


@dataclass(slots=True)
class Result:
    """How a run ended; seconds and tokens are of this session.

    status: done, failed (a job failed or was left out, the others finished) or interrupted (signal says by which, None: a
    subscriber asked for it).
    """

    status: str
    seconds: float
    tokens: int
    output_dir: Path
    report: Path
    jobs: dict[str, JobResult] = field(default_factory=dict)
    signal: int | None = None
    incomplete: dict[str, str] = field(default_factory=dict)
    """Logs that lack something because it could not be written, and why. Adapters are never among them."""

    @property
    def exit_code(self) -> int:
        if self.signal is not None:
            return 128 + self.signal
        return 1 if self.status == "failed" else 0
