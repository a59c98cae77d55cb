"""Decisions of the processes that train the same jobs alike: what memory did not hold, stops, ends of jobs.

A process alone is a team of one, for which nothing of this costs anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from packlora.parallel.alone import Alone
from packlora.runtime.events import StopRequest
from packlora.runtime.job import Job


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

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked for what the others do not know of yet."""
        if self.group.processes == 1:
            return False
        return (self._asked.asked and not self.stop.asked) or self._is_to_end_jobs

    @property
    def _is_to_end_jobs(self) -> bool:
        asked = self._asked.jobs
        return bool(asked) and any(job.name in asked for job in self.jobs)

    def agree(self, lacking: int = 0) -> int:
        """Agree on stops and on jobs that are to end. All processes call it.

        Args:
            lacking: tokens of the microbatch of this process if memory ran out, else 0.

        Returns:
            The largest of the tokens.
        """
        if self.group.processes == 1:
            return lacking
        asked = self._asked
        told = [lacking, 1 + (asked.signal or 0) if asked.asked else 0, int(self._is_to_end_jobs)]
        lacking, stop, ends_jobs = self.group.most(told)
        if stop and not self.stop.asked:
            self.stop.ask(stop - 1 or None)
        if ends_jobs:
            names = [job.name for job in self.jobs]
            for name, is_asked in zip(names, self.group.most([int(name in asked.jobs) for name in names]), strict=True):
                if is_asked:
                    self.stop.jobs.setdefault(name, asked.jobs.pop(name, "a subscriber"))
        return lacking
