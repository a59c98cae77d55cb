"""Commands as processes of their own, without the seconds in which each of them would import everything: they are forks of one
process that has.

    with Forks(["launched"]) as forks:
        process = forks.start("launched", "none", "1", "train", "run.yaml")     # calls launched.main()

What is started is this file, as a program: it has the module's main() run in a fork with its own arguments, environment, folder
and outputs, passes on the signals that it gets, and ends as the fork ends, by the same code or signal. So torchrun may start it
like any other program. If it is killed, the fork is killed too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

LONGEST = 1 << 20
"""Bytes of a request: arguments and environment."""


# --- the program that is started; it imports nothing more -----------------------------------------------------------------


def program(address: str, module: str, *arguments: str) -> None:
    """Have module.main() run in a fork, and end as it ends."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
    server.connect(address)
    request = {"module": module, "arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(server, [json.dumps(request).encode()], [1, 2])
    child = int(server.recv(LONGEST))

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    code = os.waitstatus_to_exitcode(int(server.recv(LONGEST)))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


# --- the process that is forked -------------------------------------------------------------------------------------------


def serve(listening: socket.socket, modules: list[str]) -> None:
    """Import the modules, then answer each connection in a fork."""
    import gc
    import importlib

    import conftest  # noqa: F401 - the same settings as in the tests' own process

    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for these forks
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _attend(connection)
            finally:
                os._exit(70)
        connection.close()


def _attend(connection: socket.socket) -> None:
    """Fork once more for the module, and tell how that ends."""
    data, outputs, _, _ = socket.recv_fds(connection, LONGEST, 2)
    child = os.fork()
    if child == 0:
        connection.close()
        os._exit(_run(json.loads(data), outputs))
    connection.send(str(child).encode())
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, connection], [], [])[0]:  # the program is no more
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        connection.send(str(status).encode())


def _run(request: dict[str, Any], outputs: list[int]) -> int:
    """The exit code of module.main(), as Python itself would have it."""
    import importlib
    import traceback

    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = [request["module"], *request["arguments"]]
    try:
        importlib.import_module(request["module"]).main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    return code if isinstance(code, int) else int(code is not None)


# --- in the tests ---------------------------------------------------------------------------------------------------------


class Forks:
    """The process that is forked, itself a fork of that of ranks.py. Use as a context manager.

    Args:
        folder: for its address.
        modules: to import; others may be asked for as well.
    """

    def __init__(self, folder: Path, modules: list[str]) -> None:
        from ranks import fresh

        self.address = str(folder / "forks")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.address)
            listening.listen(16)
            self._process = fresh.Process(target=serve, args=(listening, modules), daemon=True)
            self._process.start()

    def words(self, module: str, *arguments: str) -> list[str]:
        """The command, without Python, whose process is module.main() with these arguments."""
        return [__file__, self.address, module, *arguments]

    def start(self, module: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """The options are those of Popen."""
        return subprocess.Popen([sys.executable, *self.words(module, *arguments)], text=True, **options)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()


if __name__ == "__main__":
    program(*sys.argv[1:])
