"""Reader of files that a run is writing: jsonl files are read from the end of the last look on, and nothing is written.

Any file may be missing, empty, half-written, or another one than before, as after a run was resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from packlora.portable import flags

Line = dict[str, Any]
MOST_BYTES = 2**26
"""Read of one file in one look; more comes with the next."""
REMEMBERED = 64
"""Bytes before the end of the last read, by which a file is recognised."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes] | None]:
    """Open a plain file; None for anything else, since opening a pipe would wait."""
    try:
        handle = os.open(path, flags("O_RDONLY", "O_NONBLOCK"))
    except OSError:
        yield None
        return
    if not stat.S_ISREG(os.fstat(handle).st_mode):  # a folder has no file object
        os.close(handle)
        yield None
        return
    with os.fdopen(handle, "rb") as file:
        yield file


class Followed:
    """Lines of a jsonl file that hold all of `keys`. A last line without its end is left for the next look.

    lines: all of them. times: how often they were begun anew, since the file became another one. is_sound: whether a line that
    has the keys holds what a run writes there.
    """

    def __init__(self, path: Path, *keys: str, is_sound: Callable[[Line], bool] = bool) -> None:
        self.path, self.keys, self._is_sound = path, keys, is_sound
        self.lines: list[Line] = []
        self.times = 0
        self._at, self._before = 0, b""

    def look(self) -> bool:
        """Read the new lines; return whether anything is new."""
        with opened(self.path) as file:
            if file is None or not self._is_known(file):
                changed = bool(self._at)
                self.lines, self._at, self._before = [], 0, b""
                self.times += changed
                if file is None:
                    return changed
            else:
                changed = False
            data = file.read(MOST_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return changed
        self._at += len(whole)
        self._before = (self._before + whole)[-REMEMBERED:]
        for text in whole[:-1].split(b"\n"):
            line = parsed(text)
            if line is not None and all(key in line for key in self.keys) and self._is_sound(line):
                self.lines.append(line)
        return True

    def _is_known(self, file: IO[bytes]) -> bool:
        """Whether it goes on from where the last look ended; it is read from there, else from its beginning."""
        file.seek(max(0, self._at - REMEMBERED))
        if file.read(min(self._at, REMEMBERED)) == self._before:
            return True
        file.seek(0)
        return False


def parsed(text: bytes | str) -> Line | None:
    """A JSON object, or None where the text is none, as a line that is still being written."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # also a number of thousands of digits
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path) -> Line | None:
    """A JSON object in a file of its own; None where there is none."""
    with opened(path) as file:
        return parsed(file.read()) if file is not None else None


def is_held(lock: Path) -> bool | None:
    """Whether a process holds the lock file of a run (`lock_folder`); None where that cannot be told from here, as on another
    machine that shares the folder. No lock is tried: a run that starts meanwhile would find it taken."""
    try:
        with opened(lock) as file:
            if file is None:
                if os.path.lexists(lock):
                    return None
                return lock.parent.is_dir() and _is_locked(lock.parent.stat().st_ino)  # the file may be gone
            host, inode = file.read(1000).decode(errors="replace").split(" ")[0], os.fstat(file.fileno()).st_ino
        if host and host != socket.gethostname():
            return None
        return _is_locked(inode) or _is_locked(lock.parent.stat().st_ino)
    except OSError:
        return None


def _is_locked(inode: int) -> bool:
    """Raises OSError where the system does not tell."""
    locks = Path("/proc/locks").read_text(encoding="ascii")
    return any("FLOCK" in line and line.split()[-3].endswith(f":{inode}") for line in locks.splitlines())
