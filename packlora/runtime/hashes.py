"""Hashes of what a job takes beside its data, by which a run that is continued knows that it is the same."""

from __future__ import annotations

from pathlib import Path

from packlora.files import digest
from packlora.given import given
from packlora.lora_config import WEIGHTS


def folder_hash(folder: str | None) -> str | None:
    """SHA-256 of the tensors of an adapter's folder, which a job begins with or is held to; None without one."""
    return None if folder is None else digest(Path(folder) / WEIGHTS)


def objective_hash(spec: str | None) -> str | None:
    """SHA-256 of the file of a user's own objective (`train.objective`), if it is there; of the source of a function that was
    given in Python."""
    if spec is not None and spec in given().losses:
        return given().losses[spec][1]
    file = Path(spec.rpartition(":")[0]) if spec is not None else None
    return digest(file) if file is not None and file.is_file() else None
