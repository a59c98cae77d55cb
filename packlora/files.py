"""Writing files so that a crash at any moment leaves the old content or the new, never half of it."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packlora.errors import InputError, system_number
from packlora.portable import fcntl, flags, held, open_folder, replace, sync

if TYPE_CHECKING:
    import torch

LOCK = ".lock"
TEMPORARY = ".tmp-"
"""Prefix of what is being written; leftovers of a crash are removed when a run is resumed."""
LONGEST_LINE = 400
"""Characters of an object that is written on one line of a JSON file."""
REPLACED, REMOVED = f"{TEMPORARY}old-", f"{TEMPORARY}removed-"
"""Prefixes of a folder that is being replaced, and of one that is being removed. Until the new folder is in place, the replaced
one is the only copy."""


HALVES = re.compile("[\ud800-\udfff]")
"""Halves of characters, by which Python names what is no text in the name of a file; UTF-8 has none."""


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, then rename it to `path`.

    It may be read by whom the umask lets read it, also where `write` makes a file for its owner alone, as safetensors does.
    """
    temporary = path.with_name(TEMPORARY + path.name)
    temporary.unlink(missing_ok=True)  # a leftover of a crash, or a link to somewhere else
    temporary.touch(exist_ok=False)
    mode = temporary.stat().st_mode
    try:
        write(temporary)
        temporary.chmod(stat.S_IMODE(mode))
        sync(temporary)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the earlier error is raised
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # the system gives no file for a full disk
        raise
    replace(temporary, path)
    sync(path.parent)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Write a whole folder as write_file writes a file. An existing folder of that name is replaced; after a crash in between,
    `put_back` gives it its name again. A failed write leaves nothing behind."""
    old = path.with_name(REPLACED + path.name)
    _put_back(old)
    temporary = path.with_name(TEMPORARY + path.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    mode = stat.S_IMODE(temporary.stat().st_mode) & 0o666
    try:
        write(temporary)
        for file in temporary.iterdir():
            if file.is_file():
                file.chmod(mode)
            sync(file)
        sync(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if path.exists():  # a folder cannot be renamed onto a filled one
        shutil.rmtree(old, ignore_errors=True)
        replace(path, old)
        replace(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        replace(temporary, path)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder in an existing one, and wait until it is on the disk."""
    if not path.exists():
        path.mkdir()
        sync(path.parent)


def make_folders(paths: Iterable[Path]) -> None:
    """Make several folders, as make_folder makes one."""
    for path in paths:
        make_folder(path)


def remove_folder(path: Path) -> None:
    """Delete a folder; a crash in the middle leaves it whole or under a temporary name."""
    old = path.with_name(REMOVED + path.name)
    shutil.rmtree(old, ignore_errors=True)
    replace(path, old)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Give folders directly in `folder` their names again whose replacement a crash or an error has broken off."""
    for old in folder.glob(f"{REPLACED}*"):
        _put_back(old)


def _put_back(old: Path) -> None:
    path = old.with_name(old.name.removeprefix(REPLACED))
    if os.path.lexists(old) and not os.path.lexists(path):
        replace(old, path)
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 as write_file writes a file."""
    write_file(path, lambda file: file.write_bytes(text.encode()))


def write_json(path: Path, value: Any) -> None:
    write_text(path, whole_characters(json_text(value)) + "\n")


def whole_characters(text: str) -> str:
    """JSON as text that UTF-8 can hold: halves of characters are spelt out."""
    return HALVES.sub(lambda half: f"\\\\u{ord(half[0]):x}", text)


def json_text(value: Any, indent: str = "") -> str:
    """JSON for people, which is quick to make: what holds no other object or list is on one line, unless that is long."""
    if not isinstance(value, dict | list | tuple):
        return _encoder().encode(value)
    deeper, is_object = indent + "  ", isinstance(value, dict)
    inner: Collection[Any] = value.values() if isinstance(value, dict) else value
    if any(isinstance(one, dict | list | tuple) for one in inner):
        items = [json_text(one, deeper) for one in inner]
        if is_object:
            names = [key if isinstance(key, str) else _encoder().encode(key) for key in value]
            items = [f"{_encoder().encode(name)}: {item}" for name, item in zip(names, items, strict=True)]
        lines = f",\n{deeper}".join(items)
    else:
        text = _encoder().encode(value)
        if len(text) <= LONGEST_LINE or not is_object:
            return text
        lines = _encoder(f",\n{deeper}").encode(value)[1:-1]
    opening, closing = "{}" if is_object else "[]"
    return f"{opening}\n{deeper}{lines}\n{indent}{closing}"


