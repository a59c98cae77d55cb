"""The course of a job's completions through their drawing, their rewards and their scores, until they are samples.

Log-probabilities of the sampler are held against those of the trainer for every batch: where they differ by more than rounding
the job is to end, as what it would learn from is not what its adapter says.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from packlora.base.model import Base
from packlora.engine.drift import drift_of, why_apart
from packlora.engine.passes import SingleDevice
from packlora.engine.rows import NO_ADAPTER
from packlora.events import Note
from packlora.rl.config import RolloutConfig
from packlora.rl.courses import Steps
from packlora.rl.data import Batch, Completion, sample_of
from packlora.rl.drawing import Drawing, Drawn
from packlora.rl.refill import Found, Refill, Scores
from packlora.rl.refilled import Refilled
from packlora.rl.rewards import Rewards
from packlora.rl.teacher import BASE, Teacher
from packlora.rl.workers import Worker
from packlora.runtime.events import Emitter
from packlora.runtime.forwards import Forwards
from packlora.runtime.job import Job

TINY = 1e-4
"""Added to a standard deviation, as TRL does."""


class Judging:
    """Draws and judges completions.

    Args:
        single: for its adapters.
        teachers: by source.
        rung: set when an environment or a reward has answered.
    """

    def __init__(
        self, base: Base, single: SingleDevice, events: Emitter, teachers: dict[str, Teacher], rung: threading.Event
    ) -> None:
        self.base, self.events, self._rung = base, events, rung
        self.drawing = Drawing(base, single, rung)
        self.apart: dict[str, str] = {}
        """Jobs whose sampler is not their trainer, and what is wrong."""
        self.teachers = teachers
        self._rewards: dict[str, Rewards] = {}

    def course(self, drawn: Drawn, forwards: Forwards) -> Steps:
        """Draw and judge the completions of a step of a job. Where a stop is asked for meanwhile, nothing comes of it."""
        found = yield from self._found(drawn, forwards)
        most = 0 if drawn.is_held_out else drawn.job.config.rollout.rounds
        refill = Refill(found, most) if found is not None and most else None
        while refill is not None and (wanted := refill.wanted()):
            more = self.drawing.begun(drawn.job, drawn.step, False, refill.drawn, wanted)
            further = yield from self._found(more, forwards)
            if further is None:
                return
            refill.take(further)
        if found is not None:
            self._put(found, None if refill is None else refill.told())

    def _found(self, drawn: Drawn, forwards: Forwards) -> Generator[Any, None, Found | None]:
        """Draw, judge and score groups. None where a stop is asked for."""
        yield from self.drawing.course(drawn)
        rewards, groups = self._rewards_of(drawn.job), drawn.groups()
        futures = rewards.ask(groups)
        scores = self._scores(drawn, forwards)
        if scores is None:
            return None
        yield futures
        judged = rewards.judged(groups, futures)
        for one in judged:
            if one.lost is not None:
                self.events.emit(Note(f"job {drawn.job.name!r}, {_where(drawn)}: {one.lost}; {_cost(drawn)}"))
        none = np.zeros(drawn.size)
        return Found(drawn, judged, [none if own.lost is not None else rewards.total(own) for own in judged], scores)

    def workers(self) -> list[Worker]:
        """Workers that run functions of users."""
        return [*self.drawing.workers(), *(rewards.worker for rewards in self._rewards.values())]

    def _rewards_of(self, job: Job) -> Rewards:
        if job.name not in self._rewards:
            self._rewards[job.name] = Rewards(job.config.rollout, job.name, self.drawing.has_reward(job), self._rung)
        return self._rewards[job.name]

    # --- what is learnt ----------------------------------------------------------------------------------------------------

    def _scores(self, drawn: Drawn, forwards: Forwards) -> Scores | None:
        """Score each completion's tokens. None where a stop is asked for."""
        job, name, forwards = drawn.job, drawn.job.name, replace(forwards, by_graph=True)
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
            else self.teachers[teacher].logps(samples, job.config.rollout.temperature)
        )
        return Scores(own[name].logps, base if has_reference else None, taught)

    def _put(self, found: Found, refilled: Refilled | None) -> None:
        drawn, judged, totals, scores = found.drawn, found.judged, found.totals, found.scores
        job, config, names = drawn.job, drawn.job.config.rollout, self._rewards_of(drawn.job).names
        advantages = advantages_of(totals, [own.lost is not None for own in judged], config.scale_rewards)
        logps, base, taught = scores.own, scores.base, scores.teacher
        completions, drifts = [], []
        for at, talk in enumerate(drawn.talks):
            group, place = divmod(at, config.num_generations)
            total = totals[group][place]
            drifts.append(drift_of(logps[at], talk.logprobs))
            values = {name: judged[group].rewards[number, place] for number, name in enumerate(names)}
            completions.append(Completion(
                drawn.prompts[group], talk.ids, logps[at].tolist(), float(advantages[group][place]),
                float(np.nan_to_num(total)), drifts[-1],
                {name: None if np.isnan(value) else float(value) for name, value in values.items()},
                None if base is None else base[at].tolist(), None if taught is None else taught[at].tolist(), talk.text,
                talk.is_cut, judged[group].lost is not None or bool(np.isnan(total)), sampled=talk.logprobs,
                entropy=float(np.mean(talk.entropies)),
                **self.drawing.more_of(drawn, at),
            ))  # fmt: skip
        tokens_of = f"the completions of {_where(drawn)}"
        if (apart := why_apart(float(np.mean(drifts)), self.base.model.dtype, tokens_of)) is not None:
            self.apart[job.name] = apart
            return
        seconds = np.nan if drawn.is_held_out else drawn.seconds
        batch = Batch(drawn.step, job.step, reward_hash(config), tuple(completions), seconds, refilled)
        (drawn.rollouts.put_held_out if drawn.is_held_out else drawn.rollouts.put)(batch)


def _where(drawn: Drawn) -> str:
    return f"evaluation at step {drawn.step}" if drawn.is_held_out else f"step {drawn.step + 1}"


def _cost(drawn: Drawn) -> str:
    return "its completions are not counted" if drawn.is_held_out else "its completions teach nothing"


def advantages_of(totals: Sequence[np.ndarray], lost: Sequence[bool], scale: str) -> list[np.ndarray]:
    """Advantages by group and completion: a reward less the mean of its group, over a standard deviation; 0 for groups that are
    lost or have equal rewards, and for completions without a reward. totals: [G] by group, NaN for no reward."""
    judged = [own[~np.isnan(own)] for own in totals]
    kept = np.concatenate([np.zeros(0), *(own for own, gone in zip(judged, lost, strict=True) if not gone)])
    whole = float(kept.std(ddof=1)) if len(kept) > 1 else 0.0
    out = []
    for own, there, gone in zip(totals, judged, lost, strict=True):
        if gone or not (there != there[:1]).any():  # of equal numbers rounding may take the mean away
            out.append(np.zeros_like(own))
            continue
        deviation = float(there.std(ddof=1)) if scale == "group" else whole
        away = np.nan_to_num(own - there.mean())
        out.append(away if scale == "none" else away / (deviation + TINY))
    return out


def reward_hash(config: RolloutConfig) -> str:
    """Hash of the files of rewards, environments and tools, by which a resumed run tells that they have changed."""
    digest = hashlib.blake2b(digest_size=8)
    for spec in (*config.reward_sources, *config.tool_specs):
        file, _, name = spec.rpartition(":")
        code = Path(file).read_bytes() if Path(file).is_file() else file.encode()  # wherever the file is
        digest.update(name.encode() + code)
    return digest.hexdigest()
