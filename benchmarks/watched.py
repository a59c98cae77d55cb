"""Processes that a benchmark starts, with all that these start: their environment, memory and end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

PAUSE, GONE = 0.2, 30.0
"""Seconds between two looks at processes, and for which killed ones are waited for."""


def environment() -> dict[str, str]:
    """Variables for a command of this checkout, which is no rank of a torchrun."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [env.get("PYTHONPATH")])])
    return env


class Watch:
    """A look at a process and its descendants every PAUSE seconds, until `end`. `most` is the most memory that one of them had
    at a time, in bytes, without files that it has mapped.

    Args:
        kill: all are killed once this is true.
    """

    def __init__(self, pid: int, kill: Callable[[], bool] = lambda: False) -> None:
        self.most = 0
        self._pid, self._kill, self._ended = pid, kill, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(PAUSE):
            found = descendants(self._pid)
            self.most = max(self.most, *(own_memory(pid) for pid in found))
            if self._kill():
                kill(found)

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()


def descendants(pid: int) -> list[int]:
    """A process and all that it has started."""
    own: list[str] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of each of its threads
        with contextlib.suppress(OSError):
            own += children.read_text().split()
    return [pid, *(found for child in own for found in descendants(int(child)))]


def kill(pids: list[int]) -> None:
    """Kill processes in this order: one that has started others must not see these end."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(pids: list[int]) -> None:
    """Wait until killed processes hold nothing. Raises TimeoutError after GONE seconds."""
    until = time.monotonic() + GONE
    while left := [pid for pid in pids if _is_there(pid)]:
        if time.monotonic() > until:
            raise TimeoutError(f"processes {left} have not ended {GONE:.0f} s after they were killed")
        time.sleep(PAUSE / 4)


def _is_there(pid: int) -> bool:
    """Whether a process runs: one that only waits for its parent to read its exit code does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def own_memory(pid: int) -> int:
    """Bytes of a process that are no files; 0 of one that has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
