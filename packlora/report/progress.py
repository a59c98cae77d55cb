"""Progress display of a run in training: a live table of the jobs on a terminal, plain lines otherwise.

Progress is a subscriber: all its information comes from the events of the run.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from packlora.errors import plural
from packlora.events import (
    Evaluated,
    Event,
    JobDone,
    JobFailed,
    JobJoined,
    MemoryRanOut,
    Note,
    RunBegan,
    RunEnded,
    Stepped,
    StopAsked,
    TrainingBegan,
)
from packlora.report.metrics import LoggedSteps
from packlora.report.screen import Screen
from packlora.terminal import standard_output

RATE_WINDOW = 20
"""Steps over which the rate of tokens is averaged."""

COMPILES = (
    "compiling kernels for the first microbatch: up to half a minute where none are cached, a second where they are"
)

GAP, NAME, BAR = 2, 20, 20
"""Widths in the live table, in characters: the gap between columns, the longest name, and the longest bar."""
AROUND = 4
"""Lines of a terminal that are not for jobs: headings, the last line, and two of what was said before."""
LEAST_NEEDED = ("lr", "grad norm", "progress", "held-out")
"""Columns that are left out of it on a narrow terminal, the first one first."""


def duration(seconds: float) -> str:
    """1:05 or 2:03:04."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(slots=True)
class _Shown:
    """State of a job that is shown, from the events so far. recent: its last steps. rate: tokens per second over these steps,
    after the first one by the clock of the process that took them, whose events may come late."""

    name: str
    status: str
    step: int
    num_steps: int
    tokens: int
    recent: deque[Stepped] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    rate: float = 0.0
    held_out: str = ""

    def take(self, event: Stepped, now: float, start: float) -> float:
        """Take a step. start: of training.

        Returns:
            When the job will be done, if it keeps its rate; 0 after its last step, infinite where it has no rate.
        """
        self.step = event.step
        self.recent.append(event)
        first, *later = self.recent
        tokens = sum(own.tokens for own in later) if later else event.tokens
        self.rate = tokens / max(event.elapsed - first.elapsed if later else now - start, 1e-9)
        if self.step >= self.num_steps:
            return 0.0
        return now + self.tokens * (1 - self.step / self.num_steps) / self.rate if self.rate else math.inf


