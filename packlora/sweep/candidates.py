"""A sweep: candidates of one job which differ in some keys and train in one run, those that end early, and who is the best.

What is decided between two windows is a function of the sweep's settings and of the evaluations up to that round. So a run that
is broken off and resumed makes the same decisions. Candidates are compared by a cost, the lower the better: the held-out loss,
or a reward with the other sign.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from packlora.adapters.files import CONFIG, WEIGHTS
from packlora.changes import SHOWN
from packlora.config import JobConfig, Run
from packlora.config.trainers import trainers
from packlora.errors import InputError, quoted
from packlora.files import write_folder, write_json
from packlora.run_file import parse_jobs
from packlora.runtime import checkpoint, restoring
from packlora.runtime.job import Job, sign_of
from packlora.runtime.windows import window_of
from packlora.seeding import stable_hash
from packlora.sweep.changes import Change, leaves, with_jobs
from packlora.sweep.config import RangeConfig
from packlora.sweep.page import BEST, name_of

MOST_TRIED = 100
"""Candidates that are prepared before training to see that they can be."""
NEEDS_OPTUNA = "sweep.method: optuna needs the package optuna: pip install 'packlora[sweep]'; or use random"


@dataclass(slots=True)
class Trial:
    """A candidate. joined: round of its first global batch. num_steps: that it is to take. evals: cost by step, rising; of a
    failed step infinite. reason: why it ended early. metric: what is compared. every: steps between comparisons, which a metric
    of training is a mean over.
    """

    number: int
    name: str
    parameters: dict[str, Any]
    joined: int
    num_steps: int = 0
    step: int = 0
    status: str = "running"
    evals: dict[int, float] = field(default_factory=dict)
    has_left: bool = False
    reason: str = ""
    metric: str = "eval_loss"
    every: int = 1

    def see(self, step: int, status: str, num_steps: int, history: Sequence[Mapping[str, Any]]) -> None:
        """How it stands now. Of its log history, what came since the last look is read."""
        before = self.step
        new = list(itertools.takewhile(lambda line: line["step"] >= before, reversed(history)))
        self.step, self.status, self.num_steps = step, status, num_steps
        if status == "failed":  # which may have taken a step back
            self.evals = {at: cost for at, cost in self.evals.items() if at <= step}
        if not self.metric.startswith("eval_"):
            self._see_training(before, history)
            return
        for line in reversed(new):
            if "eval_loss" in line:
                self._count(line["step"], line.get(self.metric))

    def _see_training(self, before: int, history: Sequence[Mapping[str, Any]]) -> None:
        """Take means of a metric of training, up to each step of a comparison and up to the last one."""
        recent = itertools.takewhile(lambda line: line["step"] > before - self.every, reversed(history))
        known = {line["step"]: line[self.metric] for line in recent if line.get(self.metric) is not None}
        for step in range(max(before, 1), self.step + 1):
            if step % self.every == 0 or step == self.num_steps:
                values = [known[own] for own in range(step - self.every + 1, step + 1) if own in known]
                self._count(step, statistics.fmean(values) if values else None)

    def _count(self, step: int, value: float | None) -> None:
        self.evals[step] = math.inf if value is None else sign_of(self.metric) * value

    def has_ended(self, given: int) -> bool:
        """Whether it had taken its last step before round `given`. Of a failed one, which may have taken a step back, this is
        known a round later."""
        if self.status == "failed":
            return self.joined + self.step + 2 <= given
        return self.joined + self.num_steps <= given

    def seen(self, age: int, every: int) -> Iterator[float]:
        """The costs of the evaluations that were due up to a step, without that before the first; the last one first."""
        return (self.evals[step] for step in reversed(self.evals) if 0 < step <= age and step % every == 0)

    def value(self, age: int, every: int) -> float | None:
        return next(self.seen(age, every), None)

    @property
    def last(self) -> float | None:
        """The cost of its adapter."""
        return self.value(self.step, 1) if self.status != "failed" else None


class Sweep:
    """The candidates of a run.

    Raises:
        InputError: a candidate would not be a job, or a package is missing.
    """

    def __init__(self, run: Run) -> None:
        assert run.sweep is not None
        self.run, self.config = run, run.sweep
        self.template = next(job for job in run.jobs if job.name == self.config.job)
        self.trials: dict[str, Trial] = {}
        self.is_closed = False
        """Whether no more candidates can join."""
        self.every, self.window = max(run.eval_every, 1), len(window_of(run, 0))
        self.seed = run.seed if self.config.seed is None else self.config.seed
        self.sign, self.named = sign_of(self.config.metric), name_of(self.config.metric)
        self.total = self.config.combinations if self.config.method == "grid" else int(self.config.num_trials or 0)
        if self.config.method == "optuna":
            _optuna()
        self._check()

    def _check(self) -> None:
        """Every value that can be taken must make a job, each another one."""
        for key, values in self.config.parameters.items():  # first, as a key's own bounds are what can be drawn from
            made = dict[str, Any]()
            for value in values if isinstance(values, list) else [values.min, values.max]:
                job = self.job(0, {key: value}).model_dump_json()
                if job in made and isinstance(values, list):
                    same = f"{quoted(value)} is the same as {quoted(made[job])}"
                    raise InputError(f"sweep.parameters.{key}: {same}; leave one of them out")
                made[job] = value
        if (again := drawn_again(self)) and self.config.method == "grid":
            first, number = again[0]
            raise InputError(
                f"sweep: candidates {first} and {number} are the same job: {quoted(self.drawn(first), 300)} and "
                f"{quoted(self.drawn(number), 300)}; leave a value out"
            )

    def refuse_names(self, names: Iterable[str]) -> None:
        """Raises InputError where a job has the name of a candidate that may come, ignoring case."""
        for name in names:
            head, _, number = name.rpartition("-")
            known = number.isdecimal() and int(number) < self.total and name == f"{head}-{int(number):03d}"
            if known and head.lower() == self.template.name.lower():
                raise InputError(
                    f"sweep: job {name!r} has the name of a candidate of {self.template.name!r}; take another"
                )

    # --- candidates ------------------------------------------------------------------------------------------------------

    def job(self, number: int, parameters: Mapping[str, Any]) -> JobConfig:
        """A candidate as a job of a run file."""
        tree = self.template.model_dump(mode="json", exclude_unset=True)
        tree["name"] = f"{self.template.name}-{number:03d}"
        job = _with_values(tree, parameters, "sweep")
        if (having := _having(self.config.metric)) and job.train.trainer not in having:
            raise InputError(
                f"sweep.metric: {self.config.metric} is of trainer {', '.join(having)}; with {dict(parameters)} the trainer "
                f"is {job.train.trainer}"
            )
        return job

    def unlike(self) -> list[JobConfig]:
        """Candidates of which each differs from the others in more than fractions, which make no job impossible. Where Optuna
        proposes, one for each value."""
        if self.config.method == "optuna":
            listed = {key: v if isinstance(v, list) else [v.min, v.max] for key, v in self.config.parameters.items()}
            drawn = [{key: value} for key, values in listed.items() for value in values]
        else:
            drawn = [self.drawn(number) for number in range(min(self.total, 10 * MOST_TRIED))]
        found = dict[str, tuple[int, dict[str, Any]]]()
        for number, own in enumerate(drawn):
            found.setdefault(repr({key: v for key, v in own.items() if not isinstance(v, float)}), (number, own))
        return [self.job(number, own) for number, own in list(found.values())[:MOST_TRIED]]

    def begin(self) -> list[Change]:
        """The first candidates, which are there from the first round on."""
        return [
            Change(round=0, by="sweep", join=job, parameters=own) for job, own in self._next(self.config.concurrent)
        ]

    def follow(self, changes: Sequence[Change]) -> None:
        """Know the candidates that these changes have made."""
        for change in changes:
            if change.by == "sweep" and change.join is not None and change.join.name not in self.trials:
                name, number = change.join.name, len(self.trials)
                self.trials[name] = Trial(
                    number, name, dict(change.parameters), change.round, metric=self.config.metric, every=self.every
                )
        for name, change in leaves(changes).items():
            if name in self.trials:
                self.trials[name].has_left, self.trials[name].reason = True, change.reason

    def see(self, job: Job) -> None:
        if job.name in self.trials:
            self.trials[job.name].see(job.step, job.status, job.data.num_steps, job.log_history)

    def read(self, output_dir: Path, names: Sequence[str]) -> None:
        """How candidates stand that have left, from their folders."""
        for name in names:
            if name in self.trials:
                state = restoring.read_state(output_dir / name)
                self.trials[name].see(state["global_step"], state["status"], state["max_steps"], state["log_history"])

    def _next(self, count: int) -> list[tuple[JobConfig, dict[str, Any]]]:
        numbers = range(len(self.trials), min(len(self.trials) + count, self.total))
        drawn = [(number, self.drawn(number)) for number in numbers]
        return [(self.job(number, own), own) for number, own in drawn]

    def drawn(self, number: int) -> dict[str, Any]:
        """The values of a candidate."""
        if self.config.method == "grid":
            return _combination(self.config.parameters, number)
        if self.config.method == "optuna":
            return self._asked(number)
        generator = np.random.Generator(np.random.Philox(stable_hash("sweep", self.seed, number)))
        return {key: _draw(values, generator) for key, values in self.config.parameters.items()}

    def _asked(self, number: int) -> dict[str, Any]:
        """Ask Optuna for a proposal. It is told anew of all candidates that have ended, so a proposal depends on them and on
        the seed alone."""
        optuna = _optuna()
        kinds = {key: _distribution(values) for key, values in self.config.parameters.items()}
        sampler = optuna.samplers.TPESampler(seed=stable_hash("sweep", self.seed, number) % 2**32)
        study = optuna.create_study(direction="minimize", sampler=sampler)
        for trial in self.trials.values():
            if trial.has_left and trial.last is not None and math.isfinite(trial.last):
                told = {
                    key: values.index(trial.parameters[key]) if isinstance(values, list) else trial.parameters[key]
                    for key, values in self.config.parameters.items()
                }
                study.add_trial(optuna.trial.create_trial(params=told, distributions=kinds, value=trial.last))
        asked = study.ask(kinds).params
        return {
            key: values[asked[key]] if isinstance(values, list) else asked[key]
            for key, values in self.config.parameters.items()
        }

    # --- decisions -------------------------------------------------------------------------------------------------------

    def decide(self, given: int) -> dict[str, str]:
        """Candidates that leave before round `given`, and why; without a reason where they have ended by themselves."""
        there = [trial for trial in self.trials.values() if not trial.has_left]
        out = {trial.name: "" for trial in there if trial.has_ended(given)}
        running = [trial for trial in there if trial.name not in out and given > trial.joined]
        others = functools.cache(lambda age: self._values(age, given))  # the same of all candidates of an age
        first = self._reached_target(given)
        for trial in running:
            if reason := self._why_stop(trial, given - trial.joined, first, others):
                out[trial.name] = reason
        return out

    def successors(self) -> list[tuple[JobConfig, dict[str, Any]]]:
        """Candidates that take the places of those that have left."""
        if self.is_closed or self._reached_target(2**40) is not None:
            return []
        return self._next(self.config.concurrent - sum(not trial.has_left for trial in self.trials.values()))

    def _why_stop(self, trial: Trial, age: int, first: Trial | None, others: Callable[[int], list[float]]) -> str:
        """Why a candidate ends at a step; empty where it goes on.

        Args:
            first: that has reached the target, if any has.
            others: costs at a step, rising, of all candidates that had come as far.
        """
        rule = self.config.stopping
        if first is not None:
            return f"{first.name} has reached the {self.named} {rule.target:g}"
        if rule.method == "patience":
            best, since = math.inf, 0
            for cost in reversed(list(trial.seen(age, self.every))):
                best, since = (cost, 0) if cost < best - rule.min_delta else (best, since + 1)
            if since >= rule.patience:
                side = "under" if self.sign > 0 else "over"
                return f"patience: no {self.named} {side} {self.sign * best:.4f} for {since} evaluations"
        if rule.method == "median" and age > rule.n_warmup_steps and len(others(age)) >= rule.n_startup_trials:
            median, best = statistics.median(others(age)), min(trial.seen(age, self.every), default=-math.inf)
            if best > median:
                best, median = self.sign * best, self.sign * median
                return f"median: {self.named} {best:.4f} at step {age}, where the median is {median:.4f}"
        if rule.method == "successive_halving":
            return self._why_halved(trial, age, others)
        return ""

    def _why_halved(self, trial: Trial, age: int, others: Callable[[int], list[float]]) -> str:
        rule = self.config.stopping
        rung = rule.min_resource
        while rung < trial.num_steps:
            at = looks_at(self, rung, trial)
            value = trial.value(at, self.every) if at == age else None
            if value is not None:
                bound = others(at)[max(1, len(others(at)) // rule.reduction_factor) - 1]
                if value > bound:
                    value, bound, way = self.sign * value, self.sign * bound, "up" if self.sign > 0 else "down"
                    return (
                        f"successive halving: {self.named} {value:.4f} at step {at}, where one in {rule.reduction_factor} "
                        f"goes on, {way} to {bound:.4f}"
                    )
            rung *= rule.reduction_factor
        return ""

    def _values(self, age: int, given: int) -> list[float]:
        """Costs at a step, rising, of all candidates that had come as far before round `given`."""
        came = [own for own in self.trials.values() if own.joined + age <= given and own.step >= age]
        values = [own.value(age, self.every) for own in came]
        return sorted(value for value in values if value is not None)

    def _reached_target(self, given: int) -> Trial | None:
        """The first candidate that has, where there is one to be reached."""
        if (target := self.config.stopping.target) is not None:
            for trial in self.trials.values():
                if any(cost <= self.sign * target for cost in trial.seen(given - trial.joined, self.every)):
                    return trial
        return None

    # --- the end ---------------------------------------------------------------------------------------------------------

    def ranking(self) -> list[Trial]:
        """The best first; those without a value at the end."""
        return sorted(
            self.trials.values(), key=lambda trial: (math.inf if trial.last is None else trial.last, trial.number)
        )

    def write(self, output_dir: Path) -> None:
        """sweep.json; and where all candidates have left, a copy of the best one's adapter. Raises OSError."""
        ranked = self.ranking()
        ended = all(trial.has_left for trial in ranked) and not self.successors()
        best = ranked[0] if ranked and ranked[0].last is not None else None
        if ended and best is not None:
            source = output_dir / best.name

            def copy(out: Path) -> None:
                for name in (CONFIG, WEIGHTS, checkpoint.STATE, "README.md"):
                    if (source / name).is_file():
                        shutil.copyfile(source / name, out / name)

            write_folder(output_dir / BEST, copy)
        lines = [
            {
                "rank": rank, "name": trial.name, "parameters": trial.parameters,
                self.config.metric: None if trial.last is None else self._told(trial.last),
                "status": "stopped" if trial.reason and trial.status == "done" else trial.status, "reason": trial.reason,
                "step": trial.step,
                "evals": [[step, self._told(cost)] for step, cost in sorted(trial.evals.items())],
            }
            for rank, trial in enumerate(ranked, 1)
        ]  # fmt: skip
        about = {"job": self.config.job, "metric": self.config.metric, "method": self.config.method}
        state = {"status": "done" if ended else "running", "best": best.name if best is not None else None}
        write_json(output_dir / SHOWN, about | state | {"candidates": lines})

    def _told(self, cost: float) -> float | None:
        """Value that is compared, for JSON: null where it is not finite."""
        return self.sign * cost if math.isfinite(cost) else None


