"""Checks of a sweep before training: of what is asked for, and of what was prepared."""

from __future__ import annotations

import re
from collections.abc import Sequence

from packlora.config import Run
from packlora.config.trainers import ACCURACIES, MARGINS
from packlora.data.preference import ComparedSample
from packlora.errors import InputError
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun
from packlora.sweep.candidates import Sweep, drawn_again, looks_at
from packlora.sweep.config import OF_ROLLOUTS
from packlora.sweep.prepare import prepare_more


def check(run: Run, processes: int, max_steps: int | None) -> None:
    """Raises InputError where a run cannot have a sweep: on processes that do not share all jobs, or with max_steps."""
    if processes > 1 and run.parallel.stages == 1:
        raise InputError(
            f"sweep: candidates join and leave on one process, or on the stages of pipelines that share all jobs, but "
            f"{processes} were started; start one, or set parallel.pipeline"
        )
    if max_steps is not None:
        raise InputError("--max-steps would end candidates of a sweep for good; set train.max_steps of its job instead")


def check_prepared(prepared: PreparedRun, resumed: bool) -> None:
    """Raises InputError where candidates cannot be compared or, of a run that begins, cannot all be trained."""
    _check_compared(prepared.run, prepared.jobs)
    if not resumed:
        sweep = Sweep(prepared.run)
        later, _ = prepare_more(prepared, sweep.unlike(), prepared.budget)
        _check_alike(later)
        prepared.warnings += _doubts(sweep, later)


def _check_compared(run: Run, jobs: Sequence[PreparedJob]) -> None:
    """Raises InputError where held-out samples do not give what a sweep compares: margins, of completions that are all
    desirable or all undesirable."""
    if run.sweep is None or run.sweep.metric != MARGINS:
        return
    for job in jobs:
        found = {one.desirable for one in job.eval_encoded.samples if isinstance(one, ComparedSample)}
        candidate = re.fullmatch(rf"{re.escape(run.sweep.job)}-\d{{3,}}", job.config.name)
        if candidate and job.config.train.declared.rows == "judged" and len(found) == 1:
            kind = "desirable" if True in found else "undesirable"
            raise InputError(
                f"sweep.metric: {run.sweep.metric} compares desirable with undesirable completions; those of "
                f"{', '.join(job.config.data.eval_paths) or 'data.eval_split'} are all {kind}"
            )


def _check_alike(candidates: Sequence[PreparedJob]) -> None:
    """Raises InputError where candidates do not have the same held-out samples, by which they are compared."""
    found = dict[str, str]()
    for job in candidates:
        held, source = job.eval_encoded, ", ".join(job.config.data.eval_paths) or "data.eval_split"
        tokens = sum(sample.num_tokens for sample in held.samples)
        cut = f", {held.truncated} of them cut, with {tokens} tokens" if held.truncated else ""
        found.setdefault(f"{len(held.samples)} of {source}{cut}", job.config.name)
    if len(found) > 1:
        first, second, *_ = (f"{name} has {what}" for what, name in found.items())
        raise InputError(
            f"sweep.parameters: candidates are compared by their held-out samples, and these differ: {first}; {second}; leave "
            "out the key that decides it, or give held-out samples of which every candidate takes all"
        )


def _doubts(sweep: Sweep, candidates: Sequence[PreparedJob]) -> list[str]:
    """Doubts about a sweep that can run, but is hardly meant so.

    Args:
        candidates: that stand for all of them.
    """
    steps = max((job.data.num_steps for job in candidates), default=0)
    why, again = _never_ends(sweep, steps), len(drawn_again(sweep)) if sweep.config.method == "random" else 0
    out = [f"sweep.stopping: {why}, so none ends early"] if why else []
    if again:
        total = min(sweep.total, 1000)
        out.append(
            f"sweep: {again} of {total} random candidates have the values of an earlier one, so they are the same job again"
        )
    if odd := _other_scale(sweep):
        rather = f"; {ACCURACIES} compares them" if ACCURACIES in sweep.template.train.declared.metrics else ""
        out.append(f"sweep: {odd} changes the measure of {sweep.config.metric}, so the best value is no proof{rather}")
    return out


def _other_scale(sweep: Sweep) -> str:
    """Swept key on which it depends what the metric measures; empty where there is none."""
    own = sweep.template.train.declared
    by_metric = {
        "eval_loss": ["data.chat_template", "data.columns"]
        + [f"train.{name}" for name in ("objective", "trainer", *own.shared, *own.keys.model_fields)],
        MARGINS: ["train.beta", "train.trainer"],
        **{name: ["rollout.reward", "rollout.reward_weights", "rollout.environment_factory"] for name in OF_ROLLOUTS},
    }
    keys = by_metric.get(sweep.config.metric, [])
    return next((key for key in keys if key in sweep.config.parameters), "")


def _never_ends(sweep: Sweep, steps: int) -> str:
    """Why a stopping rule ends no candidate of so many steps at most; empty where it may end some."""
    own = sweep.template.train.eval_steps
    rule, spacing, window = sweep.config.stopping, sweep.config.spacing(sweep.every, own), sweep.window
    most = f"candidates take at most {steps} optimizer steps"
    last = (steps - 1) // window * window
    """The step after which the last decision is made before the end."""
    if rule.method == "successive_halving":
        first = looks_at(sweep, rule.min_resource)
        return f"successive_halving looks at step {first} first, and {most}" if first > last else ""
    if rule.method == "median" and rule.n_startup_trials > sweep.total:
        return f"median waits for {rule.n_startup_trials} candidates, and there are {sweep.total}"
    if rule.method == "median" and looks_at(sweep, rule.n_warmup_steps + 1) > last:
        return f"median looks after step {rule.n_warmup_steps}, and {most}"
    if rule.method == "patience" and last // spacing <= rule.patience:
        return (
            f"patience {rule.patience} takes {rule.patience + 1} evaluations before the last step, and there are "
            f"{last // spacing}"
        )
    return ""
