"""One job while it trains: its data, adapter, optimizer, learning rate, step and status.

A job knows nothing of the jobs beside it. trainer.py tells it what came of its steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from packlora.adapters.attach import Adapter
from packlora.config import HIGHER_IS_BETTER, JobConfig, TrainConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Sample
from packlora.data.prompts import Prompt
from packlora.engine.adapters import AdapterState
from packlora.engine.engine import Confirmed, Step, StepDone
from packlora.runtime.history import Pieces
from packlora.runtime.learning import Learning
from packlora.seeding import stable_hash

if TYPE_CHECKING:
    from packlora.engine.loss_scale import LossScale

IDLE_STEPS = 3
"""Steps in a row that teach a job nothing, after which it is reported."""
USUAL_RATE = 0.01
"""Share of the configured learning rate over which a step must change something; under it are warmup and decay."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step of a job."""

    step: int
    """Counted from 1."""
    loss: float
    grad_norm: float
    lr: float
    tokens: int


def learning_rates(config: TrainConfig, num_steps: int) -> Callable[[int], float]:
    """The learning rate of step number n, counted from 0, as transformers' get_scheduler gives it; a pure function. The usual
    schedules are formulas, since transformers' module of schedules imports PEFT, which takes a second."""
    own = None if config.lr_scheduler_kwargs else USUAL_SCHEDULES.get(config.lr_scheduler_type)
    share = _by_transformers(config, num_steps) if own is None else partial(own, config.warmup_of(num_steps), num_steps)
    return lambda step: config.learning_rate * share(step)


def _warmed(warmup: int, steps: int, step: int) -> float:
    return step / max(1, warmup) if step < warmup else 1.0


def _linear(warmup: int, steps: int, step: int) -> float:
    return _warmed(warmup, steps, step) if step < warmup else max(0.0, (steps - step) / max(1, steps - warmup))


def _cosine(warmup: int, steps: int, step: int) -> float:
    progress = (step - warmup) / max(1, steps - warmup)
    return _warmed(warmup, steps, step) if step < warmup else max(0.0, (1 + math.cos(math.pi * progress)) / 2)


USUAL_SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "constant": lambda warmup, steps, step: 1.0,
    "constant_with_warmup": _warmed,
    "linear": _linear,
    "cosine": _cosine,
}
"""Share of the learning rate, of steps of warm-up, of all steps and of a step's number."""


def _by_transformers(config: TrainConfig, num_steps: int) -> Callable[[int], float]:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    warmup, more = config.warmup_of(num_steps), config.lr_scheduler_kwargs
    steps = None if "num_stable_steps" in more else num_steps  # which decides, and transformers warns of both
    schedule = get_scheduler(config.lr_scheduler_type, optimizer, warmup, steps, more)
    share: Callable[[int], float] = schedule.lr_lambdas[0]
    return share


@dataclass(frozen=True, slots=True)
class Judged:
    """The evaluations of a job: its best one after a step, and how many in a row, up to the last, were no better. loss: that of
    the best, or its metric_for_best_model."""

    step: int | None = None
    loss: float = math.inf
    worse: int = 0


def sign_of(metric: str) -> float:
    """Sign that makes a held-out metric the better the lower it is."""
    return -1.0 if metric in HIGHER_IS_BETTER else 1.0


def judged(
    log_history: Iterable[Mapping[str, Any]], train: TrainConfig, last: int, before: Judged | None = None
) -> Judged:
    """Count as transformers' EarlyStoppingCallback does: an evaluation that is better than the best, though not by more than
    the threshold, is the best from then on, and counts as no better.

    Args:
        last: the last of the configured steps. Evaluations after others than this and multiples of eval_steps do not count:
            they are made because a session ended there, which changes nothing.
        before: what came of the lines before these.
    """
    threshold, metric = train.early_stopping_threshold, train.metric_for_best_model
    sign = sign_of(metric)
    found = Judged(loss=sign * math.inf) if before is None else before
    for line in log_history:
        loss, step = line.get(metric), line["step"]
        if loss is not None and step > 0 and (step == last or step % (train.eval_steps or 1) == 0):
            gain = sign * (found.loss - loss)
            better = gain > 0
            worse = 0 if gain > threshold else found.worse + 1
            found = Judged(step, loss, worse) if better else replace(found, worse=worse)
    return found


class Judge:
    """Judges a log history that grows, each line once. Arguments as of judged."""

    def __init__(self, train: TrainConfig, last: int) -> None:
        self.train, self.last = train, last
        self._log: list[dict[str, Any]] = []
        self._count, self._found = 0, judged((), train, last)

    def of(self, log_history: list[dict[str, Any]]) -> Judged:
        if log_history is not self._log or len(log_history) < self._count:
            self._log, self._count, self._found = log_history, 0, judged((), self.train, self.last)
        self._found = judged(log_history[self._count :], self.train, self.last, self._found)
        self._count = len(log_history)
        return self._found


