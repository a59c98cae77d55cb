"""Placement of a run's base model and jobs on one device, which has all of both. several.py has that over processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from packlora.adapters.linear import Attached
from packlora.base.model import Base, load_base
from packlora.config import Run
from packlora.engine.passes import Passes, SingleDevice
from packlora.parallel.alone import ALONE, Alone, OneProcess
from packlora.parallel.layout import Layout
from packlora.result import Result
from packlora.runtime.events import Emitter
from packlora.runtime.flow import Flow
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile

if TYPE_CHECKING:
    from packlora.runtime.trainer import Trainer

Listen = Callable[[Emitter], contextlib.AbstractContextManager[None]]
"""Subscribes whoever hears of all jobs."""


class Placement:
    """Placement of a run on one device.

    layout: which process trains which jobs. group: the processes that train the jobs of this one.

    Args:
        prepared: all jobs of the run.
    """

    is_open = True
    """Whether jobs may join and leave while the run trains."""
    sampling: Alone = ALONE
    """Processes that generate the texts of a job in step."""

    def __init__(self, run: Run, mesh: OneProcess, prepared: PreparedRun) -> None:
        self.run, self.mesh, self.prepared = run, mesh, prepared
        self.layout: Layout = Layout.of_one_device(job.data.name for job in prepared.jobs)
        self.group: Alone = ALONE

    def own(self) -> PreparedRun:
        """Jobs of this process."""
        names = self.layout.groups[self.layout.group_of(self.mesh.rank)]
        return replace(self.prepared, jobs=[job for job in self.prepared.jobs if job.config.name in names])

    def load(self) -> Base:
        """Load this process's part of the base model. Raises InputError as load_base."""
        prepared = self.prepared
        return load_base(self.run, prepared.tokenizer, prepared.longest_run, prepared.modality)

    def passes(self, base: Base, attached: Attached) -> Passes:
        """Executor of microbatches on the model."""
        return SingleDevice(base, attached)

    def profile(self, known: Profile) -> Profile:
        """Profile of a device that has its part of the model.

        Args:
            known: of one with all of it.
        """
        return known

    def flow(self, own: PreparedRun, known: Profile, passes: Passes) -> Flow:
        """Flow of slots. known: of a device with its part of the model."""
        return Flow()

    def train(self, trainer: Trainer | None, logged: int, listen: Listen, sample: Callable[[Trainer], None]) -> Result:
        """Train this process's jobs.

        Args:
            trainer: of them; None for a process without any.
            logged: microbatches that earlier sessions have logged.
            listen: see Listen; called on the first process.
            sample: subscribes what generates texts.

        Returns:
            How the whole run ended, on every process.
        """
        assert trainer is not None
        with listen(trainer.events):
            sample(trainer)
            return trainer.fit()
