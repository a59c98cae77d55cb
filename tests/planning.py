"""Windows planned in the training process: one that only plans takes a second of each run to start.

Tasks and answers have the form in which they travel to that process and back. The fixture `planning_process` of conftest.py
gives runs of a test the process; commands that are processes of their own have it, too.
"""

from __future__ import annotations

from packlora.schedule import worker
from packlora.schedule.process import COMMAND, PlanningError, PlanningProcess
from packlora.schedule.solve import Task
from packlora.schedule.types import ScheduleError, Window
from packlora.schedule.wire import ANSWER, TASK

ask_process = PlanningProcess.ask


def ask(self: PlanningProcess, task: Task) -> Window:
    """What the process would answer. A process with a command of its own is asked itself."""
    if self.command != list(COMMAND):
        return ask_process(self, task)
    reply = ANSWER.validate_json(ANSWER.dump_json(worker._answer(TASK.dump_json(task).decode())))
    if reply.input_error:
        raise ScheduleError(reply.input_error)
    if reply.window is None:
        raise PlanningError(reply.error)
    return reply.window


PlanningProcess.ask = ask  # type: ignore[method-assign]
