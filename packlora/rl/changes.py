"""The moments at which jobs that learn from rewards generate: borders of windows, where every adapter has taken its steps, and
evaluations.

All jobs' prompts run in one batch, by the adapters as they are on the model: no weights are copied. Environments and rewards
run in threads of their job. A job whose completions are not judged yet takes no step: its next global batch is put off by a
round, and the others go on. So it keeps the version of its adapter until its completions are there, and no bit depends on when
that is. Log-probabilities of the sampler are held against those of the trainer for every batch: where they differ by more than
rounding the job ends, as what it would learn from is not what its adapter says.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packlora.base.model import Base
from packlora.changes import Changed, Changes
from packlora.data.encode import Sample
from packlora.engine.drift import drift_of, why_apart
from packlora.engine.memory import TokenBudget
from packlora.engine.passes import Executor, SingleDevice
from packlora.engine.rows import NO_ADAPTER
from packlora.errors import InputError
from packlora.events import Note
from packlora.parallel.alone import ALONE
from packlora.rl.config import RolloutConfig
from packlora.rl.courses import Courses, Key, Steps
from packlora.rl.data import Batch, Completion, RolloutData, sample_of
from packlora.rl.drawing import Drawing, Drawn
from packlora.rl.rewards import Judged, Rewards
from packlora.rl.teacher import BASE, Teacher
from packlora.rl.workers import Worker
from packlora.runtime.events import Emitter
from packlora.runtime.forwards import Forwards
from packlora.runtime.job import Job
from packlora.runtime.team import Team
from packlora.runtime.windows import slowest

TINY = 1e-4
"""Added to a standard deviation, as TRL does."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """Log-probabilities [l] of each completion's tokens: by the trainer, and where asked for by the base model, to which the
    divergence is counted, and by the teacher."""

    own: list[np.ndarray]
    base: list[np.ndarray] | None
    teacher: list[np.ndarray] | None


class RolloutChanges(Changes):
    """Changes of a run with such jobs: `inner`, and what is generated before them.

    Args:
        executor, single: of the run; the second one for its adapters.
        jobs: on the model; those that join and leave come and go. Teachers are loaded for those that are there.
        in_step: whether jobs are compared round by round, so that none may go on without the others.

    Raises:
        InputError: a teacher cannot be loaded.
    """

    def __init__(
        self, inner: Changes, base: Base, executor: Executor, single: SingleDevice, events: Emitter, jobs: list[Job],
        in_step: bool = False,
    ) -> None:  # fmt: skip
        self.inner, self.base, self.executor, self.single, self.events = inner, base, executor, single, events
        self.jobs, self.in_step = jobs, in_step
        self._teachers: dict[str, Teacher] = {}
        for job in jobs:
            self._load_teacher(job)
        self._rewards: dict[str, Rewards] = {}
        self._known = set[str]()
        """Jobs whose completions are drawn here."""
        self._evaluated = set[tuple[str, int]]()
        """Jobs and steps whose held-out completions were handed over."""
        self._is_decided = False
        """Whether what joins and leaves at the next border has been decided."""
        rung = self._rung = threading.Event()
        self._drawing = Drawing(base, single, rung)
        self._courses = Courses(self._drawing.sampler, self._workers, rung, lambda: self.events.stop.asked)

    # --- as the loop asks --------------------------------------------------------------------------------------------------

    def first(self, jobs: Sequence[Job]) -> int | None:
        found = self.inner.first(jobs)
        if not self.in_step:
            _stand_together(jobs)
        if found is None and any(_is_open(job) or self._courses.of(job.name) for job in jobs):
            found, self._is_decided = slowest(jobs), True
        return found

    def pending(self, round_: int, jobs: Sequence[Job]) -> bool:
        return self.inner.pending(round_, jobs) or any(
            self._due(job, round_ - job.joined) or self._courses.of(job.name) or self._is_news(job) for job in jobs
        )

    def change(self, round_: int, jobs: list[Job], budget: TokenBudget) -> Changed | None:
        decided, self._is_decided = self._is_decided, False
        changed = None
        if not decided and self.inner.pending(round_, jobs):
            changed = self.inner.change(round_, jobs, budget)
        self._meet(jobs, budget)
        forwards = self._forwards(budget)
        for job in jobs:
            for step in self._due(job, job.step):
                self._begin(job, step, False, forwards)
        self._run(lambda: any(map(self._may_step, jobs)))
        for job in jobs:
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
        for worker in self._workers():
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
                self._load_teacher(job)
            except InputError as error:  # of a job that has joined
                job.fail(str(error), reverted=False)
            rollouts = data.rollouts
            rollouts.begun_at = job.step
            rollouts.make = lambda step, job=job: self._make(job, step, budget)
            known = rollouts.last_hash(job.step)
            if known not in (None, reward_hash(job.config.rollout)):
                self.events.emit(Note(f"job {job.name!r}: its rewards have changed since step {job.step}"))

    def _load_teacher(self, job: Job) -> None:
        source = None if job.config.rollout is None else job.config.rollout.teacher
        if source is not None and source not in (BASE, *self._teachers):
            self._teachers[source] = Teacher(source, self.base.model.dtype, self.base.device, job.name)

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
        if _is_open(job) and not self.events.stop.asked and not job.data.rollouts.has(step):  # type: ignore[attr-defined]
            raise RuntimeError(f"job {job.name!r}: nothing was generated for step {step}")

    def _begin(self, job: Job, step: int, is_held_out: bool, forwards: Forwards) -> None:
        """Begin to draw and judge completions, unless this is under way."""
        if (key := (job.name, step, is_held_out)) not in self._courses:
            drawn = self._drawing.begun(job, step, is_held_out)
            self._courses.begin(key, self._course(drawn, forwards), drawn.took)

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

    def _may_step(self, job: Job) -> bool:
        return job.status == "running" and job.step < job.data.num_steps and not self._courses.of(job.name)

    def _course(self, drawn: Drawn, forwards: Forwards) -> Steps:
        """Draw and judge the completions of a step of a job. Where a stop is asked for meanwhile, nothing comes of it."""
        yield from self._drawing.course(drawn)
        rewards, groups = self._rewards_of(drawn.job), drawn.groups()
        futures = rewards.ask(groups)
        scores = self._scores(drawn, forwards)
        if scores is None:
            return
        yield futures
        self._put(drawn, rewards.judged(groups, futures), scores)

    def _workers(self) -> list[Worker]:
        return [*self._drawing.workers(), *(rewards.worker for rewards in self._rewards.values())]

    def _rewards_of(self, job: Job) -> Rewards:
        if job.name not in self._rewards:
            self._rewards[job.name] = Rewards(job.config.rollout, job.name, self._drawing.has_reward(job), self._rung)
        return self._rewards[job.name]

    # --- what is learnt ----------------------------------------------------------------------------------------------------

    def _scores(self, drawn: Drawn, forwards: Forwards) -> _Scores | None:
        """Score each completion's tokens. None where a stop is asked for."""
        job, name = drawn.job, drawn.job.name
        samples = [sample_of(talk.start, talk.ids, talk.mask) for talk in drawn.talks]
        own = forwards.over({name: samples}, {name: job.adapter.number}, [name], job.learning.objective.terms)
        if own is None:
            return None
        base, teacher = None, job.config.rollout.teacher
        has_reference = bool(getattr(job.learning.objective, "kl", 0.0))
        if has_reference or teacher == BASE:
            found = forwards.over({name: samples}, {name: NO_ADAPTER}, [name], job.learning.objective.terms)
            if found is None:
                return None
            base = found[name].logps
        taught = (
            base
            if teacher == BASE
            else None
            if teacher is None
            else self._teachers[teacher].logps(samples, job.config.rollout.temperature)
        )
        return _Scores(own[name].logps, base if has_reference else None, taught)

    def _put(self, drawn: Drawn, judged: Sequence[Judged], scores: _Scores) -> None:
        job, config = drawn.job, drawn.job.config.rollout
        rewards, names = self._rewards_of(job), self._rewards_of(job).names
        for one in judged:
            if one.lost is not None:
                self.events.emit(Note(f"job {job.name!r}, {_where(drawn)}: {one.lost}; {_cost(drawn)}"))
        totals = [np.zeros(config.num_generations) if own.lost is not None else rewards.total(own) for own in judged]
        advantages = advantages_of(totals, [own.lost is not None for own in judged], config.scale_rewards)
        logps, base, taught = scores.own, scores.base, scores.teacher
        completions, drifts = [], []
        for at, talk in enumerate(drawn.talks):
            group, place = divmod(at, config.num_generations)
            drifts.append(drift_of(logps[at], talk.logprobs))
            values = {name: judged[group].rewards[number, place] for number, name in enumerate(names)}
            completions.append(Completion(
                drawn.prompts[group], talk.ids, logps[at].tolist(), float(advantages[group][place]),
                float(totals[group][place]), drifts[-1],
                {name: None if np.isnan(value) else float(value) for name, value in values.items()},
                None if base is None else base[at].tolist(), None if taught is None else taught[at].tolist(), talk.text,
                talk.is_cut, judged[group].lost is not None, **self._drawing.more_of(drawn, at),
            ))  # fmt: skip
        tokens_of = f"the completions of {_where(drawn)}"
        if (apart := why_apart(float(np.mean(drifts)), self.base.model.dtype, tokens_of)) is not None:
            job.fail(apart, reverted=False)
            return
        seconds = np.nan if drawn.is_held_out else drawn.seconds
        batch = Batch(drawn.step, job.step, reward_hash(config), tuple(completions), seconds)
        (drawn.rollouts.put_held_out if drawn.is_held_out else drawn.rollouts.put)(batch)


