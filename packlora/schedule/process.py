"""The process that plans windows beside training: asked for one window at a time, in JSON over its pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from packlora.schedule.solve import Task
from packlora.schedule.types import ScheduleError, Window
from packlora.schedule.wire import ANSWER, TASK

COMMAND = (sys.executable, "-P", "-m", "packlora.schedule.worker")


class PlanningError(Exception):
    """The process gave no window."""


class PlanningProcess:
    """A process of packlora.schedule.worker, started when it is first asked and again when it has ended.

    Args:
        seconds: after which a process that does not answer is killed.
        command: what to start; for tests.
    """

    def __init__(self, seconds: float, command: list[str] | None = None) -> None:
        self.seconds, self.command = seconds, command or list(COMMAND)
        self.process: subprocess.Popen[str] | None = None
        self._closed = False

    def ask(self, task: Task) -> Window:
        """The window of the task.

        Raises:
            PlanningError: no answer.
            ScheduleError: a sample of the task fits no microbatch.
        """
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        deadline = threading.Timer(self.seconds, process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            process.stdin.write(TASK.dump_json(task).decode() + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # it has ended, or was closed
            line = ""
        late = not deadline.is_alive()
        deadline.cancel()
        if not line.endswith("\n"):
            raise PlanningError(f"no answer in {self.seconds:g} s" if late else _end_of(process))
        reply = ANSWER.validate_json(line)
        if reply.input_error:
            raise ScheduleError(reply.input_error)
        if reply.window is None:
            raise PlanningError(reply.error)
        return reply.window

    def close(self) -> None:
        """End the process, whatever it is at. May be called from another thread than the one that asks."""
        self._closed = True
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _running(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            root = str(Path(__file__).resolve().parents[2])
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "PYTHONUTF8": "1",
            }
            try:
                self.process = subprocess.Popen(
                    self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, encoding="utf-8",
                    start_new_session=True, creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )  # fmt: skip
            except OSError as error:
                raise PlanningError(f"cannot start {self.command[0]}: {error}") from None
        if self._closed:
            self.process.kill()
        return self.process


def _end_of(process: subprocess.Popen[str]) -> str:
    """Say how a process ended that closed its output."""
    process.kill()  # one that closed its output and hangs
    code = process.wait()
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
