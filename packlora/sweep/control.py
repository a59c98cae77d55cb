"""Requests to a run that trains: files in the folder `control` of its output folder, for packlora add, stop and clone.

    control/request-<id>.json   what is asked for, written by the command
    control/answer-<id>.json    whether it was done, written by the run between two windows of microbatches

Files appear under their names when they are whole. There is no network port: whoever may write into the output folder may ask.
A request that is not read, since the run was killed, is taken back by the command that waits for its answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from packlora.changes import FOLDER, REQUEST
from packlora.errors import InputError, shown
from packlora.events import Event, RunEnded, WindowPlanned
from packlora.files import LOCK, is_locked, make_folder, write_json
from packlora.portable import flags
from packlora.report.journal import read_record

NAME = re.compile(REQUEST + r"([0-9a-f]{16})\.json", re.ASCII)
MOST_BYTES = 8 * 2**20
"""Largest size of a request."""
POLL_S, LOOK_S = 0.1, 3.0
"""Seconds between two looks for the answer, and for the run that is to give it."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Add(_Strict):
    """Jobs that are to join, as in a run file; all of them or none."""

    kind: Literal["add"]
    jobs: list[dict[str, Any]] = Field(min_length=1, max_length=1000)


class StopJob(_Strict):
    """A job that is to end after its present step."""

    kind: Literal["stop"]
    job: str


class Clone(_Strict):
    """A job that is to join with the settings of another. overrides: dotted.key=value. weights: begin with its adapter."""

    kind: Literal["clone"]
    job: str
    name: str
    overrides: list[str] = Field(default_factory=list, max_length=1000)
    weights: bool = False


Request = Annotated[Add | StopJob | Clone, Field(discriminator="kind")]
_REQUEST: TypeAdapter[Add | StopJob | Clone] = TypeAdapter(Request)


class Answer(_Strict):
    """Outcome of a request, in a sentence."""

    accepted: bool
    text: str


# --- the side of the run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read. request: or in words what is wrong with it."""

    id: str
    request: Add | StopJob | Clone | str

    def to_json(self) -> list[Any]:
        return [self.id, self.request if isinstance(self.request, str) else self.request.model_dump(mode="json")]


def asked_from(tree: Sequence[Any]) -> Asked:
    """Request that `Asked.to_json` gave."""
    number, request = tree
    return Asked(number, request if isinstance(request, str) else _REQUEST.validate_python(request))


class Control:
    """The requests to a run."""

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / FOLDER

    def asked(self) -> list[Asked]:
        """Requests that have no answer yet, the oldest first."""
        found = []
        with contextlib.suppress(OSError):
            for path in [] if self.folder.is_symlink() or not self.folder.is_dir() else self.folder.iterdir():
                match = NAME.fullmatch(path.name)
                if match is not None and not self._answer(match[1]).exists():
                    found.append((path.lstat().st_mtime_ns, match[1]))
        return [Asked(number, _read(self._request(number))) for _, number in sorted(found)]

    def answer(self, number: str, accepted: bool, text: str) -> None:
        """Write an answer. A failure costs the answer alone."""
        with contextlib.suppress(OSError, ValueError):
            write_json(self._answer(number), Answer(accepted=accepted, text=text).model_dump())
            self._request(number).unlink(missing_ok=True)

    def refuse_all(self, text: str) -> None:
        """The run ends."""
        for asked in self.asked():
            self.answer(asked.id, False, text)

    def _answer(self, number: str) -> Path:
        return self.folder / f"answer-{number}.json"

    def _request(self, number: str) -> Path:
        return self.folder / f"{REQUEST}{number}.json"


class Refusal:
    """A subscriber that refuses what is asked of a run on several processes."""

    def __init__(self, output_dir: Path, processes: int) -> None:
        self.control, self.processes = Control(output_dir), processes

    def __call__(self, event: Event) -> None:
        if isinstance(event, WindowPlanned | RunEnded):
            self.control.refuse_all(
                f"the run trains on {self.processes} processes; jobs join and leave a run of one process, or "
                "of pipelines that share all jobs"
            )


def _read(path: Path) -> Add | StopJob | Clone | str:
    try:
        handle = os.open(path, flags("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK"))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return "the request is not a plain file"
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        return f"the request cannot be read: {error.strerror}"
    if len(text) > MOST_BYTES:
        return f"the request is larger than {MOST_BYTES // 2**20} MiB"
    try:
        return _REQUEST.validate_json(text)
    except (ValidationError, RecursionError) as error:
        return f"the request is not one that a run takes: {shown(error, 500)}"


# --- the side of the command -----------------------------------------------------------------------------------------------


def ask(output_dir: Path, request: Add | StopJob | Clone, told: Callable[[str], None]) -> Answer:
    """Ask a run for something, and wait for its answer.

    Args:
        told: hears what is being waited for.

    Raises:
        InputError: no run trains in the folder, or it has ended without an answer.
        KeyboardInterrupt: the request is taken back, unless the run is at it already.
    """
    if not (output_dir / "run.json").is_file():
        raise InputError(f"{output_dir} holds no run")
    if not is_held(output_dir):
        raise InputError(f"no run trains in {output_dir}; start it with `packlora train RUN.yaml --resume`")
    folder, number = output_dir / FOLDER, secrets.token_hex(8)
    if folder.is_symlink():
        raise InputError(f"{folder} is a link, which a run does not follow; remove it")
    make_folder(folder)
    posted, answered = folder / f"{REQUEST}{number}.json", folder / f"answer-{number}.json"
    try:
        write_json(posted, request.model_dump())
        told("waiting for the run to come to the end of a window of microbatches")
        looked = time.monotonic()
        while not answered.exists():
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                if not is_held(output_dir) and not answered.exists():
                    return _unanswered(output_dir, number)
                if not posted.exists() and not answered.exists():  # a run writes its answer first
                    raise InputError(
                        f"{posted} was removed before the run in {output_dir} answered; see whether it was done"
                    )
            time.sleep(POLL_S)
        answer = Answer.model_validate(json.loads(answered.read_text(encoding="utf-8")))
    finally:
        posted.unlink(missing_ok=True)
    answered.unlink(missing_ok=True)
    return answer


def _unanswered(output_dir: Path, number: str) -> Answer:
    """Answer for a run that was killed before it gave one: it may have recorded the change. Raises InputError where not."""
    changes: Sequence[Any] = ()
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        changes = read_record(output_dir)["changes"]
    if any(change.get("request") == number for change in changes):
        text = f"accepted, but the run in {output_dir} has ended before it was done; --resume does it"
        return Answer(accepted=True, text=text)
    raise InputError(f"the run in {output_dir} has ended without an answer; nothing was changed")


def is_held(output_dir: Path) -> bool:
    """Whether a process trains a run in this folder now. Its lock's file may have been removed."""
    return is_locked(output_dir / LOCK) or is_locked(output_dir)
