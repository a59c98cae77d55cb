"""Files of the state folder, and the addresses of checkpoints.

    <state>/journal.db
    <state>/models/<id>/          start and snapshots of a model, see tenant.py
    <state>/checkpoints/<hash>/   an adapter folder of PEFT, for training with the optimizer's state beside it
    <state>/samplers/<id>/        the adapter of a sampler that has no path

A checkpoint's path is tinker://MODEL/KIND/NAME. Names are never parts of a path on the disk: a folder is named by a hash.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packlora.errors import quoted, reason_of
from packlora.files import remove_folder, remove_leftovers, write_folder
from packlora.serve.errors import Refused
from packlora.serve.limits import Limits
from packlora.serve.logs import LOG

TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
KINDS = {"save_weights": TRAINING, "save_weights_for_sampler": SAMPLER, "save_weights_external": EXTERNAL}
FOLDERS = ("models", "checkpoints", "samplers")
Write = Callable[[sqlite3.Connection], None]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights|external_weights)/([^/]+)")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A checkpoint's address: model, kind and name."""

    model: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"

    @staticmethod
    def of(text: Any, field: str = "path") -> TinkerPath:
        """Raises Refused."""
        found = PATH.fullmatch(text) if isinstance(text, str) and len(text) < 1024 else None
        if found is None:
            raise Refused(f"{field}: {quoted(text)} is no tinker://MODEL/weights|sampler_weights|external_weights/NAME")
        return TinkerPath(*found.groups())


def checked_name(name: Any, limits: Limits) -> str:
    """The name of a checkpoint. Raises Refused."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > limits.name_length:
        raise Refused(
            f"path: {quoted(name)} is no name of a checkpoint: 1 to {limits.name_length} of A-Z a-z 0-9 . _ -, "
            "the first no sign"
        )
    return name


class Stores:
    """Folders of a state folder."""

    def __init__(self, state: Path) -> None:
        self.state = state
        for name in FOLDERS:
            (state / name).mkdir(parents=True, exist_ok=True)

    def clean(self, models: Iterable[str], samplers: Iterable[str]) -> None:
        """Remove files of models and folders of samplers that are over, and what a crash left half-written.

        Args:
            models: ids of those that go on.
            samplers: folders' names of those that go on.
        """
        kept = {"models": {_hashed(model) for model in models}, "samplers": set(samplers)}
        for name in FOLDERS:
            remove_leftovers(self.state / name)
        for name, own in kept.items():
            for folder in (self.state / name).iterdir():
                if folder.name not in own:
                    self.remove(folder)
                else:
                    remove_leftovers(folder)

    def model(self, model: str) -> Path:
        return self.state / "models" / _hashed(model)

    def checkpoint(self, path: str) -> Path:
        return self.state / "checkpoints" / _hashed(path)

    def sampler(self, sampler: str) -> Path:
        return self.sampler_folder(_hashed(sampler))

    def sampler_folder(self, name: str) -> Path:
        """A sampler's folder by the name that the journal has."""
        return self.state / "samplers" / name

    def copy(self, folder: Path, into: Path) -> None:
        """Put the files of a checkpoint into another folder, whole or not at all. They share the disk's blocks where they can:
        no file of a checkpoint is ever changed. Raises OSError where it is overwritten meanwhile."""

        def write(out: Path) -> None:
            before = folder.stat()
            for file in folder.iterdir():
                try:
                    os.link(file, out / file.name)
                except OSError:
                    shutil.copyfile(file, out / file.name)
            if not os.path.samestat(before, folder.stat()):  # some files may be of the one, some of the other
                raise OSError(f"{folder.name} was overwritten while it was copied")

        into.parent.mkdir(parents=True, exist_ok=True)
        write_folder(into, write)

    def remove(self, folder: Path) -> None:
        if folder.exists():
            remove_folder(folder)

    def tidy(self, folder: Path) -> bool:
        """Remove a folder that is over. Returns whether it is gone. One that cannot be removed now, or that another thread
        removes, is no reason for other work to end."""
        try:
            self.remove(folder)
        except OSError as error:
            LOG.error("a folder that is over cannot be removed: %s", reason_of(error))
        return not folder.exists()


def _hashed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:40]


def new_id() -> str:
    """An id that nobody guesses."""
    return secrets.token_hex(12)
