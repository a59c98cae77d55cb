"""Writing files so that a crash at any moment leaves the old content or the new, never half of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from packlora.errors import InputError

LOCK = ".lock"
TEMPORARY = ".tmp-"
"""Prefix of what is being written; leftovers of a crash are removed when a run is resumed."""


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, then rename it to `path`."""
    temporary = path.with_name(TEMPORARY + path.name)
    write(temporary)
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """As write_file for a whole folder. An existing folder of that name is replaced."""
    temporary = path.with_name(TEMPORARY + path.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    for file in temporary.iterdir():
        _sync(file)
    if path.exists():  # a folder cannot be renamed onto a filled one
        old = path.with_name(TEMPORARY + "old-" + path.name)
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
        os.replace(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(temporary, path)
    _sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_file(path, lambda file: _dump(file, value))


def _dump(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """safetensors, on the CPU."""
    on_cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    write_file(path, lambda file: save_file(on_cpu, file, {"format": "pt"}))


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process. Raises InputError if another one has it; a killed process holds nothing."""
    path = folder / LOCK
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = path.stat().st_ino == os.fstat(file.fileno()).st_ino  # else its last holder has just removed it
        except OSError:
            ours = False
        if not ours:
            raise InputError(f"{folder} is in use by another run of packlora")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Delete what a crash left half-written directly in `folder`."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
