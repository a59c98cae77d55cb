"""What torchrun starts in tests: the packlora command, with a mishap on one of the processes at its third step.

torchrun ... launched.py MISHAP RANK train RUN.yaml         (RANK may be "any")

The mishap "waits": the time in which all processes are to come begins when the one of this rank has come. "late": the process
of this rank takes a second for what it says of bad input.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def mishap(kind: str) -> None:
    if kind == "raise":
        raise ValueError("a mishap, for this test")
    if kind == "node":  # with the agent
        os.kill(os.getppid(), signal.SIGKILL)
        kind = "kill"
    if kind == "once":  # a process that torchrun starts again does better
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return
    number = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "term": signal.SIGTERM}[kind]
    os.kill(os.getppid() if kind == "term" else os.getpid(), number)


def main() -> None:
    sys.path[:0] = [str(Path(__file__).parents[1])]
    import conftest  # noqa: F401 - the same settings as in the tests' own process

    from packlora.cli import app
    from packlora.runtime.job import Job

    kind, rank = sys.argv[1], sys.argv[2]
    if kind == "waits":
        import patience

        patience.wait_for_ranks([int(rank)])
    elif kind == "late" and rank == os.environ["RANK"]:
        from packlora import command_line

        say = command_line.say
        command_line.say = lambda text: (time.sleep(1.0), say(text))[1]  # type: ignore[assignment,func-returns-value]
    elif kind != "none" and rank in (os.environ["RANK"], "any"):
        original, steps = Job.stepped, 0

        def stepped(job: Job, *numbers: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 3:
                mishap(kind)
            return original(job, *numbers)

        Job.stepped = stepped  # type: ignore[method-assign]
    sys.argv[1:] = sys.argv[3:]
    app()


if __name__ == "__main__":
    main()
