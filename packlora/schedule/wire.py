"""Tasks and windows as JSON: on the pipes of the process that plans, and between processes that train the same windows."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from packlora.schedule.solve import Task
from packlora.schedule.types import Window


@dataclass(frozen=True, slots=True)
class Answer:
    """The window of a task; or the message of an InputError, or of what else went wrong."""

    window: Window | None = None
    input_error: str = ""
    error: str = ""


TASK, WINDOW, ANSWER = TypeAdapter(Task), TypeAdapter(Window), TypeAdapter(Answer)
"""Adapters of the wire format; decoding an encoded value gives an equal one."""
