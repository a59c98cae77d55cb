"""Real `packlora train` runs in which a file operation goes wrong: the n-th one below the output folder kills the process, or
fails. `Runs` has one process that has everything imported, a fork of that of ranks.py, and forks it for each run, which takes
about half a second.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import gc
import importlib
import io
import json
import mmap
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ranks import fresh

KINDS = ("kill", "ENOSPC", "EIO", "full")
"""What happens at the n-th operation: SIGKILL, an error once, a disk that stays full. Of what a write was to write, one half is
there then, as after a crash or on a full disk."""


@dataclass
class Ended:
    """How a run ended. code: negative where a signal killed it. operations: below the output folder."""

    code: int
    out: str
    err: str
    operations: int
    seconds: float


class Runs:
    """The process that is forked. Use as a context manager."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._pipe, theirs = fresh.Pipe()
        self._server = fresh.Process(target=serve, args=(theirs,), daemon=True)
        self._server.start()
        theirs.close()

    def train(self, run_file: Path, *options: str, **fault: Any) -> Ended:
        """One run.

        Args:
            fault: kind and at (see KINDS), and only, to count operations on paths that hold it alone; signal, where and times
                (see `_signal_at`); stdout: a file to be standard output, or "pipe" for one whose reader has gone; constants:
                values by module:NAME.
        """
        request = {"arguments": ["train", str(run_file), *options], "scratch": str(self.scratch), **fault}
        self._pipe.send(request)
        return Ended(**self._pipe.recv())

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()
        self._server.kill()
        self._server.join()


# --- in the process that is forked ---------------------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Answer requests until the process is killed."""
    import torch

    import packlora.report.summary  # noqa: F401
    import packlora.runtime.run  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and all that is started there
    with contextlib.suppress(
        Exception
    ):  # half the time of loading a tiny model; there may be another release of transformers
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")
    gc.freeze()
    while True:
        pipe.send(_forked(pipe.recv()))


def _forked(request: dict[str, Any]) -> dict[str, Any]:
    scratch = Path(request["scratch"])
    out, err, modules = scratch / "stdout", scratch / "stderr", scratch / "modules"
    modules.unlink(missing_ok=True)
    counter = mmap.mmap(-1, 8)
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        code = 70
        try:
            if request.get("stdout") == "pipe":
                source, sink = os.pipe()
                os.close(source)
            else:
                sink = os.open(request.get("stdout", out), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(sink, 1)
            os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            code = _run(request, counter)
            modules.write_text(json.dumps(sorted(sys.modules)))
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    if modules.exists():  # what a run imports late is imported here, once for all runs
        for name in json.loads(modules.read_text()):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "out": "" if "stdout" in request else out.read_text(errors="replace"),
        "err": err.read_text(errors="replace"),
        "operations": int.from_bytes(counter[:8], "little"),
        "seconds": spent.ru_utime + spent.ru_stime - begun.ru_utime - begun.ru_stime,
    }


def _run(request: dict[str, Any], counter: mmap.mmap) -> int:
    from packlora.cli import app

    for name, value in request.get("constants", {}).items():
        module, _, constant = name.partition(":")
        setattr(importlib.import_module(module), constant, value)
    sys.argv = ["packlora", *request["arguments"]]
    folder = Path(json.loads(Path(request["arguments"][1]).read_text())["output_dir"])
    _Faults(folder, request.get("kind"), request.get("at", 1), request.get("only", ""), counter).install()
    if "signal" in request:
        _signal_at(request["where"], signal.Signals(request["signal"]), request.get("times", 1))
    try:
        app()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()  # as Python does at its end
    except (OSError, ValueError):
        traceback.print_exc()
        code = 120
    return code


def _signal_at(where: str, number: signal.Signals, times: int) -> None:
    """Send this process a signal when a function, module:Class.function or module:function, is entered for the n-th time."""
    module_name, _, path = where.partition(":")
    path, _, nth = path.partition("#")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(nth or 1):
            for _ in range(times):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


class _Faults:
    """Counts what the process does to files below a folder, and lets the `at`-th operation go wrong."""

    def __init__(self, folder: Path, kind: str | None, at: int, only: str, counter: mmap.mmap) -> None:
        self.folder, self.kind, self.at, self.only, self.counter = str(folder), kind, at, only, counter
        self.count, self._counting = 0, threading.Lock()

    def below(self, path: Any, dir_fd: int | None = None) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path))
        path = os.path.abspath(os.fspath(path))
        return path.startswith(self.folder) and self.only in path

    def operation(self, half: Callable[[], object] | None = None, writes: bool = True) -> None:
        """Before each operation. half: does one half of it; writes: whether it needs room on the disk."""
        with self._counting:  # checkpoints are written by threads
            self.count += 1
            number = self.count
            self.counter[:8] = number.to_bytes(8, "little")
        if self.kind is None or number < self.at or (number > self.at and self.kind != "full"):
            return
        if self.kind == "full" and not writes:
            return
        if half is not None:
            half()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        error = errno.EIO if self.kind == "EIO" else errno.ENOSPC
        raise OSError(error, os.strerror(error))

    def install(self) -> None:
        import safetensors.torch
        from safetensors import SafetensorError

        real_open, real_os_open, real_write, real_fsync = io.open, os.open, os.write, os.fsync
        real_save: Any = safetensors.torch.save_file
        torn: set[int] = set()

        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+") or not self.below(file):
                return real_open(file, mode, *args, **kwargs)
            self.operation()
            return _File(real_open(file, mode, *args, **kwargs), self)

        def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and self.below(path, dir_fd):
                self.operation()
            return real_os_open(path, flags, mode, dir_fd=dir_fd)

        def write(file: int, data: Any) -> int:
            half = bytes(data)[: len(data) // 2]
            if self.below(file):
                try:
                    self.operation(lambda: real_write(file, half))
                except OSError:
                    if file in torn or not half:
                        raise
                    torn.add(file)  # the next write says why this one was short
                    self.at += self.kind != "full"
                    return len(half)
            return real_write(file, data)

        def fsync(file: Any) -> None:
            if self.below(file if isinstance(file, int) else file.fileno()):
                self.operation(writes=False)
            real_fsync(file)

        def save(tensors: Any, path: Any, *args: Any) -> None:
            def half() -> None:
                real_save(tensors, path, *args)
                os.truncate(path, os.path.getsize(path) // 2)

            try:
                if self.below(path):
                    self.operation(half)
            except OSError as error:
                number = error.errno
            else:
                return real_save(tensors, path, *args)
            raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number or 0)} (os error {number})")

        def plain(name: str, writes: bool) -> None:
            original = getattr(os, name)

            def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
                if self.below(path, kwargs.get("dir_fd")):
                    self.operation(writes=writes)
                return original(path, *args, **kwargs)

            setattr(os, name, wrapped)

        builtins.open = io.open = open_  # type: ignore[assignment]
        os.open, os.write, os.fsync = os_open, write, fsync  # type: ignore[assignment]
        safetensors.torch.save_file = save  # type: ignore[assignment]
        for name in ("replace", "rename", "unlink", "rmdir"):
            plain(name, writes=False)
        plain("mkdir", writes=True)


class _File:
    """An open file whose writes are counted."""

    def __init__(self, file: Any, faults: _Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, data: Any) -> Any:
        self._faults.operation(lambda: (self._file.write(data[: len(data) // 2]), self._file.flush()))
        return self._file.write(data)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
