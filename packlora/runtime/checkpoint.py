"""Checkpoints of jobs: written whole or not at all, checked to the last bit when they are read, and removed when they are old.

    <job>/checkpoint-<step>/   adapter_config.json, adapter_model.safetensors, optimizer.safetensors, last_good.safetensors,
                               best.safetensors, trainer_state.json, manifest.json
    <job>/history/             of a job of many steps, the log history before a checkpoint's own lines: see history.py
    <job>/                     the finished adapter, its trainer_state.json and manifest.json (written last: it marks the job
                               as ended)

manifest.json names the run, the job, the step and the SHA-256 of every file. What does not fit it is not read, so a flipped
bit, a file of another step and a folder of another job are errors, never other numbers. Everything else that a job needs to
go on (sample order, dropout, learning rate) is a function of the run file and the step.

Files hold whole tensors, however many processes have slices of the job: it goes on on any number of them.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from packlora.adapters.files import CONFIG, WEIGHTS, keyed, save_adapter, write_card
from packlora.engine.memory import launched
from packlora.errors import plural
from packlora.files import (
    digest,
    leftovers,
    make_folder,
    remove_folder,
    remove_leftovers,
    write_file,
    write_folder,
    write_json,
    write_tensors,
)
from packlora.runtime import history
from packlora.runtime.history import Pieces
from packlora.runtime.job import Job, trainer_state

STATE, OPTIMIZER, LAST_GOOD = "trainer_state.json", "optimizer.safetensors", "last_good.safetensors"
BEST = "best.safetensors"
MANIFEST, TEMPLATE = "manifest.json", "chat_template.jinja"
EARLIER = "earlier_log_history"
"""Key of a checkpoint's trainer_state.json: the piece that holds the lines before its own, see history.py."""
RESULT = {CONFIG, WEIGHTS, STATE}
"""Files of a finished job that its manifest names; the card beside them is the user's to edit."""
PREFIX = "checkpoint-"
NAME = re.compile(PREFIX + r"(0|[1-9]\d{0,15})", re.ASCII)
DISCARDED = "discarded-"
"""Prefix of checkpoints that lie beyond the step that a job was sent back to."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _File(_Strict):
    bytes: int
    sha256: str


class Manifest(_Strict):
    """Content of a folder. run: the run's id; step: the optimizer steps that the job had done."""

    run: str
    job: str
    step: int
    files: dict[str, _File]


class Damaged(Exception):
    """A folder does not hold what was written. The message names the file and what is wrong with it."""


# --- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job after one of its steps: copies of its whole tensors, on the CPU by the names of its parameters, and its
    trainer_state.json, with the lines of the log history that are in no piece. It stays as it is while the job goes on.

    optimizer: see FlatAdamW.state. last_good, best: None where there is none yet. wait: until the copies have come from a GPU.
    pieces: of the job then.
    """

    step: int
    state: Mapping[str, Any]
    adapter: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Mapping[str, torch.Tensor]]
    last_good: Mapping[str, torch.Tensor] | None
    best: Mapping[str, torch.Tensor] | None
    wait: Callable[[], None]
    pieces: Pieces

    @staticmethod
    def of(job: Job) -> Snapshot:
        """All processes that have slices of the job call it; the device is not waited for."""
        own = job.state
        good, best = (None if flat is None else own.whole_of(flat) for flat in (own.last_good, job.best))
        own.join_untrained()
        adapter, optimizer = own.whole_of(job.adapter.flat), own.optimizer.state(own.whole_of, own.everywhere)
        state = trainer_state(job) | {"log_history": [dict(line) for line in job.log_history[job.pieces.lines :]]}
        wait = launched(job.adapter.flat.device)
        return Snapshot(job.step, state, adapter, optimizer, good, best, wait, replace(job.pieces))


def save_checkpoint(folder: Path, job: Job, snapshot: Snapshot, run: str, keep: int | None = None) -> Path:
    """Write <folder>/checkpoint-<step>; it appears under its name only when it is complete and on the disk.

    Args:
        folder: of the job, in an existing folder.
        run: id of the run.
        keep: then remove all but so many of the newest checkpoints, this one among them; None keeps all.
    """
    path = folder / f"{PREFIX}{snapshot.step}"
    make_folder(folder)
    snapshot.wait()
    count, piece = history.seal(folder, snapshot.state["log_history"], snapshot.pieces.newest)
    earlier = {} if piece is None else {EARLIER: piece}
    state = {**snapshot.state, "log_history": snapshot.state["log_history"][count:], **earlier}

    def write(out: Path) -> None:
        save_adapter(out, job.adapter, snapshot.adapter)
        _write_template(out, job)
        moments = {f"{name}/{key}": value for name, own in snapshot.optimizer.items() for key, value in own.items()}
        write_tensors(out / OPTIMIZER, moments)
        for name, tensors in ((LAST_GOOD, snapshot.last_good), (BEST, snapshot.best)):
            if tensors is not None:
                write_tensors(out / name, keyed(job.adapter, tensors))
        write_json(out / STATE, state)
        _write_manifest(out, job.name, snapshot.step, run, {file.name for file in out.iterdir()})

    write_folder(path, write)
    job.pieces = replace(
        snapshot.pieces, lines=snapshot.pieces.lines + count, newest=piece
    )  # nobody else looks before this checkpoint is told of
    if keep is not None:
        _rotate(folder, job.name, run, path, keep)
    return path


def _rotate(folder: Path, job: str, run: str, newest: Path, keep: int) -> None:
    """Remove old checkpoints: only folders that this job of this run has written, never the newest. What cannot be removed is
    tried again the next time."""
    old = [path for path in _own(folder, job, run) if path != newest]
    with contextlib.suppress(OSError):
        remove_leftovers(folder, PREFIX)
    for path in old[: max(0, len(old) - (keep - 1))]:
        with contextlib.suppress(OSError):
            remove_folder(path)


def tidy(folder: Path, job: str, run: str, keep: int) -> str | None:
    """Remove what a crash, or a removal that failed, has left of checkpoints, and those that are too many then; the latter not
    where the newest one is not whole.

    Returns:
        What the user should know.
    """
    own = _own(folder, job, run)
    if len(own) > keep and is_whole(own[-1], job, run):
        _rotate(folder, job, run, own[-1], keep)
        own = own[:-keep]
    else:
        with contextlib.suppress(OSError):
            remove_leftovers(folder, PREFIX)
        own = []
    left = leftovers(folder, PREFIX) + [path for path in own if path.exists()]
    return f"job {job!r}: {left[0]} cannot be removed; the run does not need it any more" if left else None


def _own(folder: Path, job: str, run: str) -> list[Path]:
    """Checkpoints that this job of this run has written, the oldest first."""
    return [path for step in steps(folder) if _is_own(path := folder / f"{PREFIX}{step}", job, run)]


def _is_own(path: Path, job: str, run: str) -> bool:
    if path.is_symlink():
        return False
    try:
        manifest = _read_manifest(path)
    except Damaged:
        return False
    return (manifest.run, manifest.job) == (run, job)


def save_result(folder: Path, job: Job, adapter: Mapping[str, torch.Tensor], run: str) -> None:
    """Write the job's ended adapter, its whole tensors, directly into <folder>, the manifest last."""
    make_folder(folder)
    (folder / MANIFEST).unlink(missing_ok=True)  # that of an earlier end does not go with what follows
    save_adapter(folder, job.adapter, adapter)
    _write_template(folder, job)
    last = next((line["loss"] for line in reversed(job.log_history) if "loss" in line), float("nan"))
    lines = [f"{plural(job.step, 'optimizer step')}, {job.tokens_seen} tokens, last training loss {last:.4f}."]
    if job.failure:
        lines.append(f"Stopped early: {job.failure}.")
    write_card(folder, job.adapter, lines)
    write_json(folder / STATE, trainer_state(job))
    _write_manifest(folder, job.name, job.step, run, RESULT)


