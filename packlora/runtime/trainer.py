"""The training loop, to be read from top to bottom.

Rounds: in round r every job's r-th global batch is due. Windows of some rounds are packed into shared microbatches by
schedule/; stream.py hands them to the engine slot by slot. A job steps after the last microbatch that holds samples of its
global batch; nothing of its next one is run before that. A job's numbers depend on its own samples alone: see engine/ and ops/
for how that is kept.

The engine runs dry where something must find it so, a quiet moment: an evaluation, a checkpoint, a job's end, a stop, jobs that
join or leave. It is the same loop on one device and on the stages of a pipeline.

The loop shows nothing and writes no log: it emits events, and subscribers do so. It writes what nothing may
lose, checkpoints and adapters, through folder.py.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from typing import Any

from packlora.base.model import Base
from packlora.changes import Changes
from packlora.config import Run
from packlora.engine.engine import Done, StepDone
from packlora.engine.memory import TokenBudget, peak_memory
from packlora.engine.passes import Executor, insist, one_error_for_memory
from packlora.errors import ProcessError
from packlora.events import (
    Evaluated,
    JobAtStart,
    JobDone,
    JobFailed,
    Note,
    RunBegan,
    RunEnded,
    SavePointReached,
    Stepped,
    TrainingBegan,
)
from packlora.files import FolderGoneError
from packlora.parallel.alone import ALONE, Alone
from packlora.parallel.layout import planned
from packlora.report.metrics import told_in
from packlora.result import JobResult, Result
from packlora.runtime.evaluate import Evaluator, is_multiple
from packlora.runtime.events import Emitter, StopRequest
from packlora.runtime.flow import Flow
from packlora.runtime.folder import OutputFolder
from packlora.runtime.forwards import Forwards
from packlora.runtime.job import Job, keep_if_best, take_best
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile
from packlora.runtime.record import job_result
from packlora.runtime.signals import stop_signals
from packlora.runtime.stream import Stream
from packlora.runtime.tally import Tally
from packlora.runtime.team import Team
from packlora.runtime.windows import Plan, last_round, planned_windows, window_of


class Trainer:
    """The state of a running loop."""

    def __init__(
        self, run: Run, prepared: PreparedRun, base: Base, executor: Executor, jobs: list[Job], profile: Profile,
        folder: OutputFolder, events: Emitter, notes: Sequence[str] = (), left_out: Mapping[str, JobResult] | None = None,
        group: Alone = ALONE, logged: int = 0, changes: Changes | None = None, tokens_of_gone: int = 0,
        flow: Flow | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            executor: runs microbatches.
            profile: predicts the time of microbatches.
            folder: of the run.
            notes: what to tell before training starts.
            left_out: how the jobs of the run stand that are not trained.
            group: the processes that train these jobs.
            logged: microbatches that earlier sessions have logged.
            changes: who joins and leaves; None where nobody does.
            tokens_of_gone: that jobs were trained on which are off the model.
            flow: of slots; None: on one device.
        """
        self.run, self.prepared, self.base, self.executor, self.jobs = run, prepared, base, executor, jobs
        self.profile, self.folder, self.events, self.notes = profile, folder, events, notes
        self.left_out = dict(left_out or {})
        self.changes = changes or Changes()
        self.team = Team(group, events.stop, jobs)
        self.stop = self.team.stop
        self.budget = _budget(run, prepared, base)
        forwards = Forwards(base.device, executor, self.budget, self.team)
        self.evaluator = Evaluator(forwards, jobs, run.eval_every, self.changes.held_out)
        self.flow = flow or Flow()
        self.engine = self.flow.engine(executor, group, self.budget)
        self.by_name: dict[str, Job] = {}
        self.by_number: dict[int, Job] = {}
        """Jobs by the numbers of their adapters."""
        self._follow()
        self.tally = Tally(self.by_name, self.budget, profile, logged, self._elapsed, self.flow)
        self.tokens_of_gone = tokens_of_gone
        self.start = time.perf_counter()
        self.elapsed_before = max((line["elapsed"] for job in jobs for line in job.log_history), default=0.0)

    def fit(self) -> Result:
        """Train until every job is done or has failed, or a stop is asked for. Raises as packlora.train."""
        self.training_began = self._elapsed()
        with stop_signals(self.events), closing(self.folder):
            self.events.emit(_beginning(self.run, self.folder, self.jobs, self.notes))
            try:
                with one_error_for_memory():
                    self._train()
            except (FolderGoneError, ProcessError):  # nothing can be saved there; others have parts of what would be
                raise
            except Exception as error:  # a defect, too: that of one job costs the others no step
                kept = self.folder.rescue(self.jobs)
                with contextlib.suppress(Exception):
                    self._end()
                _short().raise_with(kept, error, self)
            if not self._is_running():
                self.stop.withdraw()
            return self._end()

    # --- the loop ------------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        self._evaluate(self.jobs)  # before the first step, and those that an interruption left undone
        _end_between_steps(self.jobs, self.stop, self.events, self.folder)
        self._settle(self.jobs)
        self.training_began = self._elapsed()
        self.events.emit(TrainingBegan(compiles=self.base.device.type == "cuda" and self._is_running()))
        self._change(self.changes.first(self.jobs))
        self._follow_the_last()
        while self._goes_on():
            self._train_windows()
            self._follow_the_last()
        self.folder.save_unsaved(self.jobs if self.stop.asked else ())

    def _train_windows(self) -> None:
        """Train on the windows that are left, or until they must be planned again because microbatches are too large."""
        group, budget, capacity, settings = self.team.group, self.budget, self.budget.tokens, self.budget.settings
        parts = (self.run, self.jobs, planned(capacity, group.size), self.profile, self.events, group)
        plan = planned_windows(*parts, self.changes, self.flow)
        stream = Stream(plan, self.by_name, self.team, capacity, self.evaluator, self.tally)
        while self._goes_on() and budget.settings == settings:
            assert not plan.has_ended, "the plan has ended, but a job has not"
            self.run_slots(stream)

    def run_slots(self, stream: Stream) -> None:
        """Run slots until the stream lets the engine run dry; then do what waits for a quiet moment."""
        self.flow.begin()
        for done in self.engine.run(stream):
            self._take(done, stream)
        if (told := self.flow.ran(self.by_name)) is not None:
            self.events.emit(told)
        self.team.agree()
        self._after_steps(stream.take_waiting())
        if (border := stream.plan.border) is not None:
            stream.plan.border = None
            self._change(border, stream.plan)

    def _take(self, done: Done, stream: Stream) -> None:
        """Count what came of a slot: tokens, then steps."""
        if done.lacking:
            _short().go_on_with_less(self, done.lacking)
            return
        stream.is_ending |= done.asked
        for microbatch in self.tally.done(done.slot):
            self.events.emit(microbatch)
        notes = {}
        for one in done.events:
            job = self.by_number[one.adapter]
            note = job.stepped(one, *self.tally.stepped(job)) if isinstance(one, StepDone) else job.confirm(one)
            if note is not None:
                notes[job.name] = note
        for one in done.events:
            job = self.by_number[one.adapter]
            if isinstance(one, StepDone) and job.status == "running":
                self.events.emit(event_of(job.name, job.log_history[-1]))
            if job.status != "running" or _is_due(job, self.run.save_every, self.evaluator, self.stop):
                stream.waiting[job.name] = job
        for name, note in notes.items():
            self.events.emit(Note(f"job {name!r}: {note}"))
        if done.events:
            self.folder.check()

    def _follow_the_last(self) -> None:
        """Let jobs join where all have ended; that one has failed is known a round later."""
        for later in (0, 2):
            if not self._is_running():
                self._change(window_of(self.run, last_round(self.jobs) + later).stop)

    def _change(self, given: int | None, plan: Plan | None = None) -> None:
        """Let jobs join and leave between two windows. given: the round that is next; None where there is nothing to do."""
        if given is None or self.stop.asked:
            return
        running = [job for job in self.jobs if job.status == "running"]
        changed = self.changes.change(given, self.jobs, self.budget)
        _tell_failures(running, self.folder, self.events)
        if plan is not None:
            plan.follow()
        if changed is None:
            return
        self._follow()
        for event in changed.told:
            self.events.emit(event)
        for job in (own for own in changed.left if own.status == "running"):
            self.folder.save_checkpoint(job)
        self._settle(self.jobs)
        for job in self.changes.take_off(self.jobs, given):
            self.left_out[job.name] = self._result_of(job)
            self.tokens_of_gone += job.tokens_seen
        self._follow()
        self.events.emit(SavePointReached())

    def _after_steps(self, stepped: Sequence[Job]) -> None:
        """Failures, evaluations and checkpoints of the jobs for which something is due, together where they have stepped
        together."""
        self.folder.check()
        _tell_failures(stepped, self.folder, self.events)
        every = self.run.save_every
        due = {job.name for job in stepped if job.step >= job.data.num_steps or is_multiple(job.step, every)}
        if not self.stop.asked:
            self._evaluate(stepped)
        due |= _end_as_asked(stepped, self.stop, self.events)
        for job in stepped:
            if job.name in due and job.status == "running":
                self.folder.save_checkpoint(job)
        if not self.stop.asked:
            self._settle(stepped)
        if due:
            self.events.emit(SavePointReached())

    def _settle(self, jobs: Sequence[Job]) -> None:
        """Make the evaluations that are due and write the results of jobs that have taken their last step."""
        _end_between_steps(self._evaluate(jobs), self.stop, self.events, self.folder)
        for job in [own for own in jobs if own.step >= own.data.num_steps and not self.evaluator.is_due(own)]:
            if job.status == "running" and not self.stop.asked:
                self.folder.finish(job)  # its last checkpoint is of its last step, whatever its result is
                job.status = "done"
                if (note := take_best(job)) is not None:
                    self.events.emit(Note(note))
                self.folder.save_result(job)
                self.events.emit(JobDone(job.name, job.step, self.folder.of(job), job.stopped))
                for text in [*_left_out(job), *job.data.notes()]:
                    self.events.emit(Note(text))

    def _evaluate(self, jobs: Sequence[Job]) -> list[Job]:
        """Held-out losses of the jobs that are due, which are returned. One tried on its training samples tells no loss."""
        for name, own in (told := self.evaluator.evaluate(jobs)).items():
            job, loss = self.by_name[name], own.loss
            if job.eval_samples:
                job.log_history.append({"step": job.step, "epoch": job.epoch, **own.line, "elapsed": self._elapsed()})
                self.events.emit(event_of(job.name, job.log_history[-1] | {"eval_loss": loss}))
                insist(self.executor, partial(_judge, job, self.stop))
            if not math.isfinite(loss) and job.step > 0:
                job.fail(f"held-out loss {loss:g}", job.state.revert())
                _tell_failure(job, self.folder, self.events)
        return [self.by_name[name] for name in told]

    # --- ends ----------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """The jobs are others now."""
        self.by_name.clear()
        self.by_name.update({job.name: job for job in self.jobs})
        self.by_number = {job.adapter.number: job for job in self.jobs}
        self.engine.follow({number: job.state for number, job in self.by_number.items()})

    def _is_running(self) -> bool:
        return any(job.status == "running" for job in self.jobs)

    def _goes_on(self) -> bool:
        return self._is_running() and not self.stop.asked

    def _elapsed(self) -> float:
        """Seconds since the run began, over all sessions."""
        return self.elapsed_before + time.perf_counter() - self.start

    def _result_of(self, job: Job) -> JobResult:
        return job_result(job, self.folder.of(job), self.training_began)

    def _end(self) -> Result:
        self.folder.check()
        for name in sorted(self.stop.jobs.keys() - self.by_name.keys()):
            self.events.emit(Note(f"no job {name!r} could end, as asked by {self.stop.jobs[name]}: there is none"))
        self.changes.end(self.jobs, self.folder.files)
        seconds = time.perf_counter() - self.start
        ends = self.left_out | {job.name: self._result_of(job) for job in self.jobs}
        tokens = self.tokens_of_gone + sum(job.tokens_seen for job in self.jobs)
        status = "interrupted" if self._is_running() else _status_of(self.changes.judged(ends))
        result = _result(self.run, self.folder, ends, status, seconds, self.tally.tokens, self.stop.signal)
        self.events.emit(RunEnded(result, self.elapsed_before + seconds, tokens, peak_memory(self.base.device)))
        return result


