"""Trains a tiny run where modules and names are missing that Windows lacks.

    python tests/without_posix.py RUN.yaml FOLDER

They are taken away once libraries are imported, whose builds for this system need some of them.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

MODULES = ("fcntl", "resource", "termios", "triton", "tty", "pty", "pwd", "grp", "readline", "curses", "syslog")
NAMES = {
    os: (
        "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_SYNC", "O_DSYNC", "fork", "forkpty", "register_at_fork",
        "sched_getaffinity", "sched_setaffinity", "statvfs", "fstatvfs", "uname", "sysconf", "confstr", "getuid", "geteuid",
        "getgid", "getegid", "getpgid", "killpg", "setsid", "mkfifo", "mknod", "nice", "chown", "lchown", "fchmod", "fchown",
        "getloadavg", "posix_spawn", "posix_fallocate", "posix_fadvise", "wait3", "wait4", "WNOHANG", "pread", "pwrite",
    ),
    signal: (
        "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGTSTP", "SIGWINCH", "alarm",
        "setitimer", "pthread_sigmask", "sigwait", "pause",
    ),
}  # fmt: skip


def take_away() -> None:
    """Imports of MODULES fail, NAMES are gone, folders cannot be opened, and /proc is not there, as on Windows."""
    import asyncio
    import concurrent.futures.process
    import ctypes
    import multiprocessing.util
    import platform
    import shutil
    import subprocess
    import tempfile
    import uuid

    import filelock
    import peft
    import transformers.generation
    import transformers.models.llama.modeling_llama

    del asyncio, concurrent, ctypes, multiprocessing, peft, tempfile, transformers, uuid
    assert not any(name.partition(".")[0] == "packlora" for name in sys.modules)
    platform.uname()  # keeps its answer
    own_lock: Any = sys.modules[filelock.FileLock.__module__]
    own_lock.os = SimpleNamespace(**vars(os))  # it has another file for Windows
    subprocess.signal = SimpleNamespace(**vars(signal))  # as it has another way to end a process
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # nor are folders removed by handles there
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in NAMES.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    opened = os.open

    def own(path: Any, how: int, *more: Any, **named: Any) -> int:
        if isinstance(path, str | os.PathLike) and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, how, *more, **named)

    os.open = own
    usual = io.open

    def without_proc(file: Any, *more: Any, **named: Any) -> Any:
        if str(file).startswith("/proc/"):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return usual(file, *more, **named)

    io.open = builtins.open = without_proc
    started = subprocess.Popen.__init__

    def start(process: Any, *args: Any, **named: Any) -> None:
        assert not named.get("preexec_fn") and not named.get("pass_fds"), "there is neither on Windows"
        started(process, *args, **named)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]


def main() -> None:
    """`--help`, `plan`, `train`, interrupted, resumed, and what else takes locks."""
    take_away()
    from packlora.cli import app

    def run(*args: str) -> None:
        try:
            app(list(args), standalone_mode=True)
        except SystemExit as ended:
            if ended.code:
                raise

    run("--help")
    run("plan", sys.argv[1])
    run("train", sys.argv[1], "--max-steps", "1")
    run("train", sys.argv[1], "--resume", "--set", "save_total_limit=1")
    run("doctor")
    run("preview", sys.argv[1], "--rows", "1")
    run("report", f"{sys.argv[2]}/there")
    run("generate", f"{sys.argv[2]}/there/a", "--prompt", "a", "--max-new-tokens", "1")

    from pathlib import Path

    import torch

    from packlora.errors import InputError
    from packlora.files import LOCK, is_locked, lock_folder
    from packlora.plans.device_file import DeviceFile

    folder = Path(sys.argv[2])
    with lock_folder(folder):
        assert is_locked(folder / LOCK)
        with contextlib.suppress(InputError), lock_folder(folder):
            raise AssertionError("a folder was locked twice")
    assert not is_locked(folder / LOCK)
    file: Any = DeviceFile(torch.device("cpu"), "part", 1, str, str, folder / "figures.json")
    assert file.put({"a": "1"}) == {"a": "1"}


if __name__ == "__main__":
    main()
