"""Paths of the data of a run that goes on."""

from __future__ import annotations

from pathlib import Path

from packlora.config import Run
from packlora.data.readers import is_there
from packlora.errors import InputError, shown


def check_places(before: Run, now: Run) -> None:
    """Raises InputError where a job's data have another path than before, at which nothing is: a slip, and no data that are
    gone."""
    known = {job.name: job.data for job in before.jobs}
    for job in now.trained:
        if (old := known.get(job.name)) is None:
            continue
        for key, was, paths in (
            ("path", [path for path, _ in old.sources], [path for path, _ in job.data.sources]),
            ("eval_path", old.eval_paths, job.data.eval_paths),
        ):
            for path in paths:
                if not is_there(path) and not any(_may_be_one(path, other) for other in was):
                    raise InputError(
                        f"job {job.name!r}: data.{key} {shown(path, 300)} does not exist, and was "
                        f"{shown(', '.join(was), 300) or 'null'} when the run was last trained; correct the path, or put the "
                        "data there"
                    )


def _may_be_one(path: str, other: str) -> bool:
    """Whether two paths may be of one file, looked up from other folders: one is the end of the other."""
    one, two = Path(path).parts, Path(other).parts
    most = min(len(one), len(two))
    return one[-most:] == two[-most:]
