"""The last words of a run on the terminal: a table per job and where things lie."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from packlora.changes import shown_of
from packlora.report.progress import duration
from packlora.report.screen import Screen
from packlora.result import JobResult, Result
from packlora.terminal import standard_output

UNBROKEN = 400
"""Characters of a line where there is no terminal: in a file a job is one line, whatever its name."""
SPEAKERS = 3
"""Number of adapters that the closing lines name for a chat."""
TOLD = ("reward", "rewards/accuracies", "rewards/margins")
"""Columns of jobs with rewards and preferences: of held-out samples where there are some, else of the last step."""


def shown(job: JobResult, name: str) -> str:
    value = job.metrics.get(f"eval_{name}", job.metrics.get(name))
    return "" if value is None else f"{value:.4g}"


def _table(jobs: Mapping[str, JobResult]) -> Table:
    """A line per job."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    told = [name for name in TOLD if any(shown(job, name) for job in jobs.values())]
    for name in ("job", "status", "steps", "held-out loss", *told, "tokens/s"):
        left = ("job", "status", "held-out loss")
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for name, job in jobs.items():
        loss = "" if job.eval_after is None else f"{job.eval_after:.4f}"
        if job.eval_before is not None and loss:
            loss = f"{job.eval_before:.4f} -> {loss}"
        status = ("stopped" if job.status == "running" else job.status) + ", idle" * (job.idle_since is not None)
        more = [*(shown(job, key) for key in told), f"{job.tokens_per_second:.0f}" if job.tokens_per_second else ""]
        table.add_row(Text(name), status, str(job.step), loss, *more)
    return table


def print_summary(result: Result, resume_command: str, whole_command: str | None = None) -> None:
    """Print the end of each job, and the next step.

    Args:
        resume_command: goes on with an interrupted run.
        whole_command: goes on with one that max_steps ended, to the last step of its run file.
    """
    output = standard_output()
    console = Screen(file=output, width=None if output.isatty() else UNBROKEN)

    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    more = shown_of(result.output_dir)
    table, told, best = (None, (), []) if more is None else more.summary(result.output_dir)
    others = {name: job for name, job in result.jobs.items() if name not in told}
    console.print()
    for one in (table, _table(others) if others else None):
        if one is not None:
            console.print(one)
            console.print()
    going = [job.status in ("running", "stopped") for job in result.jobs.values()]
    if not all(going):
        say(f"adapters: {result.output_dir}/<job>" + ", of the jobs that have ended" * any(going))
    done = [*best, *(name for name, job in result.jobs.items() if job.status == "done" and name in others)]
    if done:
        some = " ".join(shlex.quote(f"{result.output_dir}/{name}") for name in done[:SPEAKERS])
        say(f"ask {'it' if len(done) == 1 else 'them'}: packlora chat {some}")
    if any(going):
        say(f"checkpoints: {result.output_dir}/<job>/checkpoint-<step>")
    for text in [*_failures(result), *_doubts(result)]:
        say(text)
    rate = result.tokens / result.seconds if result.seconds else 0.0
    trained = f"{result.tokens} tokens in {duration(result.seconds)} ({rate:.0f} tokens/s)"
    if not result.tokens and all(job.status == "done" for job in result.jobs.values()):
        trained = "every job was done already"
    say(f"{trained}; report: {result.report}")
    if result.incomplete:
        lost = ", ".join(f"{name} ({reason})" for name, reason in result.incomplete.items())
        say(f"incomplete: {lost}; adapters and checkpoints are whole")
    limited = {name: job.steps_left for name, job in result.jobs.items() if job.steps_left}
    if limited and result.signal is None and whole_command is not None:
        steps = ", ".join(f"{name} {number}" for name, number in limited.items())
        say(f"optimizer steps left by --max-steps: {steps}; take them with: {whole_command}")
    if result.signal is not None:
        say(f"stopped by a signal; continue with: {resume_command}")


def _failures(result: Result) -> Iterator[str]:
    for name, job in result.jobs.items():
        if job.failure:
            yield f"job {name!r} {'failed:' if job.status == 'failed' else 'was left out:'} {job.failure}"


def _doubts(result: Result) -> Iterator[str]:
    """Sentences on jobs that learnt nothing, or lost steps."""
    for name, job in result.jobs.items():
        if job.idle_since is not None:
            nothing = f"nothing after step {job.idle_since - 1}" if job.idle_since > 1 else "nothing"
            yield f"job {name!r}: its gradient was exactly 0 from step {job.idle_since} on, so it learnt {nothing}"
        if job.overflows:
            steps = "1 step was" if job.overflows == 1 else f"{job.overflows} steps were"
            yield f"job {name!r}: {steps} skipped, since gradients overflowed float16"
