"""What a planning process answers: whole windows, as JSON. Its integer programs run in a process of their own (process.py)."""

from __future__ import annotations

from typing import Any

from packlora.schedule.process import MilpSolver
from packlora.schedule.solve import solve_window
from packlora.schedule.wire import task_from_json, window_to_json

_solver = MilpSolver()  # its process starts with the first program


def window(request: dict[str, Any]) -> dict[str, Any]:
    """The window of request["task"]; see wire.py.

    Raises:
        ScheduleError: a sample that fits no microbatch.
    """
    return window_to_json(solve_window(task_from_json(request["task"]), _solver))