@functools.cache
def _encoder(separator: str = ", ") -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(separator, ": "))


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], told: Mapping[str, str] | None = None) -> None:
    """safetensors, on the CPU. told: texts for the file's header. Raises OSError where it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # loads torch, which a reader of a run does not need

    on_cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}

    def save(file: Path) -> None:
        try:
            save_file(on_cpu, file, {"format": "pt", **(told or {})})
        except SafetensorError as error:
            if (number := system_number(error)) is None:
                raise
            raise OSError(number, os.strerror(number)) from error

    write_file(path, save)


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process. A killed process holds nothing.

    Raises:
        InputError: another process has it, or its lock is not a file of its own.
    """
    path, in_use = folder / LOCK, InputError(f"the folder {folder} is in use by another run of packlora")
    if fcntl is None:
        with held(path) as ours:
            if not ours:
                raise in_use
            yield
        return
    try:  # a link is not followed: what it leads to is not ours
        handle = os.open(path, flags("O_RDWR", "O_CREAT", "O_NOFOLLOW", "O_NONBLOCK"), 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise InputError(f"cannot lock {folder}: {path} is not a plain file ({error.strerror}); remove it") from None
    itself = open_folder(folder)
    assert itself is not None  # where there is fcntl
    try:
        try:  # the folder too: another program may remove the file as a leftover
            fcntl.flock(itself, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use from None
        except OSError:
            pass  # a file system that locks files alone, as NFS
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = _same(handle, path.lstat)  # else its last holder has just removed it
        except OSError:
            ours = False
        if not ours:
            raise in_use
        try:
            os.truncate(handle, 0)
            os.write(handle, f"{socket.gethostname()} {os.getpid()}\n".encode())  # for readers on other machines
            yield
        finally:
            if _same(handle, path.lstat):  # else the folder was deleted, and another run may be in its place
                path.unlink(missing_ok=True)
    finally:
        os.close(itself)
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock on a file or a folder, as lock_folder has it."""
    if fcntl is None:
        with held(path) if path.is_file() else contextlib.nullcontext(True) as free:
            return not free
    try:
        handle = os.open(path, flags("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK"))
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


class FolderGoneError(FileNotFoundError):
    """A folder was deleted, moved away or replaced by another while it was written to."""


class KeptFolder:
    """A folder that must stay where it is while it is written to."""

    def __init__(self, path: Path) -> None:
        self.path, self._found = path, path.stat()
        self._handle = open_folder(path)
        """While it is open, nothing else gets the folder's number."""

    def check(self) -> None:
        """Raises FolderGoneError."""
        try:
            is_there = os.path.samestat(self._found, self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        if not is_there:
            raise FolderGoneError(f"{self.path} was deleted, moved or replaced while the run was writing to it")

    def __del__(self) -> None:
        if self._handle is not None:
            os.close(self._handle)


def _same(handle: int, at_path: Callable[[], os.stat_result]) -> bool:
    """Whether what is open is what a path leads to."""
    try:
        return os.path.samestat(os.fstat(handle), at_path())
    except (FileNotFoundError, NotADirectoryError):
        return False


def remove_leftovers(folder: Path, of: str = "") -> None:
    """Delete what a crash left half-written directly in `folder`, where its name holds `of`."""
    put_back(folder)
    for path in leftovers(folder, of):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def content_of(folder: Path) -> list[str]:
    """Names of what an output folder holds, beside what a crash has left and the lock."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(TEMPORARY) and path.name != LOCK)


def leftovers(folder: Path, of: str = "") -> list[Path]:
    """Files that a crash or an error left directly in `folder` and whose names contain `of`."""
    return [path for path in folder.glob(f"{TEMPORARY}*") if of in path.name]


def from_everywhere(base_model: str) -> str:
    """The name of a base model as any program finds it, whatever folder it is started in: of a folder that is here its absolute
    path."""
    return os.path.abspath(base_model) if os.path.isdir(base_model) else base_model
