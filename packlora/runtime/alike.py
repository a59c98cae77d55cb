"""Comparison of what each process of a run reads by itself: the output folder, the files of jobs and of the base model. A run
on one process loads nothing of it."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packlora.base.load import load_part
from packlora.base.weight_files import WeightFiles
from packlora.errors import InputError
from packlora.files import TEMPORARY
from packlora.parallel.alone import OneProcess

OF_JOBS = {"data": "data_hash", "init_from": "start_hash", "reference": "reference_hash", "objective": "objective_hash"}
"""Files of a job, with the keys of their hashes in run.json. A run that goes on needs its data alone."""
LOOKS, LOOKED_AT = 16, 4096
"""Pieces of a file that its hash is of, evenly spaced, and the bytes of each."""


def check_jobs(described: Mapping[str, Mapping[str, Any]], mesh: OneProcess, goes_on: bool) -> None:
    """Compare the jobs' files. All processes call it.

    Args:
        described: the jobs, by name, as run.json has them.
        goes_on: the run has begun before.

    Raises:
        InputError: a process has others.
    """
    keys = {"data": OF_JOBS["data"]} if goes_on else OF_JOBS
    mesh.same(
        {f"{what} of job {name!r}": str(own[key]) for name, own in described.items() for what, key in keys.items()}
    )


def digest(files: WeightFiles) -> str:
    """Hash of all names and shapes, and of LOOKS pieces of every file: copies of a model have the same one, a model that was
    trained further has another.

    Raises:
        InputError: a file cannot be read.
    """
    found = hashlib.blake2b(repr(sorted(files.shapes.items())).encode(), digest_size=6)
    for path in files.paths:
        with load_part("model", files.path, lambda path=path: open(path, "rb")) as opened:
            size = os.path.getsize(path)
            for look in range(LOOKS):
                opened.seek(size * look // LOOKS)
                found.update(opened.read(LOOKED_AT))
    return found.hexdigest()


def check_folder(folder: Path, mesh: OneProcess) -> None:
    """Check that all processes see the output folder of the first one, by a file of a new name that it makes there. A lock may
    be that of a run that was killed. Raises InputError."""
    sign = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    if mesh.is_first:
        sign.touch()
    name = mesh.gather(sign.name)[0]

    def seen() -> None:
        if not (folder / name).exists():
            raise InputError(
                f"output_dir {folder} is not that of process 0: all processes must see the same file system"
            )

    try:
        mesh.together(seen)
    finally:
        if mesh.is_first:
            sign.unlink(missing_ok=True)
