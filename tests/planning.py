"""Windows planned in the training process: one that only plans takes a second of each run to start.

Tasks and answers have the form in which they travel to that process and back. The fixture `planning_process` of conftest.py
gives runs of a test the process; commands that are processes of their own have it, too.
"""

from __future__ import annotations

from packlora.schedule.background import COMMAND, PlanningError, PlanningProcess
from packlora.schedule.solve import Task
from packlora.schedule.types import ScheduleError, Window
from packlora.schedule.worker import ANSWER, TASK, answer_of

ask_process, answer_of_process = PlanningProcess.ask, PlanningProcess.answer


def ask(self: PlanningProcess, task: Task) -> None:
    """Keep the task. A process with a command of its own is asked itself."""
    if self.command != list(COMMAND):
        ask_process(self, task)
    self.task = task  # type: ignore[attr-defined]


def answer(self: PlanningProcess) -> Window:
    """What the process would answer. A process with a command of its own answers itself."""
    if self.command != list(COMMAND):
        return answer_of_process(self)
    task = self.task  # type: ignore[attr-defined]
    reply = ANSWER.validate_json(ANSWER.dump_json(answer_of(TASK.dump_json(task).decode())))
    if reply.input_error:
        raise ScheduleError(reply.input_error)
    if reply.window is None:
        raise PlanningError(reply.error)
    return reply.window


PlanningProcess.ask, PlanningProcess.answer = ask, answer  # type: ignore[method-assign]
