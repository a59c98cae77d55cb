"""The moments at which jobs that learn from rewards generate: borders of windows, where every adapter has taken its steps, and
evaluations.

All jobs' prompts run in one batch, by the adapters as they are on the model: no weights are copied. Environments and rewards
run in threads of their job. A job whose completions are not judged yet takes no step: its next global batch is put off by a
round, and the others go on. So it keeps the version of its adapter until its completions are there, and no bit depends on when
that is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packlora.base.model import Base
from packlora.changes import Changed, Changes
from packlora.data.encode import Sample
from packlora.engine.memory import TokenBudget
from packlora.engine.passes import Executor, SingleDevice
from packlora.errors import InputError
from packlora.events import Note
from packlora.parallel.alone import ALONE
from packlora.rl.courses import Courses, Key
from packlora.rl.data import RolloutData
from packlora.rl.judging import Judging, reward_hash
from packlora.rl.teacher import Teacher, load_teacher
from packlora.runtime.events import Emitter
from packlora.runtime.forwards import Forwards
from packlora.runtime.job import Job
from packlora.runtime.team import Team
from packlora.runtime.windows import slowest


class RolloutChanges(Changes):
    """Changes of a run with such jobs: `inner`, and what is generated before them.

    Args:
        executor, single: of the run; the second one for its adapters.
        jobs: on the model; those that join and leave come and go.
        teachers: of these jobs, by source; those of jobs that join are added.
        in_step: whether jobs are compared round by round, so that none may go on without the others.
    """

    def __init__(
        self, inner: Changes, base: Base, executor: Executor, single: SingleDevice, events: Emitter, jobs: list[Job],
        teachers: dict[str, Teacher], in_step: bool = False,
    ) -> None:  # fmt: skip
        self.inner, self.base, self.executor, self.single, self.events = inner, base, executor, single, events
        self.jobs, self.in_step = jobs, in_step
        rung = threading.Event()
        self._judging = Judging(base, single, events, teachers, rung)
        sampler, workers = self._judging.drawing.sampler, self._judging.workers
        self._courses = Courses(sampler, workers, rung, self._is_stopped)
        self._known = set[str]()
        """Jobs whose completions are drawn here."""
        self._evaluated = set[tuple[str, int]]()
        """Jobs and steps whose held-out completions were handed over."""

    # --- as the loop asks --------------------------------------------------------------------------------------------------

    def first(self, jobs: Sequence[Job]) -> int | None:
        found = self.inner.first(jobs)
        if not self.in_step:
            _stand_together(jobs)
        if found is None and any(_is_open(job) or self._is_under_way(job) for job in jobs):
            found = slowest(jobs)
        return found

    def pending(self, round_: int, jobs: Sequence[Job]) -> bool:
        return self.inner.pending(round_, jobs) or any(
            self._due(job, round_ - job.joined) or self._is_under_way(job) or self._is_news(job) or _may_wait(job)
            for job in jobs
        )

    def change(self, round_: int, jobs: list[Job], budget: TokenBudget) -> Changed | None:
        changed = None
        if self.inner.pending(round_, jobs):
            changed = self.inner.change(round_, jobs, budget)
        self._meet(jobs, budget)
        forwards = self._forwards(budget)
        for job in jobs:
            for step in self._due(job, job.step):
                self._begin(job, step, False, forwards)
        self._run(lambda: any(map(self._may_step, jobs)))
        for job in jobs:
            if (apart := self._judging.apart.pop(job.name, None)) is not None and job.status == "running":
                job.fail(apart, reverted=False)
            if self._courses.of(job.name) and job.joined + job.step <= round_ and job.step < job.data.num_steps:
                job.joined += 1
        return Changed() if changed is None and any(map(self._is_news, jobs)) else changed

    def held_out(self, jobs: Sequence[Job], forwards: Forwards) -> dict[str, Sequence[Sample]]:
        """See Changes. Completions of held-out prompts are drawn for; a job whose rewards are not there yet is left out."""
        self._meet(jobs, forwards.budget)
        own = [job for job in jobs if isinstance(job.data, RolloutData) and job.data.rollouts.held_out]
        lacking = [job for job in own if not _is_evaluated(job)]
        for job in lacking:
            self._begin(job, job.step, True, forwards)
        if lacking:
            self._run(lambda: True)
        found = dict(self.inner.held_out([job for job in jobs if job not in own], forwards))
        for job in filter(_is_evaluated, own):
            found[job.name] = job.data.rollouts.evaluated[1]  # type: ignore[attr-defined]
            self._evaluated.add((job.name, job.step))
        return found

    def take_off(self, jobs: list[Job], round_: int) -> list[Job]:
        return self.inner.take_off(jobs, round_)

    def judged(self, ends: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.inner.judged(ends)

    def end(self, jobs: Sequence[Job], files: Any) -> None:
        for worker in self._judging.workers():
            worker.close()
        self.inner.end(jobs, files)

    # --- generation --------------------------------------------------------------------------------------------------------

    def _meet(self, jobs: Sequence[Job], budget: TokenBudget) -> None:
        """Get ready for jobs that have not been seen before."""
        for job in jobs:
            if job.name in self._known or not isinstance(data := job.data, RolloutData):
                continue
            self._known.add(job.name)
            try:
                load_teacher(job.config, self.base, self._judging.teachers)
            except InputError as error:  # of a job that has joined
                job.fail(str(error), reverted=False)
            rollouts = data.rollouts
            rollouts.begun_at = job.step
            rollouts.make = lambda step, job=job: self._make(job, step, budget)
            known = rollouts.last_hash(job.step)
            if known not in (None, reward_hash(job.config.rollout)):
                self.events.emit(Note(f"job {job.name!r}: its rewards have changed since step {job.step}"))

    def _forwards(self, budget: TokenBudget) -> Forwards:
        return Forwards(self.base.device, self.executor, budget, Team(ALONE, self.events.stop, list(self.jobs)))

    def _due(self, job: Job, step: int) -> list[int]:
        """Steps whose completions are to be drawn by the adapter that has taken so many steps."""
        if not _is_open(job):
            return []
        rollouts = job.data.rollouts  # type: ignore[attr-defined]
        last = step + rollouts.config.max_staleness
        return [own for own in range(step, min(last + 1, job.data.configured_steps)) if not rollouts.has(own)]

    def _make(self, job: Job, step: int, budget: TokenBudget) -> None:
        """Draw what a plan that is made anew asks for; nothing for a job that takes no more steps."""
        if step in (due := self._due(job, job.step)):
            for own in due:
                self._begin(job, own, False, self._forwards(budget))
            self._run(lambda: not self._courses.of(job.name), at_once=True)
        is_to_learn = _is_open(job) and job.name not in self._judging.apart and not self.events.stop.asked
        if is_to_learn and not job.data.rollouts.has(step):  # type: ignore[attr-defined]
            raise RuntimeError(f"job {job.name!r}: nothing was generated for step {step}")

    def _begin(self, job: Job, step: int, is_held_out: bool, forwards: Forwards) -> None:
        """Begin to draw and judge completions, unless this is under way."""
        if (key := (job.name, step, is_held_out)) not in self._courses:
            drawn = self._judging.drawing.begun(job, step, is_held_out)
            self._courses.begin(key, self._judging.course(drawn, forwards), drawn.took)

    def _is_stopped(self) -> bool:
        self.events.look()
        return self.events.stop.asked

    def _run(self, may_go_on: Callable[[], bool], at_once: bool = False) -> None:
        """Go on with what is under way until all of it is there. Where jobs need not wait for one another: until some job may
        go on, and the others were waited for as long as drawing took, which is about what a round without them costs."""
        there = {job.name: job for job in self.jobs}
        self._courses.keep(lambda key: _is_wanted(there.get(key[0]), key))

        def is_enough(drew: float, waited: float) -> bool:
            return (at_once or (not self.in_step and waited >= drew)) and may_go_on()

        self._courses.run(is_enough)

    def _is_news(self, job: Job) -> bool:
        """Whether the completions of held-out prompts are there, and were not asked for since."""
        return _is_evaluated(job) and (job.name, job.step) not in self._evaluated

    def _is_under_way(self, job: Job) -> bool:
        """Whether something is to come of what a job has drawn."""
        return bool(self._courses.of(job.name)) or job.name in self._judging.apart

    def _may_step(self, job: Job) -> bool:
        return job.status == "running" and job.step < job.data.num_steps and not self._is_under_way(job)


def _is_open(job: Job) -> bool:
    """Whether a job learns from rewards and is to take more steps."""
    return isinstance(job.data, RolloutData) and job.status == "running" and job.step < job.data.num_steps


def _may_wait(job: Job) -> bool:
    """Whether an evaluation before its next step may have to wait for rewards, though the completions of that step are there:
    a window that was handed out before would be trained without it."""
    return _is_open(job) and bool(job.data.rollouts.held_out)  # type: ignore[attr-defined]


def _is_evaluated(job: Job) -> bool:
    """Whether the completions of held-out prompts are there by the adapter as it is."""
    known = job.data.rollouts.evaluated if isinstance(job.data, RolloutData) else None
    return job.status == "running" and known is not None and known[0] == job.step


def _is_wanted(job: Job | None, key: Key) -> bool:
    """Whether completions are still to be drawn."""
    if job is None or job.status != "running":
        return False
    return key[1] == job.step if key[2] else _is_open(job)


def _stand_together(jobs: Sequence[Job]) -> None:
    """Let jobs that an interruption found at other steps go on in one round."""
    running = [job for job in jobs if job.status == "running"]
    round_ = max((job.joined + job.step for job in running), default=0)
    for job in running:
        later = round_ - job.joined - job.step
        job.joined += later
        job.left = None if job.left is None else job.left + later
