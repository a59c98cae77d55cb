"""transformers' TrainerCallback objects as subscribers of a run: every job has arguments, a state and a control of its own.

Called are on_train_begin, on_step_end, on_log, on_evaluate, on_save and on_train_end, in transformers' order. A callback that
sets should_training_stop in its control ends the job; evaluations, checkpoints and logs come as the run's keys say.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy

from packlora.config.train import HIGHER_IS_BETTER
from packlora.data.order import count_batches
from packlora.events import (
    CheckpointBegins,
    CheckpointSaved,
    Evaluated,
    Event,
    JobDone,
    JobFailed,
    JobJoined,
    RunBegan,
    RunEnded,
    Stepped,
    Stop,
    Subscriber,
)
from packlora.report.journal import read_record
from packlora.report.metrics import LoggedSteps


def subscribers_of(callbacks: Iterable[Any]) -> list[Subscriber]:
    """Subscribers of a run for callbacks: transformers' ones, or their classes, and functions of one event as they are."""
    made = [one() if isinstance(one, type) and issubclass(one, TrainerCallback) else one for one in callbacks]
    return [_subscriber(one) if isinstance(one, TrainerCallback) else one for one in made]


def _subscriber(callback: TrainerCallback) -> Subscriber:
    """A subscriber that has the callback's name in messages."""
    calls = _Calls(callback)

    def told(event: Event) -> Stop | None:
        return calls.told(event)

    told.__qualname__ = type(callback).__qualname__
    return told


