"""Calls that systems spell differently, or lack: flags of files, locks, memory of a process. Windows lacks fcntl, resource,
SIGHUP and handles of folders; nothing here has been run there."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


def _module(name: str) -> Any:
    """A module of the standard library; None where this system has none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


fcntl, resource = _module("fcntl"), _module("resource")

IS_WINDOWS = sys.platform == "win32"
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
TRIES, BETWEEN = 20, 0.05
"""Tries of a rename on Windows, which refuses it while a reader has the file open, and seconds between them."""
RESERVED = frozenset(
    ["con", "prn", "aux", "nul", *(f"{name}{number}" for name in ("com", "lpt") for number in range(1, 10))]
)
"""Names of devices on Windows, with any ending and in any case."""


def flags(*names: str) -> int:
    """Flags of os.open by name, such as O_NOFOLLOW, as far as the system has them; bytes are never translated."""
    found = 0
    for name in (*names, "O_CLOEXEC", "O_BINARY"):
        found |= getattr(os, name, 0)
    return found


def open_folder(path: Path) -> int | None:
    """Handle of a folder; None where the system gives none. Raises OSError."""
    return os.open(path, flags("O_RDONLY", "O_DIRECTORY")) if hasattr(os, "O_DIRECTORY") else None


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names where the system has a call for it, are on the disk."""
    has_folders = hasattr(os, "O_DIRECTORY")
    if not has_folders and path.is_dir():
        return
    handle = os.open(path, flags("O_RDONLY" if has_folders else "O_RDWR"))  # Windows flushes what may be written
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(source: Path, target: Path) -> None:
    """os.replace, also of a file that a reader has open for a moment."""
    for left in reversed(range(TRIES if IS_WINDOWS else 1)):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if not left:
                raise
            time.sleep(BETWEEN)


@contextlib.contextmanager
def one_at_a_time(path: Path, wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a lock file, which stays: removing it would let two hold it. wait: called before another process is waited for."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold a lock file; False where another process holds it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def peak_resident() -> int:
    """Most bytes that the process has had in memory; 0 where the system does not tell."""
    if resource is None:
        return 0
    most: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1 if sys.platform == "darwin" else 1024)


def why_no_file(name: str) -> str | None:
    """Reason why the system takes no file or folder of this name, in words that follow it; None where it does."""
    if not IS_WINDOWS:
        return None
    if name.partition(".")[0].rstrip(" ").lower() in RESERVED:
        return "is the name of a device on Windows"
    return "ends with a dot, which Windows drops" if name.endswith(".") else None