def _write_template(folder: Path, job: Job) -> None:
    """Write the chat template that an adapter has learnt to answer behind, where it is not the base model's."""
    text = job.chat_template
    if text is not None:
        write_file(folder / TEMPLATE, lambda out: out.write_bytes(text.encode()))


def _write_manifest(folder: Path, job: str, step: int, run: str, names: set[str]) -> None:
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": digest(folder / name)} for name in sorted(names)}
    write_json(folder / MANIFEST, {"run": run, "job": job, "step": step, "files": files})


# --- checking ----------------------------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a job's folder, rising."""
    return sorted(int(match[1]) for path in folder.glob(f"{PREFIX}*") if (match := NAME.fullmatch(path.name)))


def check(folder: Path, job: str, run: str, step: int | None = None) -> Manifest:
    """Read every byte of a checkpoint, or with step None of a finished job's files.

    Raises:
        Damaged: a file is missing or is not what was written, or the folder is of another job, step or run.
    """
    manifest = _read_manifest(folder)
    if manifest.run != run:
        raise Damaged(f"{folder} is of another run")
    if manifest.job != job:
        raise Damaged(f"{folder} is of job {manifest.job!r}")
    if step is not None and manifest.step != step:
        raise Damaged(f"{folder} is of step {manifest.step}")
    if lacking := sorted((RESULT if step is None else RESULT | {OPTIMIZER}) - manifest.files.keys()):
        raise Damaged(f"{folder / MANIFEST} does not name {lacking[0]}")
    if odd := sorted(manifest.files.keys() - RESULT - {OPTIMIZER, LAST_GOOD, BEST, TEMPLATE}):
        raise Damaged(f"{folder / MANIFEST} names {odd[0]!r}, which is no file of a checkpoint")
    for name, written in manifest.files.items():
        _check_file(folder / name, written)
    return manifest


def _check_file(file: Path, written: _File) -> None:
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{file} is not a plain file")
        if found.st_size != written.bytes:
            raise Damaged(f"{file} has {found.st_size} bytes instead of {written.bytes}")
        if digest(file) != written.sha256:
            raise Damaged(f"{file} does not hold what was written (its SHA-256 differs)")
    except FileNotFoundError:
        raise Damaged(f"{file} is missing") from None
    except OSError as error:
        raise Damaged(f"cannot read {file}: {error.strerror}") from None


def _read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise Damaged(f"{file} is not a plain file")
        return Manifest.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{file} is missing, so nothing tells whether {folder.name} is whole") from None
    except OSError as error:
        raise Damaged(f"cannot read {file}: {error.strerror}") from None
    except ValidationError as error:
        raise Damaged(f"{file} is damaged: {error.errors()[0]['msg']}") from None


def is_whole(path: Path, job: str, run: str) -> bool:
    """Whether a checkpoint is."""
    try:
        check(path, job, run, int(path.name.removeprefix(PREFIX)))
    except Damaged:
        return False
    return True