class IdleSteps:
    """How many steps in a row, up to the last one, taught a job nothing. learning_rate: configured. why_zero: of Objective."""

    def __init__(self, learning_rate: float, why_zero: str) -> None:
        self.learning_rate, self.why_zero, self.count = learning_rate, why_zero, 0

    def notice(self, result: StepResult, largest: float, changed: bool, is_last: bool) -> str | None:
        """Note that the job goes on without learning, said once.

        Args:
            largest: parameter of the adapter.
            changed: whether the step changed any.
            is_last: the job's last step.
        """
        no_gradient = result.grad_norm == 0
        usual = result.lr > USUAL_RATE * self.learning_rate
        if not (no_gradient or (usual and not changed)):
            self.count = 0
            return None
        self.count += 1
        if self.count != IDLE_STEPS and not (self.count < IDLE_STEPS and is_last):
            return None
        steps = "1 step" if self.count == 1 else f"{self.count} steps"
        if result.loss == 0 and no_gradient:
            why = self.why_zero.format(lr=result.lr)
            return f"its loss and its gradient were exactly 0 in {steps} up to step {result.step}: {why}"
        what = "its gradient was exactly 0" if no_gradient else "its adapter did not change by one bit"
        return (
            f"{what} in {steps} up to step {result.step}: it learns nothing any more (loss {result.loss:.4g}, learning rate "
            f"{result.lr:g}, largest parameter {largest:.3g}); a learning rate that is too high or too low does this"
        )


def idle_since(log_history: Sequence[Mapping[str, Any]]) -> int | None:
    """The first of a job's last steps whose gradients were all exactly 0, so that they taught it nothing."""
    steps = [line for line in log_history if "loss" in line]
    idle = list(itertools.takewhile(lambda line: line["grad_norm"] == 0, reversed(steps)))
    return idle[-1]["step"] if idle else None


@dataclass
class Job:
    """State of one job."""

    config: JobConfig
    data: JobData
    eval_samples: list[Sample]
    adapter: Adapter
    scale: LossScale | None = None
    """Of its losses, where the model computes in float16."""
    step: int = 0
    """Optimizer steps done."""
    status: Literal["running", "done", "failed"] = "running"
    failure: str | None = None
    stopped: str | None = None
    """Why it ends before the steps that it was to take, where it was asked to."""
    router_coefficient: float = 0.0
    """Coefficient of its load-balancing loss; 0: it has none."""
    tokens_seen: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    pieces: Pieces = field(default_factory=Pieces)
    prompts: Sequence[Prompt] = ()
    """Prompts that it is asked when it is evaluated."""
    chat_template: str | None = None
    """Text of its own chat template, which stands beside its adapter; None: it has that of the base model."""
    joined: int = 0
    """Round of its first global batch."""
    left: int | None = None
    """Round from which on no window holds a global batch of it, where it leaves before its last one."""

    def __post_init__(self) -> None:
        train = self.config.train
        self.lr_at = learning_rates(train, self.data.configured_steps)
        dropout, seed = self.adapter.spec.peft.lora_dropout, self.data.seed
        self.dropout_key = stable_hash("dropout", seed) if dropout else None
        self.learning = Learning(train, self.data, self.eval_samples, self.router_coefficient)
        """Objective of the job over its data."""
        self.state = AdapterState(self.adapter, train, 1 + self.learning.num_metrics, self.scale)
        self.best: torch.Tensor | None = None
        """adapter.flat of the best evaluation after a step, where it is to be the result."""
        self._told: StepResult | None = None
        """Result of a step that was counted and not confirmed."""
        self._tokens, self._judge = 0, Judge(train, self.data.configured_steps)
        self._idle = IdleSteps(train.learning_rate, self.learning.objective.why_zero)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def logging_steps(self) -> int:
        return self.config.train.logging_steps

    @property
    def judged(self) -> Judged:
        return self._judge.of(self.log_history)

    @property
    def epoch(self) -> float:
        return self.step / self.data.batches_per_epoch

    def is_due(self, batch: int) -> bool:
        """Whether the job has yet to step on this global batch: not after a failure, nor beyond the steps asked for."""
        return self.status != "failed" and self.step <= batch < self.data.num_steps

    @property
    def goes_on(self) -> bool:
        """Whether steps follow, in this session or, where its `max_steps` are done, in one that resumes it."""
        return self.step < (self.data.configured_steps if self.stopped is None else self.data.num_steps)

    def loss_units(self, step: int) -> int:
        """Units of the objective in the global batch of a step, which its loss is divided by."""
        return self.learning.units(step)

    def count(self, tokens: int) -> None:
        """So many tokens of the global batch are done, on whatever device."""
        self._tokens += tokens

    def discard(self) -> None:
        """Forget the present global batch, and gradients that were not collected."""
        self._tokens = 0
        self.state.discard()

    def next_step(self) -> Step:
        """The step after the present global batch."""
        return Step(self.adapter.number, self.lr_at(self.step))

    def stepped(self, done: StepDone, seconds: float, elapsed: float) -> str | None:
        """Count a step, or fail where it was refused. One that was skipped counts, since its data is used up. Returns a note
        for a person.

        Args:
            seconds: since its global batch began. elapsed: since the run began.
        """
        loss, lr = done.loss / self.loss_units(self.step), self.lr_at(self.step)
        skipped = done.refused == "overflow"
        if done.refused is not None and not skipped:
            self.fail(self._refusal(done), done.reverted)
            return None
        metrics = self.learning.metrics(self.step, done.sums)
        tokens, self._tokens = self._tokens, 0
        self.step += 1
        self.tokens_seen += tokens
        self._told = None if skipped else StepResult(self.step, loss, done.norm, lr, tokens)
        if self.scale is not None:
            metrics |= {"loss_scale": done.scale, "overflow": int(skipped)}
        self.log_history.append(
            {
                "step": self.step, "epoch": self.epoch, "loss": loss, "grad_norm": None if skipped else done.norm,
                "learning_rate": lr, "tokens": tokens, **metrics, "seconds": seconds, "elapsed": elapsed,
            }
        )  # fmt: skip
        self.state.count()
        if not skipped:
            return None
        now = self.state.grad_scale
        return f"step {self.step} was skipped: a gradient overflowed float16 at loss scale {done.scale:g}, now {now:g}"

    def confirm(self, made: Confirmed) -> str | None:
        """Take note of the parameters after the last step, before the next one. The job fails where they were infinite.
        Returns a note for a person."""
        result, self._told = self._told, None
        assert result is not None
        if made.reverted:
            self.fail("the update made parameters infinite", reverted=True)
            return None
        return self._idle.notice(result, made.largest, made.changed, self.step == self.data.num_steps)

    def _refusal(self, done: StepDone) -> str:
        """Why the job may not take the step."""
        if done.refused == "loss":
            return f"loss {done.loss / self.loss_units(self.step):g}{self._hint()}"
        if done.refused == "norm":
            return f"gradient norm {done.norm:g}{self._hint()}"
        return "no parameter got a gradient: the adapted layers take no part in the model's output"

    def _hint(self) -> str:
        return "" if self.scale is None else "; float16 overflows easily, bfloat16 and float32 do not"

    def stop(self, reason: str, step: int | None = None) -> None:
        """Let a step be the last one, by default the present one; learning rates stay those of the configured steps."""
        self.stopped, self.data.step_limit = reason, self.step if step is None else step

    def fail(self, reason: str, reverted: bool) -> None:
        """Stop for good. reverted: the last step was taken back, whose values give no finite loss."""
        self.status, self.failure = "failed", f"after step {self.step}: {reason}"
        self.discard()
        if reverted:
            self.step -= 1
            self.tokens_seen -= sum(line.get("tokens", 0) for line in self.log_history if line["step"] > self.step)
            self.log_history = [line for line in self.log_history if line["step"] <= self.step]
        self.state.count()
        self.failure += f"; the adapter of step {self.step} is kept"