def looks_at(sweep: Sweep, step: int, trial: Trial | None = None) -> int:
    """The step after which a candidate's evaluation at `step`, or the first one after it, decides."""
    own: int | None = (trial.parameters if trial else {}).get("train.eval_steps", sweep.template.train.eval_steps)
    for interval in (sweep.config.spacing(sweep.every, own), sweep.window):
        step = -(-step // interval) * interval
    return step


def _having(metric: str) -> list[str]:
    """Trainers that have a metric; none for the held-out loss, which all have."""
    return [*trainers(lambda own: metric in own.metrics), *trainers(lambda own: metric in own.compared)]


def _with_values(tree: dict[str, Any], values: Mapping[str, Any], source: str) -> JobConfig:
    """A job with other values by dotted key. Raises InputError."""
    own = copy.deepcopy(tree)
    for key, value in values.items():
        node: Any = own
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or not last:
            raise InputError(f"{source}: a job has no key {quoted(key)}")
        node[last] = value
    return parse_jobs([own], source)[0]


def drawn_again(sweep: Sweep) -> list[tuple[int, int]]:
    """Pairs of the first 1000 candidates that are the same job."""
    made, out = dict[str, int](), []
    for number in range(min(sweep.total, 1000) if sweep.config.method != "optuna" else 0):
        first = made.setdefault(sweep.job(0, sweep.drawn(number)).model_dump_json(), number)
        out += [(first, number)] if first != number else []
    return out


def _combination(parameters: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Values of one point of a grid; the last key changes first."""
    found = dict[str, Any]()
    for key in reversed(list(parameters)):
        number, at = divmod(number, len(parameters[key]))
        found[key] = parameters[key][at]
    return {key: found[key] for key in parameters}


def begun(run: Run) -> tuple[Run, list[Change]]:
    """A run with the first candidates of its sweep, and the changes that they are."""
    if run.sweep is None:
        return run, []
    sweep = Sweep(run)
    sweep.refuse_names(job.name for job in run.jobs)
    changes = sweep.begin()
    return with_jobs(run, [*run.jobs, *(change.join for change in changes if change.join is not None)]), changes


def _draw(values: list[Any] | RangeConfig, generator: np.random.Generator) -> Any:
    if isinstance(values, list):
        return values[int(generator.integers(len(values)))]
    low, high = values.min, values.max
    if isinstance(low, int) and isinstance(high, int):
        if not values.log:
            return int(generator.integers(low, high + 1))
        drawn = math.exp(generator.uniform(math.log(low - 0.5), math.log(high + 0.5)))
        return min(max(round(drawn), low), high)
    if values.log:
        return min(max(math.exp(generator.uniform(math.log(low), math.log(high))), low), high)
    return float(generator.uniform(low, high))


def _distribution(values: list[Any] | RangeConfig) -> Any:
    distributions = _optuna().distributions
    if isinstance(values, list):
        return distributions.CategoricalDistribution(tuple(range(len(values))))
    whole = isinstance(values.min, int) and isinstance(values.max, int)
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    return kind(values.min, values.max, log=values.log)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError(NEEDS_OPTUNA) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