def _budget(run: Run, prepared: PreparedRun, base: Base) -> TokenBudget:
    """Tokens of a microbatch, and what may be changed where memory runs out: nothing that is written in the run file, and
    nothing where others have parts of the model, since no process can go on alone."""

    whole = base.storage.is_whole
    is_auto = whole and (run.max_tokens_per_microbatch == "auto" or run.leaves("max_tokens_per_microbatch"))
    measures = [] if run.gradient_checkpointing else [True]
    if not (whole and run.leaves("gradient_checkpointing") and base.model.supports_gradient_checkpointing):
        measures = []

    def advice(tokens: int) -> str:
        now = [run.gradient_checkpointing, *measures][len(measures) - len(budget.measures)]
        return str(_short().advice(run, prepared, base, tokens, now))

    budget = TokenBudget(prepared.budget, prepared.longest, is_auto, base.device, measures, advice)
    return budget


def _short() -> Any:
    return import_module("packlora.runtime.short")


def _is_due(job: Job, save_every: int, evaluator: Evaluator, stop: StopRequest) -> bool:
    """Whether something is to be done for a job before its next global batch."""
    is_last = job.step >= job.data.num_steps
    return is_last or is_multiple(job.step, save_every) or evaluator.is_due(job) or job.name in stop.jobs


