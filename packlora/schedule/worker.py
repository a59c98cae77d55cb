"""Entry point of the process that plans windows: `python -m packlora.schedule.worker`, see process.py.

It reads a task a line and writes a window a line, and ends when its input does, so that it never outlives the process that
started it.
"""

from __future__ import annotations

import os
import signal
import sys

from packlora.errors import InputError
from packlora.schedule.solve import solve_window
from packlora.schedule.wire import ANSWER, TASK, Answer


def main() -> None:
    """Answer tasks until the input ends, or the answers are no longer read. A signal ends the process without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of libraries must not get between the answers
    for line in sys.stdin:
        if not line.endswith("\n"):  # the asking process was killed in the middle
            return
        try:
            print(ANSWER.dump_json(_answer(line)).decode(), file=answers, flush=True)
        except BrokenPipeError:  # the asking process was killed
            os._exit(0)


def _answer(line: str) -> Answer:
    try:
        return Answer(solve_window(TASK.validate_json(line)))
    except InputError as error:
        return Answer(input_error=str(error))
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
