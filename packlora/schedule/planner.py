"""Windows of microbatches for a set of jobs: the scheduler's front door.

    planner = Planner(jobs, capacity=4096)
    for window in planner.windows():
        for microbatch in window.microbatches: ...

Jobs may have any number of batches, and may join or leave between windows that were handed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packlora.schedule.cost import CostModel
from packlora.schedule.solve import JobRounds, Task, finish, solve_window
from packlora.schedule.types import METHODS, Carry, JobBatches, ScheduleError, Window

WINDOW_ROUNDS = 16
"""Rounds planned at once: few enough to plan in a fraction of a second, and at a border little is lost."""
NODE_LIMIT = 300
"""Branch-and-bound nodes of one integer program; what stops it, so that the result does not depend on the machine."""


@dataclass(slots=True)
class _Member:
    """A job in the plan: its batch 0 is taken in round `joined`; from round `left` on it takes no part."""

    job: JobBatches
    joined: int = 0
    left: int | None = None

    @property
    def end(self) -> int:
        end = self.joined + self.job.num_batches
        return end if self.left is None else max(min(end, self.left), self.joined)


class Planner:
    """Makes windows.

    Args:
        jobs: in the order in which their samples stand in a microbatch.
        capacity: most tokens of a microbatch.
        lag: least number of slots from a job's batch to its next one: 1 on one device, the stages of a pipeline.
        method: one of METHODS.
        time_limit_s: for one integer program, as an emergency brake: what it stops is reported, and the greedy result taken.
        cost: of a microbatch on each stage of a pipeline; see rules.py.
        window_rounds: rounds planned at once. Windows begin at its multiples.

    Raises:
        ScheduleError: an unknown method, a number out of range, or two jobs of one name.
    """

    def __init__(
        self,
        jobs: Sequence[JobBatches],
        capacity: int,
        *,
        lag: int = 1,
        method: str = "auto",
        time_limit_s: float = 10.0,
        cost: CostModel | None = None,
        window_rounds: int = WINDOW_ROUNDS,
    ) -> None:
        if method not in METHODS:
            raise ScheduleError(f"schedule method {method!r} is not known; there are {', '.join(METHODS)}")
        least = {"lag": lag, "capacity": capacity, "window_rounds": window_rounds}
        for name, value in least.items():
            if value < 1:
                raise ScheduleError(f"schedule: {name} is {value}, but must be 1 or more")
        if time_limit_s <= 0:
            raise ScheduleError(f"schedule: time_limit_s is {time_limit_s:g}, but must be above 0")
        if cost is not None and (own := cost.devices) != lag:
            raise ScheduleError(f"schedule: the cost model is of {own} stages, the pipeline has {lag}")
        self.capacity, self.lag, self.method = capacity, lag, method
        self.time_limit_s, self.cost, self.window_rounds = time_limit_s, cost, window_rounds
        self._members: dict[str, _Member] = {}
        self._given = 0  # rounds below this are in windows that were handed out
        for job in jobs:
            self.add(job, 0)

    @property
    def num_rounds(self) -> int:
        """Rounds until every job is finished."""
        return max((member.end for member in self._members.values()), default=0)

    def add(self, job: JobBatches, at_round: int) -> None:
        """A job joins: its batch 0 is taken in round `at_round`.

        Raises:
            ScheduleError: the round was handed out already, or there is a job of this name.
        """
        if job.name in self._members:
            raise ScheduleError(f"job {job.name!r} is in the plan already; names are unique")
        self._not_given(job.name, at_round)
        self._members[job.name] = _Member(job, at_round)

    def put_off(self, name: str, at_round: int) -> None:
        """A job takes the batches that were not handed out later, as if its batch 0 was in round `at_round`."""
        self._members[name].joined = at_round

    def remove(self, name: str, at_round: int) -> None:
        """A job leaves: from round `at_round` on none of its batches is taken.

        Raises:
            ScheduleError: the round was handed out already, or there is no such job.
        """
        if name not in self._members:
            raise ScheduleError(f"job {name!r} is not in the plan; there are {', '.join(self._members) or 'none'}")
        self._not_given(name, at_round)
        self._members[name].left = at_round

    def _not_given(self, name: str, at_round: int) -> None:
        if at_round < self._given:
            raise ScheduleError(
                f"job {name!r}: round {at_round} was handed out already; the first that can still change is {self._given}"
            )

    def window_start(self, round_: int) -> int:
        """First round of the window that holds the round."""
        return round_ - round_ % self.window_rounds

    def window(self, first_round: int, carry: Carry | None = None) -> Window:
        """Rounds first_round up to the end of the window that holds it. Depends on the jobs and the arguments alone.

        To get the microbatches of an uninterrupted run again, begin at `window_start`. The carry only adds no-ops.

        Raises:
            ScheduleError: a sample that fits no microbatch.
        """
        task = self.task(first_round)
        return finish(solve_window(task), task, carry)

    def windows(self, start_round: int = 0) -> Iterator[Window]:
        """All windows from the one that holds start_round, whole; each with the no-ops that the one before it asks for.
        Each is made when it is asked for."""
        first, carry = self.window_start(start_round), Carry()
        while first < self.num_rounds:
            window = self.window(first, carry)
            first, carry = first + window.num_rounds, window.carry
            self.gave(first)
            yield window

    def task(self, first_round: int) -> Task:
        """Input of the window that begins at first_round, as plain data."""
        end = self.window_start(first_round) + self.window_rounds
        jobs = []
        for name, member in self._members.items():
            start, stop = max(first_round, member.joined), min(end, member.end)
            if start < stop:
                batches = tuple(
                    tuple((int(sample), int(length)) for sample, length in member.job.batch(round_ - member.joined))
                    for round_ in range(start, stop)
                )
                jobs.append(JobRounds(name, start - member.joined, start, batches))
        return Task(
            first_round, end - first_round, tuple(jobs), self.capacity, self.lag, self.method, self.time_limit_s,
            NODE_LIMIT, self.cost,
        )  # fmt: skip

    def gave(self, round_: int) -> None:
        """Rounds below this one were handed out and can no longer change."""
        self._given = max(self._given, round_)
