"""Paths of what a run that goes on reads once more: data, and adapters."""

from __future__ import annotations

import os
from pathlib import Path

from packlora.config import BASE, JobConfig, Run
from packlora.data.readers import is_there
from packlora.errors import InputError, shown


def check_places(before: Run, now: Run) -> None:
    """Raises InputError where a job's data or adapters have another path than before, at which nothing is: a slip, and nothing
    that is gone."""
    known = {job.name: _places(job) for job in before.jobs}
    for job in now.trained:
        for key, paths in _places(job).items() if job.name in known else ():
            was = known[job.name][key]
            what, found = ("data", is_there) if key.startswith("data.") else ("adapter", os.path.exists)
            for path in paths:
                if not found(path) and not any(_may_be_one(path, other) for other in was):
                    raise InputError(
                        f"job {job.name!r}: {key} {shown(path, 300)} does not exist, and was "
                        f"{shown(', '.join(was), 300) or 'null'} when the run was last trained; correct the path, or put the "
                        f"{what} there"
                    )


def _places(job: JobConfig) -> dict[str, list[str]]:
    """Paths of a job by key."""
    adapters = {"adapter.init_from": job.adapter.init_from, "train.reference": job.train.reference}
    return {
        "data.path": [path for path, _ in job.data.sources],
        "data.eval_path": job.data.eval_paths,
        **{key: [] if path in (None, BASE) else [path] for key, path in adapters.items()},
    }


def _may_be_one(path: str, other: str) -> bool:
    """Whether two paths may be of one file, looked up from other folders: one is the end of the other."""
    one, two = Path(path).parts, Path(other).parts
    most = min(len(one), len(two))
    return one[-most:] == two[-most:]
