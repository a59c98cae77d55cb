"""The process that plans windows: `python -m packlora.schedule.worker`, and the form in which tasks and answers travel.

It reads a task a line and writes a window a line, and ends when its input does, so that it never outlives the process that
started it (background.py). Windows travel in the same form between processes that train them.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass

from pydantic import TypeAdapter

from packlora.errors import InputError
from packlora.schedule.solve import Task, solve_window
from packlora.schedule.types import Window


@dataclass(frozen=True, slots=True)
class Answer:
    """The window of a task; or the message of an InputError, or of what else went wrong."""

    window: Window | None = None
    input_error: str = ""
    error: str = ""


TASK, WINDOW, ANSWER = TypeAdapter(Task), TypeAdapter(Window), TypeAdapter(Answer)
"""Adapters of the form as JSON; decoding an encoded value gives an equal one."""


def main() -> None:
    """Answer tasks until the input ends, or the answers are no longer read. A signal ends the process without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of libraries must not get between the answers
    for line in sys.stdin:
        if not line.endswith("\n"):  # the asking process was killed in the middle
            return
        try:
            print(ANSWER.dump_json(answer_of(line)).decode(), file=answers, flush=True)
        except BrokenPipeError:  # the asking process was killed
            os._exit(0)


def answer_of(line: str) -> Answer:
    """Plan the window of a task in JSON."""
    try:
        return Answer(solve_window(TASK.validate_json(line)))
    except InputError as error:
        return Answer(input_error=str(error))
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