class Progress:
    """The display of one run, a subscriber. As a context manager it takes the live table away also where a run breaks off."""

    @property
    def in_lines(self) -> bool:
        """Whether every step is a line."""
        return self._live is None

    def __init__(self, console: Screen | None = None) -> None:
        self.console = console or Screen(file=standard_output())
        self.jobs: dict[str, _Shown] = {}
        self._ends: dict[str, float] = {}
        """Predicted end of each job at its present rate: 0 where it takes no more steps, infinite before its first one."""
        self._start = time.perf_counter()
        self._live: Live | None = None
        self._steps = LoggedSteps()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __call__(self, event: Event) -> None:
        logged = self._steps.takes(event)
        match event:
            case RunBegan():
                self._begin(event)
            case TrainingBegan(compiles):  # rates count from here: loading and the first evaluation are not training
                self._start = time.perf_counter()
                if compiles:
                    self._print(COMPILES)
            case Stepped():
                self._stepped(event, logged)
            case Evaluated(job, step, loss, more):
                name, value = ("reward", more["eval_reward"]) if "eval_reward" in more else ("loss", loss)
                self.jobs[job].held_out = "" if value is None else f"{value:.4f}"
                if self.in_lines:
                    self._print(f"{job}  step {step}  held-out {name} {self.jobs[job].held_out}")
            case JobJoined(job, round_, steps, tokens):
                self.jobs[job], self._ends[job] = _Shown(job, "running", 0, steps, tokens), math.inf
                self._print(f"{job} joins at round {round_}, for {plural(steps, 'step')}")
            case JobFailed(job, step):
                self.jobs[job].status, self.jobs[job].step, self._ends[job] = "failed", step, 0.0
                others = any(own.status == "running" for own in self.jobs.values())
                self._print(event.text + "; the other jobs go on" * others)
            case JobDone(job):
                self.jobs[job].status, self._ends[job] = "done", 0.0
            case Note(text) | MemoryRanOut(text=text):
                self._print(f"note: {text}")
            case StopAsked():
                self._print(event.text)
            case RunEnded():
                self._stop()

    def _begin(self, event: RunBegan) -> None:
        self.jobs = {job.name: _Shown(job.name, job.status, job.step, job.num_steps, job.tokens) for job in event.jobs}
        trains = {job.name: job.status == "running" and job.step < job.num_steps for job in event.jobs}
        self._ends = {name: math.inf if own else 0.0 for name, own in trains.items()}
        self._start = time.perf_counter()
        if self.console.is_interactive:
            self._live = Live(get_renderable=self._table, console=self.console, refresh_per_second=4)
            self._live.start()
        for text in event.notes:
            self._print(f"note: {text}")

    def _stepped(self, event: Stepped, logged: bool) -> None:
        job = self.jobs[event.job]
        self._ends[job.name] = job.take(event, time.perf_counter(), self._start)
        if self.in_lines and logged:
            left, reward = self.time_left(), self._row(job)["reward"]
            self._print(
                f"{job.name}  step {job.step}/{job.num_steps}  loss {event.loss:.4f}  "
                + (f"reward {reward}  " if reward else "")
                + f"grad norm {event.grad_norm:.3g}  lr {event.lr:.3g}  {job.rate:.0f} tokens/s"
                + (f"  {duration(left)} left" if left is not None else "")
            )

    def _print(self, text: str) -> None:
        """A line that stays above the table; a terminal breaks it between words."""
        self.console.print(Text(text), soft_wrap=not self.console.is_terminal)

    def time_left(self) -> float | None:
        """Seconds from now until the last job is done, if the jobs keep their rates; None before the first step of one."""
        end = max(self._ends.values(), default=0.0)
        return None if end == math.inf else max(0.0, end - time.perf_counter())

    def _table(self) -> Group:
        every = list(self.jobs.values())
        jobs = _most_wanted(every, self.console.height - AROUND) if self.console.is_terminal else every
        rows = [self._row(job) for job in jobs]
        widths = _fitting(rows, self.console.width)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in widths:
            table.add_column(name, justify="left" if name in ("job", "progress") else "right", no_wrap=True)
        for job, row in zip(jobs, rows, strict=True):
            colour = {"failed": "red", "done": "green"}.get(job.status, "cyan")
            cells = {name: Text(_cut(text, widths.get(name, 0))) for name, text in row.items()}
            cells["job"].stylize(colour)
            bar = widths.get("progress", 0)
            done = round(bar * job.step / job.num_steps)
            rest = "─" if self.console.no_color or self.console.color_system is None else "━"  # else colours tell
            cells["progress"] = Text.assemble(("━" * done, colour), (rest * (bar - done), "dim"))
            table.add_row(*(cells[name] for name in widths))
        foot = f"{duration(time.perf_counter() - self._start)} elapsed"
        if running := [job for job in every if job.status == "running"]:
            left = self.time_left()
            foot += f", {sum(job.rate for job in running):.0f} tokens/s"
            foot += f", {duration(left)} left" if left is not None else ""
        if len(jobs) < len(every):
            foot += f", {len(every) - len(jobs)} of {len(every)} jobs not shown"
        return Group(table, Text(foot, style="dim"))

    def _row(self, job: _Shown) -> dict[str, str]:
        """A job's cells by heading; the bar is drawn where its width is known."""
        last = job.recent[-1] if job.recent else None
        reward = last.metrics.get("reward") if last else None
        return {
            "job": job.name, "step": f"{job.step}/{job.num_steps}", "progress": "",
            "loss": f"{last.loss:.4f}" if last else "", "reward": "" if reward is None else f"{reward:.4f}",
            "held-out": job.held_out, "lr": f"{last.lr:.3g}" if last else "",
            "grad norm": f"{last.grad_norm:.3g}" if last else "",
            "tokens/s": "failed" if job.status == "failed" else f"{job.rate:.0f}",
        }  # fmt: skip


def _most_wanted(jobs: list[_Shown], room: int) -> list[_Shown]:
    """Select as many jobs as fit, in their order: those that train, then those that have failed, then the last ones that are
    done."""
    places = {"running": 0, "failed": 1, "done": 2}
    order = sorted(range(len(jobs)), key=lambda at: (places[jobs[at].status], -at if jobs[at].status == "done" else at))
    return [jobs[at] for at in sorted(order[: max(1, room)])]


def _fitting(rows: Sequence[dict[str, str]], room: int) -> dict[str, int]:
    """Columns that fit into a line of `room` characters, with their widths: the least needed columns are left out first, then
    names are cut; the room that is left goes to names and to the bar."""
    names = [name for name in rows[0] if name != "reward" or any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
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
    """Cut the middle out of a text that is too long: names differ at their ends."""
    if len(text) <= width:
        return text
    return text[: width // 2] + "…" + text[len(text) - (width - 1 - width // 2) :]
