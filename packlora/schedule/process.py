"""Processes of the scheduler's own: started when first needed, asked one thing at a time, killed when they are late or silent.

While a process starts or works it writes signs of life (see worker.py). One that is stopped, or hangs, writes none, and is
killed after some seconds; the next question starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from packlora.schedule.types import ScheduleError

START_S = 60.0
"""For a process to come up; importing scipy takes long on a busy machine."""
SILENCE_S = 5
"""Without a sign of life, after which a process is taken to be stopped or hung."""
SILENT_START_S = 20
"""The same for the first one, which Python has to start for."""
ALIVE = {"alive": True}
"""The sign of life."""
GRACE_S = 2.0
"""After the solver's own time limit, before its process is killed."""
MAX_FAILURES = 3
"""Of a solver in a row, after which it is not asked again."""


class WorkerError(Exception):
    """The process did not answer: `late` or `silent` (it was killed), `killed` (by another), `failed` (it says why), `missing`
    (what it needs is not there), `closed` (nobody wants the answer any more).
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Worker:
    """One process of packlora.schedule.worker.

    Args:
        kind: milp, or window.
        command: what to start instead; for tests.
    """

    def __init__(self, kind: str, command: list[str] | None = None) -> None:
        self.command = command or [sys.executable, "-P", "-m", "packlora.schedule.worker", kind]
        self.process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._unwanted = False

    def ask(self, request: dict[str, Any], seconds: float | None) -> Any:
        """The answer to a request; the process is started if it is not running.

        Args:
            seconds: after which it is killed; None: never.

        Raises:
            WorkerError: no answer.
            ScheduleError: the answer says that the input is wrong.
        """
        if self.process is None or self.process.poll() is not None:
            self._start()
        reply = self._exchange(json.dumps(request, separators=(",", ":")).encode() + b"\n", seconds, SILENCE_S)
        if "input_error" in reply:
            raise ScheduleError(reply["input_error"])
        if "error" in reply:
            raise WorkerError("failed", reply["error"])
        return reply["answer"]

    def kill(self) -> None:
        """Kill the process for good, from another thread than the one that asks it, which is then told so."""
        self._unwanted = True
        process = self.process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, if there is one."""
        process, self.process, self._buffer = self.process, None, b""
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _start(self) -> None:
        self.close()
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        try:
            self.process = subprocess.Popen(
                self.command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError("missing", f"cannot start {self.command[0]}: {error}") from None
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)  # a stopped process reads nothing, and a pipe holds little
        reply = self._exchange(b"", START_S, SILENT_START_S)
        if "missing" in reply:
            self.close()
            raise WorkerError("missing", reply["missing"])

    def _exchange(self, request: bytes, seconds: float | None, silence: int) -> dict[str, Any]:
        """Write the request, and return the next line that is no sign of life.

        silence: seconds without a word that are too many. They are counted one by one, so that the time in which this process
        was stopped itself is not taken for silence of the other.
        """
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        end = None if seconds is None else time.monotonic() + seconds
        source, sink = self.process.stdout.fileno(), self.process.stdin.fileno()
        quiet = 0
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            if request:
                selector.register(sink, selectors.EVENT_WRITE)
            while True:
                line, found, rest = self._buffer.partition(b"\n")
                if found:
                    self._buffer = rest
                    reply: dict[str, Any] = json.loads(line)
                    if reply != ALIVE:
                        return reply
                    continue
                if self._unwanted:
                    self.close()
                    raise WorkerError("closed", "its answer is no longer wanted")
                left = 1.0 if end is None else min(1.0, end - time.monotonic())
                ready = {key.fd for key, _ in selector.select(max(left, 0.0))}
                if source in ready:
                    quiet = 0
                elif not ready:
                    quiet += 1
                if not ready and left <= 0:  # it had its time before this last look
                    self.close()
                    raise WorkerError("late", f"no answer in {seconds:g} s; the process was killed")
                if quiet > silence:
                    self.close()
                    raise WorkerError(
                        "silent", f"no sign of life for {silence} s, as if stopped; the process was killed"
                    )
                if sink in ready:
                    try:
                        request = request[os.write(sink, request) :]
                    except OSError:
                        raise self._died() from None
                    if not request:
                        selector.unregister(sink)
                if source in ready:
                    block = os.read(source, 1 << 20)
                    if not block:
                        raise self._died()
                    self._buffer += block

    def _died(self) -> WorkerError:
        assert self.process is not None
        process = self.process
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        return WorkerError("killed", f"the process was killed by {signal.Signals(-code).name}" if code < 0 else
                           f"the process ended with exit code {code}")  # fmt: skip


class MilpSolver:
    """A Solver (see solve.py) in a process of its own, with a hard deadline.

    Whatever happens to it, an answer comes: where it is late, killed or missing, that the greedy packing stays, and why.
    """

    def __init__(self, command: list[str] | None = None, grace_s: float = GRACE_S) -> None:
        self.worker = Worker("milp", command)
        self.grace_s = grace_s
        self.gave_up: str | None = None
        self._failures = 0

    def solve(self, problem: dict[str, Any], time_limit_s: float) -> dict[str, Any]:
        """{"opened", "bins", "stopped", "note"}; bins is None where the greedy packing stays."""
        if self.gave_up is not None:
            return _keep(self.gave_up, "")
        request = {"problem": problem, "time_limit_s": time_limit_s}
        try:
            try:
                answer: dict[str, Any] = self.worker.ask(request, time_limit_s + self.grace_s)
            except WorkerError as error:
                if error.kind not in ("killed", "silent"):
                    raise
                answer = self.worker.ask(request, time_limit_s + self.grace_s)  # another process finds the same packing
        except WorkerError as error:
            self._failures += 1
            if error.kind == "missing" or self._failures >= MAX_FAILURES:
                self.gave_up = error.kind
            return _keep(error.kind, f"integer program: {error}")
        self._failures = 0
        if answer["stopped"] == "time limit":
            answer["note"] = f"integer program: stopped by the time limit of {time_limit_s:g} s"
        return answer

    def close(self) -> None:
        self.worker.close()


def _keep(stopped: str, note: str) -> dict[str, Any]:
    return {"opened": None, "bins": None, "stopped": stopped, "note": note}