def _tell_failures(running: Sequence[Job], folder: OutputFolder, events: Emitter) -> None:
    """Tell which of these jobs, which were running, have failed."""
    for job in running:
        if job.status == "failed":
            _tell_failure(job, folder, events)


def _tell_failure(job: Job, folder: OutputFolder, events: Emitter) -> None:
    folder.finish(job)  # of an earlier step
    events.emit(JobFailed(job.name, job.step, job.failure or ""))
    folder.save_result(job)


def _status_of(ends: Mapping[str, JobResult]) -> str:
    return "failed" if any(end.status != "done" for end in ends.values()) else "done"


def _result(
    run: Run, folder: OutputFolder, ends: Mapping[str, JobResult], status: str, seconds: float, tokens: int,
    signal: int | None,
) -> Result:  # fmt: skip
    """How a session ended. ends: its jobs, in any order."""
    order = dict.fromkeys([*(job.name for job in run.jobs), *ends])
    return Result(
        status, seconds, tokens, folder.path, folder.path / "report.html",
        {name: ends[name] for name in order if name in ends}, signal, folder.files.incomplete,
    )  # fmt: skip


def _judge(job: Job, stop: StopRequest) -> None:
    """After an evaluation: keep a job's adapter if it is the best, or let the job end if too many were no better."""
    reason = keep_if_best(job) if job.step > 0 else None
    if reason is not None and job.goes_on:
        stop.jobs.setdefault(job.name, reason)


