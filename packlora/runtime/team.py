"""Decisions of the processes that train the same jobs alike: waves of microbatches, sums of gradients, stops.

A process alone is a team of one, for which nothing of this costs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from packlora.parallel.replicas import Alone
from packlora.runtime.events import StopRequest
from packlora.runtime.job import Job

if TYPE_CHECKING:
    from packlora.parallel.adapter import SharedGradient


class Team:
    """
    Args:
        group: the processes.
        asked: what this process was asked for; `stop` is what all of them have agreed on.
        jobs: the same on every process; those that join and leave come and go.
    """

    def __init__(self, group: Alone, asked: StopRequest, jobs: Sequence[Job]) -> None:
        self.group, self.jobs, self._asked = group, jobs, asked
        self.stop = asked if group.processes == 1 else StopRequest()
        self._shared: dict[str, SharedGradient] = {}
        """Shared gradients by job, where replicas hold experts together."""

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked for what the others do not know of yet."""
        return (self._asked.asked and not self.stop.asked) or self._is_to_end_jobs

    @property
    def _is_to_end_jobs(self) -> bool:
        asked = self._asked.jobs
        return bool(asked) and any(job.name in asked for job in self.jobs)

    def agree(self, tokens: int, complete: Sequence[Job]) -> int:
        """After a wave: whether it was too large for a process, who was asked to stop, and which parameters got gradients.

        Args:
            tokens: of the microbatch of this process if memory ran out, else 0.
            complete: jobs that are about to step.

        Returns:
            The largest of the tokens.
        """
        if self.group.processes == 1:
            return tokens
        asked = self._asked
        told = [tokens, 1 + (asked.signal or 0) if asked.asked else 0, int(self._is_to_end_jobs)]
        found = [int(name not in job.state.without) for job in complete for name in job.state.parameters]
        most = iter(self.group.most(told + found))
        tokens, stop, ends_jobs = next(most), next(most), next(most)
        if stop and not self.stop.asked:
            self.stop.ask(stop - 1 or None)
        for job in complete:
            job.state.without = {name for name in job.state.parameters if not next(most)}
        if ends_jobs:
            names = [job.name for job in self.jobs]
            for name, is_asked in zip(names, self.group.most([int(name in asked.jobs) for name in names]), strict=True):
                if is_asked:
                    self.stop.jobs.setdefault(name, asked.jobs.pop(name, "a subscriber"))
        return tokens

    def add_up(self, jobs: Sequence[Job]) -> None:
        """The gradients and losses of jobs that are about to step, over all replicas."""
        if self.group.size == 1 or not jobs:
            return
        gradients, sums = zip(*(job.state.partial() for job in jobs), strict=True)
        summed = torch.cat(sums)
        if self.group.exchanges:
            from packlora.parallel.adapter import SharedGradient

            for job, gradient in zip(jobs, gradients, strict=True):
                if job.name not in self._shared:
                    self._shared[job.name] = SharedGradient(job.adapter, self.group.alike)
                self._shared[job.name].add_up(gradient, self.group.add)
            self.group.add([summed])
        else:
            self.group.add([*gradients, summed])
        for job, own in zip(jobs, summed.split([len(one) for one in sums]), strict=True):
            job.state.sums = own
