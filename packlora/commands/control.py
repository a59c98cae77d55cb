"""packlora add, stop and clone: ask a run that trains for something, and show its answer."""

from __future__ import annotations

from pathlib import Path

from packlora.errors import InputError
from packlora.run_file import load_jobs
from packlora.sweep.control import Add, Clone, StopJob, ask
from packlora.terminal import say


def add_jobs(run_dir: Path, file: Path, overrides: list[str] | None = None) -> str:
    """Add the jobs of a file to a running run. Returns the run's answer; raises InputError where it refuses."""
    jobs = load_jobs(file, overrides)
    return _asked(run_dir, Add(kind="add", jobs=[job.model_dump(mode="json", exclude_unset=True) for job in jobs]))


def stop_job(run_dir: Path, job: str) -> str:
    """End a job after its present step. Returns and raises as add_jobs."""
    return _asked(run_dir, StopJob(kind="stop", job=job))


def clone_job(run_dir: Path, job: str, name: str, overrides: list[str] | None = None, weights: bool = False) -> str:
    """Add a job to a running run with the settings of another job, except the overrides, which are keys of a job.

    Args:
        weights: it begins with the present adapter of the other.

    Returns and raises as add_jobs.
    """
    request = Clone(kind="clone", job=job, name=name, overrides=overrides or [], weights=weights)
    return _asked(run_dir, request)


def _asked(run_dir: Path, request: Add | StopJob | Clone) -> str:
    answer = ask(run_dir, request, say)
    if not answer.accepted:
        raise InputError(f"refused: {answer.text}")
    return answer.text