def _left_out(job: Job) -> list[str]:
    """Notes on modules that its training did not reach; none where each of its steps was skipped, which was told."""
    state = job.state
    if state.scale is not None and not state.scale.good and state.untrained == state.parameters.keys():
        return []
    names = sorted({name.rpartition("/")[0] for name in state.untrained | state.untrained_elsewhere})
    return [f"job {job.name!r}: {name} took no part in training, its adapter is as it began" for name in names]


def _end_as_asked(stepped: Sequence[Job], stop: StopRequest, events: Emitter) -> set[str]:
    """Let jobs that have just stepped end at this step where a subscriber has asked for it. Returns their names."""
    ended = set()
    for job in stepped:
        reason = stop.jobs.pop(job.name, None)
        if reason is not None and job.status == "running" and job.goes_on:
            events.emit(Note(f"job {job.name!r} ends at step {job.step} of {job.data.num_steps}, as asked by {reason}"))
            job.stop(reason)
            ended.add(job.name)
    return ended


def _end_between_steps(jobs: Sequence[Job], stop: StopRequest, events: Emitter, folder: OutputFolder) -> None:
    """The same for jobs that are between two steps, which are saved as they are."""
    ended = _end_as_asked([job for job in jobs if job.step > 0], stop, events)
    for job in jobs:
        if job.name in ended:
            folder.save_checkpoint(job)


def _beginning(run: Run, folder: OutputFolder, jobs: Sequence[Job], notes: Sequence[str]) -> RunBegan:
    starts = [JobAtStart(job.name, job.status, job.step, job.data.num_steps, job.data.tokens) for job in jobs]
    config = run.model_dump(mode="json")
    return RunBegan(folder.run, folder.path, config, tuple(starts), tuple(notes), _told_before(jobs))


def _told_before(jobs: Sequence[Job]) -> tuple[Stepped | Evaluated, ...]:
    """Events that earlier sessions told of the steps that the jobs have taken, in the order of time."""
    lines = [(line["elapsed"], job.name, line) for job in jobs for line in job.log_history]
    return tuple(event_of(name, line) for _, name, line in sorted(lines, key=lambda found: found[0]))


def event_of(job: str, line: Mapping[str, Any]) -> Stepped | Evaluated:
    """The event of a line of a log history, which holds null for a held-out loss or a norm that is not finite."""
    if "loss" not in line:
        loss = line["eval_loss"]
        metrics = {key: value for key, value in line.items() if key.startswith("eval_") and key != "eval_loss"}
        return Evaluated(job, line["step"], math.nan if loss is None else loss, metrics)
    norm = math.nan if line["grad_norm"] is None else line["grad_norm"]
    return Stepped(
        job, line["step"], line["loss"], norm, line["learning_rate"], line["tokens"], line["seconds"], line["elapsed"],
        told_in(line),
    )  # fmt: skip