def trainer_state(job: Job) -> dict[str, Any]:
    """HF-shaped trainer_state.json, with the job's status beside it."""
    train, found = job.config.train, job.judged
    state: dict[str, Any] = {
        "global_step": job.step,
        "max_steps": job.data.num_steps,
        "epoch": job.epoch,
        "num_train_epochs": train.num_train_epochs,
        "train_batch_size": train.global_batch_size,
        "num_input_tokens_seen": job.tokens_seen,
        "log_history": job.log_history,
        "status": job.status,
        "failure": job.failure,
        "untrained": sorted(job.state.untrained | job.state.untrained_elsewhere),
    }
    if train.needs_evaluations and found.step is not None:
        state |= {"best_global_step": found.step, "best_metric": found.loss}
    if job.scale is not None:
        state["loss_scale"] = job.scale.state()
    return state if job.stopped is None else state | {"stopped": job.stopped}


def keep_if_best(job: Job) -> str | None:
    """After an evaluation, whose loss is the last line of the job's log: keep its adapter if it is the best. That of the last
    step needs no copy, and does not count any more, by its step, where the job goes on for longer.

    Returns:
        Why the job is to end here, where too many evaluations in a row were no better.
    """
    train, found = job.config.train, job.judged
    if train.load_best_model_at_end and found.step == job.step and job.step % (train.eval_steps or 1) == 0:
        job.best = job.adapter.flat.clone()
    if train.early_stopping_patience is None or found.worse < train.early_stopping_patience:
        return None
    return f"early_stopping_patience {train.early_stopping_patience} (best: step {found.step}, {found.loss:.4g})"


def take_best(job: Job) -> str | None:
    """Let a job's best adapter be its result, if it is to be. Returns what the user should know."""
    found = job.judged
    is_own = found.step == job.step
    if not job.config.train.load_best_model_at_end or not (is_own or job.best is not None):
        return None
    if job.best is not None and not is_own:
        job.adapter.flat.copy_(job.best)
    metric = job.config.train.metric_for_best_model
    named = "held-out loss" if metric == "eval_loss" else metric
    return f"job {job.name!r}: its result is the adapter of step {found.step}, with {named} {found.loss:.4g}"
