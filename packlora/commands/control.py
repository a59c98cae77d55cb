"""packlora add, stop and clone: ask a run that trains for something, and show its answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

from packlora.config import BASE
from packlora.config.data import TEMPLATES
from packlora.errors import InputError
from packlora.run_file import load_jobs
from packlora.sweep.control import Add, Clone, StopJob, ask
from packlora.terminal import say

PATHS = ("data.path", "data.eval_path", "data.chat_template", "adapter.init_from", "train.reference")
"""Keys of a job whose value is a path, or one of the names BASE and TEMPLATES."""


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
        overrides: with paths as they are seen from here; the run may train in another folder.
        weights: it begins with the present adapter of the other.

    Returns and raises as add_jobs.
    """
    own = [_from_everywhere(override) for override in overrides or []]
    return _asked(run_dir, Clone(kind="clone", job=job, name=name, overrides=own, weights=weights))


def _from_everywhere(override: str) -> str:
    """An override in which the path of a file that is here is absolute."""
    key, _, path = override.partition("=")
    if key.strip() not in PATHS or path in (BASE, *TEMPLATES) or not os.path.exists(path):
        return override
    return f"{key}={json.dumps(os.path.abspath(path), ensure_ascii=False)}"


def _asked(run_dir: Path, request: Add | StopJob | Clone) -> str:
    answer = ask(run_dir, request, say)
    if not answer.accepted:
        raise InputError(f"refused: {answer.text}")
    return answer.text
