"""Tables in HTML for notebooks: results of a run and of its jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from packlora.result import JobResult, Result

COLUMNS = ("job", "status", "steps", "held-out loss", "before", "tokens/s", "adapter")


def of_run(result: Result) -> str:
    """Table of the jobs of a run, and a line on the run."""
    told = f"{result.status}, {result.tokens} tokens in {result.seconds:.1f} s; report: {result.report}"
    return f"{of_jobs(result.jobs)}<p>{escape(told)}</p>"


def of_jobs(jobs: Mapping[str, JobResult]) -> str:
    """Table of results, by the names of their jobs."""

    def loss(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}"

    rows = [
        (name, job.status, str(job.step), loss(job.eval_after), loss(job.eval_before),
         f"{job.tokens_per_second:.0f}" if job.tokens_per_second else "", str(job.folder))
        for name, job in jobs.items()
    ]  # fmt: skip
    return table(COLUMNS, rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
