"""What a person sees while a run trains: a live table per job on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from packlora.runtime.job import Job, StepResult
from packlora.terminal import standard_output

RATE_WINDOW = 20
"""Steps over which the rate of tokens is averaged."""

GAP, NAME, BAR = 2, 20, 20
"""Of the live table, in characters: between columns, of a name that must be cut, of the bar at its longest."""
LEAST_NEEDED = ("lr", "grad norm", "progress", "held-out")
"""Columns that are left out of it on a narrow terminal, the first one first."""


def duration(seconds: float) -> str:
    """1:05 or 2:03:04."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """The display of one run; use as a context manager."""

    def __init__(self, jobs: Sequence[Job], console: Console | None = None) -> None:
        self.jobs = jobs
        self._start = time.perf_counter()
        self.console = console or Console(file=standard_output())
        self._steps: dict[str, list[tuple[float, StepResult]]] = {job.name: [] for job in jobs}
        self._tokens: dict[str, int] = {job.name: 0 for job in jobs}
        self._evals: dict[str, float] = {}
        self._total = {job.name: self._all_tokens(job) for job in jobs}
        self._live = (
            Live(get_renderable=self._table, console=self.console, refresh_per_second=4)
            if self.console.is_terminal
            else None
        )

    @staticmethod
    def _all_tokens(job: Job) -> int:
        per_epoch = sum(sample.num_tokens for sample in job.data.samples)
        return int(per_epoch * job.data.num_steps / job.data.batches_per_epoch)

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def training_starts(self) -> None:
        """Rates count from here: loading and the first evaluation are not training."""
        self._start = time.perf_counter()

    def message(self, text: str) -> None:
        """A line that stays above the table; a terminal breaks it between words."""
        self.console.print(Text(text), soft_wrap=not self.console.is_terminal)

    def evaluated(self, job: Job, loss: float) -> None:
        self._evals[job.name] = loss
        if not self._live:
            self.message(f"{job.name}  step {job.step}  held-out loss {loss:.4f}")

    def stepped(self, job: Job, result: StepResult) -> None:
        recent = self._steps[job.name]
        recent.append((time.perf_counter(), result))
        del recent[:-RATE_WINDOW]
        self._tokens[job.name] += result.tokens
        if not self._live:
            left = self.time_left()
            self.message(
                f"{job.name}  step {result.step}/{job.data.num_steps}  loss {result.loss:.4f}  "
                f"grad norm {result.grad_norm:.3g}  lr {result.lr:.3g}  {self.rate(job):.0f} tokens/s"
                + (f"  {duration(left)} left" if left is not None else "")
            )

    def rate(self, job: Job) -> float:
        """Tokens per second of a job, over its last steps."""
        recent = self._steps[job.name]
        if not recent:
            return 0.0
        if len(recent) == 1:
            return recent[0][1].tokens / max(recent[0][0] - self._start, 1e-9)
        return sum(result.tokens for _, result in recent[1:]) / max(recent[-1][0] - recent[0][0], 1e-9)

    def average_rate(self, job: Job) -> float:
        """Tokens per second of a job from the start of training to its last step, in this session."""
        if not self._steps[job.name]:
            return 0.0
        return self._tokens[job.name] / max(self._steps[job.name][-1][0] - self._start, 1e-9)

    def time_left(self) -> float | None:
        """Seconds from now until the last job is done, if the jobs keep their rates; None before the first step of one."""
        now = time.perf_counter()
        left = []
        for job in self.jobs:
            if job.status == "running" and job.step < job.data.num_steps:
                if not self.rate(job):
                    return None
                rest = self._total[job.name] * (1 - job.step / job.data.num_steps) / self.rate(job)
                left.append(max(0.0, rest - (now - self._steps[job.name][-1][0])))
        return max(left, default=0.0)

    def _table(self) -> Group:
        rows = [self._row(job) for job in self.jobs]
        widths = _fitting(rows, self.console.width)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in widths:
            table.add_column(name, justify="left" if name in ("job", "progress") else "right", no_wrap=True)
        for job, row in zip(self.jobs, rows, strict=True):
            colour = {"failed": "red", "done": "green"}.get(job.status, "cyan")
            cells = {name: Text(_cut(text, widths.get(name, 0))) for name, text in row.items()}
            cells["job"].stylize(colour)
            bar = widths.get("progress", 0)
            done = round(bar * job.step / job.data.num_steps)
            cells["progress"] = Text.assemble(("━" * done, colour), ("━" * (bar - done), "dim"))
            table.add_row(*(cells[name] for name in widths))
        foot = f"{duration(time.perf_counter() - self._start)} elapsed"
        if running := [job for job in self.jobs if job.status == "running"]:
            left = self.time_left()
            foot += f", {sum(map(self.rate, running)):.0f} tokens/s"
            foot += f", {duration(left)} left" if left is not None else ""
        return Group(table, Text(foot, style="dim"))

    def _row(self, job: Job) -> dict[str, str]:
        """A job's cells by heading; the bar is drawn where its width is known."""
        last = self._steps[job.name][-1][1] if self._steps[job.name] else None
        return {
            "job": job.name,
            "step": f"{job.step}/{job.data.num_steps}",
            "progress": "",
            "loss": f"{last.loss:.4f}" if last else "",
            "held-out": f"{self._evals[job.name]:.4f}" if job.name in self._evals else "",
            "lr": f"{last.lr:.3g}" if last else "",
            "grad norm": f"{last.grad_norm:.3g}" if last else "",
            "tokens/s": "failed" if job.status == "failed" else f"{self.rate(job):.0f}",
        }


def _fitting(rows: Sequence[dict[str, str]], room: int) -> dict[str, int]:
    """Columns that fit into a line of `room` characters, with their widths: what is needed least is left out first, then names
    are cut; what is left over goes to names and to the bar."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    longest = widths["job"]
    widths["job"] = min(longest, NAME)

    def over() -> int:
        return sum(widths.values()) + GAP * (len(widths) - 1) - room

    for name in LEAST_NEEDED:
        if over() > 0:
            del widths[name]
    widths["job"] = max(4, min(longest, widths["job"] - over()))
    if "progress" in widths:
        widths["progress"] = min(BAR, widths["progress"] - over())
    return widths


def _cut(text: str, width: int) -> str:
    """Without its middle where it is too long: names differ at their ends."""
    if len(text) <= width:
        return text
    return text[: width // 2] + "…" + text[len(text) - (width - 1 - width // 2) :]