@dataclass(slots=True)
class _Training:
    """One job as its callback sees it. per_epoch: optimizer steps of an epoch. saving: checkpoints that are being written."""

    callback: TrainerCallback
    args: TrainingArguments
    state: TrainerState
    per_epoch: int
    control: TrainerControl = field(default_factory=TrainerControl)
    saving: int = 0
    has_ended: bool = False

    def call(self, name: str, **more: Any) -> None:
        """Call a method of the callback, which may return another control."""
        answer = getattr(self.callback, name)(self.args, self.state, self.control, **more)
        self.control = self.control if answer is None else answer

    def log(self, step: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Add a line to the log history. Returns it without its step, as on_log is given it."""
        self.state.global_step, self.state.epoch = step, step / self.per_epoch
        line = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**line, "step": step})
        return line

    def judge(self, metrics: Mapping[str, Any], step: int) -> None:
        """Keep the best value of metric_for_best_model, as transformers does after on_evaluate."""
        value, best = metrics.get(str(self.args.metric_for_best_model)), self.state.best_metric
        better = operator.gt if self.args.greater_is_better else operator.lt
        if value is not None and (best is None or better(value, best)):
            self.state.best_metric, self.state.best_global_step = value, step


class _Calls:
    """Calls of one callback for all jobs of a run. A callback with a state of its own for a training (transformers'
    ExportableState, as EarlyStoppingCallback) is copied for each job; others are one object for all."""

    def __init__(self, callback: TrainerCallback) -> None:
        self._callback = callback
        self._jobs: dict[str, _Training] = {}
        self._steps = LoggedSteps()
        self._output_dir = Path()
        self._stops: deque[Stop] = deque()

    def told(self, event: Event) -> Stop | None:
        """Call the callback for an event. Returns a Stop of one job that it ends; further ones come with the next events."""
        logged = self._steps.takes(event)
        match event:
            case RunBegan():
                self._begin(event)
            case JobJoined(job=name, config=config, num_steps=num_steps):
                self._add(config, 0, num_steps)
            case Stepped():
                self._stepped(event, logged)
            case Evaluated():
                self._evaluated(event)
            case CheckpointBegins(job=name) if name in self._jobs:
                self._jobs[name].saving += 1
            case CheckpointSaved(job=name, step=step) if name in self._jobs:
                self._saved(name, step)
            case JobDone(job=name) | JobFailed(job=name) if name in self._jobs:
                self._jobs[name].has_ended = True
                self._end(name)
            case RunEnded():
                for name in [*self._jobs]:
                    self._jobs[name].has_ended, self._jobs[name].saving = True, 0
                    self._end(name)
        return self._stops.popleft() if self._stops else None

    def _begin(self, event: RunBegan) -> None:
        self._output_dir = event.output_dir
        configs = {job["name"]: {**event.config, **job} for job in event.config["jobs"]}
        for job in event.jobs:
            if job.status == "running" and job.step < job.num_steps:
                earlier = [one for one in event.earlier if one.job == job.name]
                self._add(configs[job.name], job.step, job.num_steps, earlier)

    def _add(self, config: Mapping[str, Any], step: int, num_steps: int, earlier: Iterable[Event] = ()) -> None:
        """Begin a job; a callback with a state of its own hears of its earlier evaluations first."""
        name, train = config["name"], config["train"]
        args = _arguments(config, self._output_dir / name)
        samples = read_record(self._output_dir)["jobs"][name]["samples"]
        per_epoch = max(1, count_batches(samples, train["global_batch_size"], train["drop_last"]))
        state = TrainerState(
            max_steps=num_steps, num_train_epochs=math.ceil(train["num_train_epochs"]), trial_name=name,
            logging_steps=args.logging_steps, eval_steps=args.eval_steps, save_steps=args.save_steps,
            train_batch_size=train["global_batch_size"],
        )  # fmt: skip
        own = isinstance(self._callback, ExportableState)
        job = _Training(copy.copy(self._callback) if own else self._callback, args, state, per_epoch)
        for event in earlier:
            match event:
                case Stepped(step=at):
                    job.log(at, _logs(event))
                case Evaluated(step=at):
                    line = job.log(at, _metrics(event))
                    if own:
                        job.call("on_evaluate", metrics=line)
                    job.judge(line, at)
        job.control = TrainerControl()
        job.state.global_step, job.state.epoch = step, step / per_epoch
        self._jobs[name] = job
        self._call(name, "on_train_begin")

    def _stepped(self, event: Stepped, logged: bool) -> None:
        if (job := self._jobs.get(event.job)) is None:
            return
        job.control._new_step()
        job.state.global_step, job.state.epoch = event.step, event.step / job.per_epoch
        job.state.num_input_tokens_seen += event.tokens
        self._call(event.job, "on_step_end")
        if logged:
            self._call(event.job, "on_log", logs=job.log(event.step, _logs(event)))

    def _evaluated(self, event: Evaluated) -> None:
        if (job := self._jobs.get(event.job)) is None:
            return
        line = job.log(event.step, _metrics(event))
        self._call(event.job, "on_log", logs=dict(line))
        self._call(event.job, "on_evaluate", metrics=line)
        job.judge(line, event.step)

    def _saved(self, name: str, step: int) -> None:
        """Tell of a checkpoint, which training may have left behind: the state is at its step meanwhile."""
        job = self._jobs[name]
        job.saving -= 1
        reached, job.state.global_step = job.state.global_step, step
        self._call(name, "on_save")
        job.state.global_step = reached
        self._end(name)

    def _end(self, name: str) -> None:
        if self._jobs[name].has_ended and not self._jobs[name].saving:
            self._jobs[name].call("on_train_end")
            del self._jobs[name]

    def _call(self, name: str, method: str, **more: Any) -> None:
        job = self._jobs[name]
        was_asked = job.control.should_training_stop
        job.call(method, **more)
        if job.control.should_training_stop and not was_asked and not job.has_ended:
            self._stops.append(Stop(name, "it set should_training_stop"))


def _logs(event: Stepped) -> dict[str, Any]:
    return {"loss": event.loss, "grad_norm": event.grad_norm, "learning_rate": event.lr, **event.metrics}


def _metrics(event: Evaluated) -> dict[str, Any]:
    return {"eval_loss": event.eval_loss, **event.metrics}


def _arguments(config: Mapping[str, Any], folder: Path) -> TrainingArguments:
    """A job's keys as transformers' TrainingArguments; those that the job does not have are at their defaults. Devices are not
    looked at, as TrainingArguments(...) would.

    Args:
        config: the keys of the run, and over them those of the job.
    """
    args, train = object.__new__(TrainingArguments), config["train"]
    for one in dataclasses.fields(TrainingArguments):
        made: Callable[[], Any] | Any = one.default_factory
        value = one.default if made is dataclasses.MISSING else made()
        setattr(args, one.name, None if value is dataclasses.MISSING else value)
    for key in train.keys() & {one.name for one in dataclasses.fields(TrainingArguments)}:
        setattr(args, key, train[key])
    every = train["eval_steps"] if train["eval_steps"] is not None else config["eval_every"]
    is_judged = config["data"]["eval_path"] or config["data"]["eval_split"]
    own = {
        "output_dir": str(folder), "run_name": config["name"], "per_device_train_batch_size": train["global_batch_size"],
        "gradient_accumulation_steps": 1, "logging_strategy": IntervalStrategy.STEPS, "eval_steps": every,
        "eval_strategy": IntervalStrategy.STEPS if is_judged else IntervalStrategy.NO,
        "save_steps": config["save_every"], "save_strategy": IntervalStrategy.STEPS, "report_to": [],
        "seed": config["seed"] or 0, "greater_is_better": train["metric_for_best_model"] in HIGHER_IS_BETTER,
    }  # fmt: skip
    for key, value in own.items():
        setattr(args, key, value)
    return args
