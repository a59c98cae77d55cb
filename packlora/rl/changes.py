"""The moments at which jobs that learn from rewards generate: borders of windows, where every adapter has taken its steps.

All jobs' prompts run in one batch (drawing.py), by the adapters as they are on the model: no weights are copied. Each job's
rewards are asked in a thread of its own. Log-probabilities of the sampler are held against those of the trainer for every
batch: where they differ by more than rounding the job ends, as what it would learn from is not what its adapter says.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packlora.base.model import Base
from packlora.changes import Changed, Changes
from packlora.engine.drift import drift_of, why_apart
from packlora.engine.memory import TokenBudget
from packlora.engine.passes import Executor, SingleDevice
from packlora.engine.rows import NO_ADAPTER
from packlora.events import Note
from packlora.parallel.alone import ALONE
from packlora.rl.config import RolloutConfig
from packlora.rl.data import Batch, Completion, RolloutData, sample_of
from packlora.rl.drawing import Drawing, Drawn
from packlora.rl.rewards import Judged, Rewards
from packlora.rl.teacher import BASE, Teacher
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
        jobs: of the run, whose teachers are loaded.

    Raises:
        InputError: a teacher cannot be loaded.
    """

    def __init__(
        self, inner: Changes, base: Base, executor: Executor, single: SingleDevice, events: Emitter, jobs: Sequence[Job]
    ) -> None:  # fmt: skip
        self.inner, self.base, self.executor, self.single, self.events = inner, base, executor, single, events
        self._teachers: dict[str, Teacher] = {}
        for job in jobs:
            source = None if job.config.rollout is None else job.config.rollout.teacher
            if source is not None and source not in (BASE, *self._teachers):
                self._teachers[source] = Teacher(source, base.model.dtype, base.device, job.name)
        self._rewards: dict[str, Rewards] = {}
        self._drawing = Drawing(base, single, lambda: self.events.stop.asked)

    # --- as the loop asks --------------------------------------------------------------------------------------------------

    def first(self, jobs: Sequence[Job]) -> int | None:
        found = self.inner.first(jobs)
        for job in jobs:
            if isinstance(data := job.data, RolloutData):
                data.rollouts.begun_at = job.step
                known = data.rollouts.last_hash(job.step)
                if known not in (None, reward_hash(job.config.rollout)):
                    self.events.emit(Note(f"job {job.name!r}: its rewards have changed since step {job.step}"))
        return slowest(jobs) if found is None and any(map(_is_open, jobs)) else found

    def pending(self, round_: int, jobs: Sequence[Job]) -> bool:
        return self.inner.pending(round_, jobs) or any(self._due(job, round_ - job.joined) for job in jobs)

    def change(self, round_: int, jobs: list[Job], budget: TokenBudget) -> Changed | None:
        for job in jobs:
            if isinstance(data := job.data, RolloutData) and data.rollouts.make is None:
                data.rollouts.make = lambda step, job=job: self._make(job, step, jobs, budget)
        self._generate([(job, step) for job in jobs for step in self._due(job, job.step)], jobs, budget)
        return self.inner.change(round_, jobs, budget) if self.inner.pending(round_, jobs) else None

    def take_off(self, jobs: list[Job], round_: int) -> list[Job]:
        return self.inner.take_off(jobs, round_)

    def judged(self, ends: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.inner.judged(ends)

    def end(self, jobs: Sequence[Job], files: Any) -> None:
        self.inner.end(jobs, files)

    # --- generation --------------------------------------------------------------------------------------------------------

    def _due(self, job: Job, step: int) -> list[int]:
        """Steps whose completions are to be drawn by the adapter that has taken so many steps."""
        if not _is_open(job):
            return []
        rollouts = job.data.rollouts  # type: ignore[attr-defined]
        last = step + rollouts.config.max_staleness
        return [own for own in range(step, min(last + 1, job.data.configured_steps)) if not rollouts.has(own)]

    def _make(self, job: Job, step: int, jobs: Sequence[Job], budget: TokenBudget) -> None:
        """Draw what a plan that is made anew asks for; nothing for a job that takes no more steps."""
        if step in (due := self._due(job, job.step)):
            self._generate([(job, own) for own in due], jobs, budget)
        if _is_open(job) and not self.events.stop.asked and not job.data.rollouts.has(step):  # type: ignore[attr-defined]
            raise RuntimeError(f"job {job.name!r}: nothing was generated for step {step}")

    def _generate(self, wanted: Sequence[tuple[Job, int]], jobs: Sequence[Job], budget: TokenBudget) -> None:
        """Draw and judge the completions of steps of jobs. Where a stop is asked for meanwhile, nothing comes of it."""
        began = time.perf_counter()
        drawn = self._draw(wanted) if wanted else []
        took = time.perf_counter() - began
        groups = [own.groups() for own in drawn]
        asked = [self._rewards_of(own.job).ask(some) for own, some in zip(drawn, groups, strict=True)]
        forwards = Forwards(self.base.device, self.executor, budget, Team(ALONE, self.events.stop, list(jobs)))
        for own, some, futures in zip(drawn, groups, asked, strict=True):
            scores = self._scores(own, forwards)
            if scores is None:
                return
            judged = self._rewards_of(own.job).take(some, futures)
            self._put(own, judged, scores, took)

    def _draw(self, wanted: Sequence[tuple[Job, int]]) -> list[Drawn]:
        """Completions of all prompts, in one batch; none where a stop is asked for."""
        return self._drawing.draw(wanted)

    def _rewards_of(self, job: Job) -> Rewards:
        if job.name not in self._rewards:
            self._rewards[job.name] = Rewards(job.config.rollout, job.name, self._drawing.has_reward(job))
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

    def _put(
        self, drawn: Drawn, judged: Sequence[Judged], scores: _Scores, draw_seconds: float
    ) -> None:  # fmt: skip
        job, config = drawn.job, drawn.job.config.rollout
        rewards, names = self._rewards_of(job), self._rewards_of(job).names
        for one in judged:
            if one.lost is not None:
                self.events.emit(
                    Note(f"job {job.name!r}, step {drawn.step + 1}: {one.lost}; its completions teach nothing")
                )
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
        tokens_of = f"the completions of step {drawn.step + 1}"
        if (apart := why_apart(float(np.mean(drifts)), self.base.model.dtype, tokens_of)) is not None:
            job.fail(apart, reverted=False)
            return
        job.data.rollouts.put(  # type: ignore[attr-defined]
            Batch(drawn.step, job.step, reward_hash(config), tuple(completions), draw_seconds)
        )


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
