"""Flow of slots through the processes that hold the model: here one slot after the other. packlora/pipeline/flow.py has that of
a pipeline, in which several are on their way."""

from __future__ import annotations

from collections.abc import Mapping

from packlora.engine.engine import Engine
from packlora.engine.memory import TokenBudget
from packlora.engine.passes import Executor
from packlora.events import PipelineRan
from packlora.parallel.alone import Alone
from packlora.runtime.job import Job
from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch


class Flow:
    """Order in which the loop runs slots, and its time.

    lag: of the engine, which windows are planned for. cost: of a microbatch, where they are planned by it; the same on every
    process and in every session.
    """

    lag = 1
    cost: CostModel | None = None

    def engine(self, executor: Executor, group: Alone, budget: TokenBudget) -> Engine:
        """The engine that runs the slots."""
        return Engine(executor, group, budget)

    def begin(self) -> None:
        """The engine begins to run, with nothing on its way."""

    def entered(self, window: int, microbatch: Microbatch | None) -> None:
        """A slot enters: the first round of its window, and the microbatch of this replica, if it runs one."""

    def ran(self, jobs: Mapping[str, Job]) -> PipelineRan | None:
        """Event about the slots that have run since `begin`, where there is one. All processes call it, with nothing on its
        way."""
        return None