def _where(drawn: Drawn) -> str:
    return f"evaluation at step {drawn.step}" if drawn.is_held_out else f"step {drawn.step + 1}"


def _cost(drawn: Drawn) -> str:
    return "its completions are not counted" if drawn.is_held_out else "its completions teach nothing"


def advantages_of(totals: Sequence[np.ndarray], lost: Sequence[bool], scale: str) -> list[np.ndarray]:
    """Advantages by group and completion: a reward less the mean of its group, over a standard deviation; 0 for groups that are
    lost. totals: [G] by group."""
    kept = [own for own, gone in zip(totals, lost, strict=True) if not gone]
    whole = float(np.concatenate(kept).std(ddof=1)) if kept else 0.0
    out = []
    for own, gone in zip(totals, lost, strict=True):
        away = np.zeros_like(own) if gone else own - own.mean()
        if scale != "none":
            away = away / ((float(own.std(ddof=1)) if scale == "group" else whole) + TINY)
        out.append(away)
    return out


def reward_hash(config: RolloutConfig) -> str:
    """Hash of the files of rewards, environments and tools, by which a resumed run tells that they have changed."""
    digest = hashlib.blake2b(digest_size=8)
    for spec in (*config.reward_sources, *config.tool_specs):
        path = Path(spec.rpartition(":")[0])
        digest.update(spec.encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def _is_open(job: Job) -> bool:
    """Whether a job learns from rewards and is to take more steps."""
    return isinstance(job.data, RolloutData) and job.status == "running" and job.step < job.data.num_steps


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
