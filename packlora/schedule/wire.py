"""Tasks and windows as JSON: on the pipes of the process that plans, and between processes that train the same windows."""

from __future__ import annotations

from pydantic import TypeAdapter

from packlora.schedule.solve import Task
from packlora.schedule.types import Window

TASK, WINDOW = TypeAdapter(Task), TypeAdapter(Window)
"""What is read is equal to what was written."""
