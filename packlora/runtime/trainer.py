"""The training loop, to be read from top to bottom.

Rounds: in round r every job's r-th global batch is due. Windows of some rounds are packed into shared microbatches by
schedule/, in a process beside this one and a window ahead. A job steps after the last microbatch that holds samples of its
global batch; nothing of its next one is run before that. A job's numbers depend on its own samples alone: see collate.py,
loss.py and ops/ for how that is kept.

The loop shows nothing and writes no log: it emits events (report/events.py), and subscribers do so. It writes what nothing may
lose, checkpoints and adapters, through folder.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from packlora.base.model import Base
from packlora.config import Run
from packlora.errors import WriteError
from packlora.report.events import (
    Evaluated,
    JobAtStart,
    JobDone,
    JobFailed,
    MemoryRanOut,
    MicrobatchDone,
    Note,
    RunBegan,
    RunEnded,
    SavePointReached,
    Stepped,
    TrainingBegan,
)
from packlora.result import JobResult, Result
from packlora.runtime.collate import PackedSample
from packlora.runtime.evaluate import Evaluator, is_multiple
from packlora.runtime.events import Emitter
from packlora.runtime.folder import OutputFolder
from packlora.runtime.job import Job, take_steps
from packlora.runtime.memory import TokenBudget, free_memory, peak_memory
from packlora.runtime.microbatch import Executor, run_microbatch
from packlora.runtime.prepare import PreparedRun
from packlora.runtime.profiler import Profile, remember_failure
from packlora.runtime.record import job_result
from packlora.runtime.signals import stop_signals
from packlora.runtime.windows import first_round, planned_windows
from packlora.schedule.types import Microbatch, Window


class Packer:
    """Microbatches as the executor is given them: the same objects where one was packed ahead."""

    def __init__(self, jobs: Mapping[str, Job]) -> None:
        self.jobs = jobs
        self._last: tuple[Microbatch, tuple[list[PackedSample], np.ndarray]] | None = None

    def packed(self, microbatch: Microbatch) -> tuple[list[PackedSample], np.ndarray]:
        """Its samples, ordered by owner, and by owner the weight of a label token's loss in the gradient."""
        if self._last is not None and self._last[0] is microbatch:
            return self._last[1]
        weights = np.zeros(len(self.jobs))
        for name, batch in {(sample.job, sample.batch) for sample in microbatch.samples}:
            job = self.jobs[name]
            weights[job.adapter.number] = job.grad_scale / job.label_tokens(batch)
        placed = [(self.jobs[sample.job], sample) for sample in microbatch.samples]
        samples = [
            PackedSample(job.adapter.number, job.data.samples[own.sample], own.sample, own.batch, job.dropout_key)
            for job, own in placed
        ]
        self._last = microbatch, (sorted(samples, key=lambda sample: sample.owner), weights)
        return self._last[1]

    def prepare(self, executor: Executor, following: Sequence[Microbatch]) -> None:
        """Let the executor make ready what comes next, if anything does."""
        for microbatch in following:
            executor.prepare(*self.packed(microbatch))


class Trainer:
    """The state of a running loop."""

    def __init__(
        self,
        run: Run,
        prepared: PreparedRun,
        base: Base,
        executor: Executor,
        jobs: list[Job],
        profile: Profile,
        folder: OutputFolder,
        events: Emitter,
        notes: Sequence[str] = (),
        left_out: Mapping[str, JobResult] | None = None,
    ) -> None:
        """
        Args:
            executor: runs microbatches.
            profile: predicts the time of microbatches.
            folder: of the run; its logs are brought in line with the jobs' states.
            notes: what to tell before training starts.
            left_out: how the jobs of the run stand that are not trained.
        """
        self.run, self.prepared, self.base, self.executor, self.jobs = run, prepared, base, executor, jobs
        self.profile, self.folder, self.events, self.stop, self.notes = profile, folder, events, events.stop, notes
        self.left_out = dict(left_out or {})
        self.by_name = {job.name: job for job in jobs}
        is_auto = run.max_tokens_per_microbatch == "auto"
        self.budget = TokenBudget(prepared.budget, prepared.longest, is_auto, base.device)
        self.evaluator = Evaluator(base.device, executor, jobs, run.eval_every, self.budget, self.stop)
        self.stepped: list[Job] = []
        """Jobs that have stepped since evaluations and checkpoints were last seen to."""
        self.began: dict[str, float] = {}
        """When the global batch that a job is in began, by `_elapsed`."""
        self.untold: tuple[float, MicrobatchDone] | None = None
        """When a microbatch began that is told when its steps, for which the device is waited, are done."""
        self.packer = Packer(self.by_name)
        self.tokens = 0
        self.start = time.perf_counter()
        self.elapsed_before = max((line["elapsed"] for job in jobs for line in job.log_history), default=0.0)
        first = first_round(run.schedule, jobs, prepared.budget)
        self.num_microbatches = folder.rebuild_logs(jobs, prepared.left_out, first, _is_due)

    def fit(self) -> Result:
        """Train until every job is done or has failed, or a stop is asked for.

        Raises:
            WriteError, FileNotFoundError, MemoryError: as packlora.train.
        """
        self.training_began = self._elapsed()
        with stop_signals(self.events):
            self.events.emit(_beginning(self.run, self.folder, self.jobs, self.notes))
            try:
                self._train()
            except WriteError as error:
                kept = self.folder.rescue(self.jobs)
                self._end()
                raise WriteError(f"{error}. Kept: {kept}. Then continue with --resume") from error
            if not self._is_running():
                self.stop.withdraw()
            return self._end()

    # --- the loop ------------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        self._evaluate(self.jobs)  # before the first step, and those that an interruption left undone
        _end_between_steps(self.jobs, self.events, self.folder)
        self._settle()
        self.training_began = self._elapsed()
        self.events.emit(TrainingBegan())
        while self._goes_on():
            self._train_windows()
        if self.stop.asked:
            self.folder.save_unsaved(self.jobs)

    def _train_windows(self) -> None:
        """Train on the windows that are left, or until one must be planned again because its microbatches are too large."""
        schedule, budget = self.run.schedule, self.budget.tokens
        with planned_windows(schedule, self.jobs, budget, self.profile, self.events) as windows:
            for window in windows:
                if not self._train_window(window) or not self._goes_on():
                    return
        raise AssertionError("the plan has ended, but a job has not")

    def _train_window(self, window: Window) -> bool:
        """Train on a window's microbatches; False where it must be planned again.

        A job that a resumed run finds already past one of its global batches still takes part, and what it computes is
        discarded: the others then see exactly the microbatches that they would have seen without the interruption. So does a
        job that has been stopped, and one that has failed: matrix products of other shapes, other groups of layers and other
        plans round differently. Only microbatches that nobody needs are left out.
        """
        for slot, microbatch in enumerate(window.microbatches):
            if {placed.job for placed in microbatch.samples} & {job.name for job in self.stepped}:
                self._after_steps()  # before anything of these jobs' next global batches
                if self.stop.asked:
                    break  # evaluations that the stop cut short are made after --resume, at this step
            if not self._forward_backward(microbatch, window.first_round, slot):
                return False
            following = window.microbatches[slot + 1 : slot + 2]
            self._step([(self.by_name[name], batch) for name, batch in microbatch.completes], following)
            if self.stop.asked:
                break
        self._after_steps()
        return True

    def _forward_backward(self, microbatch: Microbatch, first_round: int, slot: int) -> bool:
        """Gradients go to the parameters, losses to the jobs. False where memory ran out and the window must be planned again
        with a lower budget. Of a job a microbatch holds samples of one global batch only.
        """
        batches = {placed.job: placed.batch for placed in microbatch.samples}
        present = [(job, batches[job.name]) for job in self.jobs if job.name in batches]
        if not any(_is_due(job, batch) for job, batch in present):
            return True
        start = self._elapsed()
        samples, weights = self.packer.packed(microbatch)
        for job, batch in present:
            if _is_due(job, batch):
                self.began.setdefault(job.name, start)
        done = self.budget.attempt(microbatch.num_tokens, lambda: run_microbatch(self.executor, samples, weights))
        if done is None:
            self._lower_budget(microbatch.num_tokens)
            return False
        for job, batch in present:
            if _is_due(job, batch):
                job.collect(done.sums[job.adapter.number], done.tokens[job.adapter.number])
            else:
                job.discard()
        self.tokens += sum(done.tokens.values())
        self.untold = start, MicrobatchDone(
            self.num_microbatches, first_round, slot, min(batches.values()), {job.name: batch for job, batch in present},
            self.budget.tokens, {self.jobs[number].name: count for number, count in done.tokens.items()},
            {self.jobs[number].name: count for number, count in done.samples.items()}, 0.0,
            self.profile.seconds(microbatch),
        )  # fmt: skip
        self.num_microbatches += 1
        return True

    def _lower_budget(self, tokens: int) -> None:
        """After memory ran out: nothing of the present global batches is kept, and what follows is planned with less."""
        for job in self.jobs:
            job.discard()
        self.began.clear()
        before, self.budget.tokens = self.budget.tokens, self.budget.below(tokens)
        free_memory(self.base.device)
        remember_failure(self.run, self.prepared, self.base, tokens)
        self.events.emit(MemoryRanOut(tokens, before, self.budget.tokens))

    def _step(self, complete: Sequence[tuple[Job, int]], following: Sequence[Microbatch]) -> None:
        """Global batches of jobs are complete: their optimizers step, unless they have done so before. following: what comes
        next, which is made ready meanwhile.
        """
        due = [job for job, batch in complete if _is_due(job, batch)]
        assert all(job.step == batch for job, batch in complete if _is_due(job, batch)), "a step was left out"
        results = take_steps(due, lambda: self.packer.prepare(self.executor, following))
        taken, elapsed = list(zip(due, results, strict=True)), self._elapsed()
        if self.untold is not None:
            (start, done), self.untold = self.untold, None
            self.events.emit(replace(done, seconds=elapsed - start))
        seconds = {job.name: elapsed - self.began.pop(job.name) for job in due}
        for job, result in taken:
            if result is not None:
                job.log_history[-1] |= {"seconds": seconds[job.name], "elapsed": elapsed}
        for job, result in taken:
            if result is None:
                self._fail(job)
                continue
            self.stepped.append(job)
            self.events.emit(_event(job.name, job.log_history[-1]))
            if result.notice is not None:
                self.events.emit(Note(f"job {job.name!r}: {result.notice}"))

    def _after_steps(self) -> None:
        """Evaluations and checkpoints of the jobs that have stepped, together where they have done so together."""
        self.folder.check()
        stepped, self.stepped = self.stepped, []
        every = self.run.save_every
        due = {job.name for job in stepped if job.step >= job.data.num_steps or is_multiple(job.step, every)}
        if not self.stop.asked:
            self._evaluate(stepped)
        due |= _end_as_asked(stepped, self.events)
        for job in stepped:
            if job.name in due and job.status == "running":
                self.folder.save_checkpoint(job)
        if not self.stop.asked:
            self._settle()
        if due:
            self.events.emit(SavePointReached())

    def _settle(self) -> None:
        """Make the evaluations that are due and write the results of jobs that have taken their last step."""
        _end_between_steps(self._evaluate(self.jobs), self.events, self.folder)
        for job in self.jobs:
            if job.status == "running" and job.step >= job.data.num_steps and not self.stop.asked:
                job.status = "done"
                self.folder.save_result(job)
                self.events.emit(JobDone(job.name, job.step, self.folder.of(job), job.stopped))
                for text in _left_out(job):
                    self.events.emit(Note(text))

    def _evaluate(self, jobs: Sequence[Job]) -> list[Job]:
        """Held-out losses of the jobs that are due, which are returned. One tried on its training samples tells no loss."""
        losses = self.evaluator.evaluate(jobs)
        for name, loss in losses.items():
            job = self.by_name[name]
            if job.eval_samples:
                found = {"eval_loss": loss if math.isfinite(loss) else None, "elapsed": self._elapsed()}
                job.log_history.append({"step": job.step, "epoch": job.epoch, **found})
                self.events.emit(Evaluated(job.name, job.step, loss))
            if not math.isfinite(loss) and job.step > 0:
                job.fail(f"held-out loss {loss:g}", revert=True)
                self._fail(job)
        return [self.by_name[name] for name in losses]

    # --- ends ----------------------------------------------------------------------------------------------------------

    def _is_running(self) -> bool:
        return any(job.status == "running" for job in self.jobs)

    def _goes_on(self) -> bool:
        return self._is_running() and not self.stop.asked

    def _fail(self, job: Job) -> None:
        self.events.emit(JobFailed(job.name, job.step, job.failure or ""))
        self.folder.save_result(job)

    def _elapsed(self) -> float:
        """Seconds since the run began, over all sessions."""
        return self.elapsed_before + time.perf_counter() - self.start

    def _end(self) -> Result:
        self.folder.check()
        for name in sorted(self.stop.jobs.keys() - self.by_name.keys()):
            self.events.emit(Note(f"no job {name!r} could end, as asked by {self.stop.jobs[name]}: there is none"))
        seconds = time.perf_counter() - self.start
        ends = dict(self.left_out)
        for job in self.jobs:
            losses = self.evaluator.losses_of(job)
            ends[job.name] = job_result(job, self.folder.of(job), losses, self.training_began)
        status = "done" if all(end.status == "done" for end in ends.values()) else "failed"
        result = Result(
            "interrupted" if self._is_running() else status, seconds, self.tokens, self.folder.path,
            self.folder.path / "report.html", {job.name: ends[job.name] for job in self.run.jobs}, self.stop.signal,
            self.folder.files.incomplete,
        )  # fmt: skip
        tokens = sum(job.tokens_seen for job in self.jobs)
        self.events.emit(RunEnded(result, self.elapsed_before + seconds, tokens, peak_memory(self.base.device)))
        return result


def _is_due(job: Job, batch: int) -> bool:
    """Whether the job has yet to step on this global batch: not after a failure, nor beyond the steps asked for."""
    return job.status != "failed" and job.step <= batch < job.data.num_steps


def _left_out(job: Job) -> list[str]:
    """What a person should know of modules that its training did not reach."""
    names = sorted({name.rpartition("/")[0] for name in job.untrained})
    return [f"job {job.name!r}: {name} took no part in training, its adapter is as it began" for name in names]


def _end_as_asked(stepped: Sequence[Job], events: Emitter) -> set[str]:
    """Let jobs that have just stepped end at this step where a subscriber has asked for it. Returns their names."""
    ended = set()
    for job in stepped:
        reason = events.stop.jobs.pop(job.name, None)
        if reason is not None and job.status == "running" and job.step < job.data.num_steps:
            events.emit(Note(f"job {job.name!r} ends at step {job.step} of {job.data.num_steps}, as asked by {reason}"))
            job.stop(reason)
            ended.add(job.name)
    return ended


def _end_between_steps(jobs: Sequence[Job], events: Emitter, folder: OutputFolder) -> None:
    """The same for jobs that are between two steps, which are saved as they are."""
    ended = _end_as_asked([job for job in jobs if job.step > 0], events)
    for job in jobs:
        if job.name in ended:
            folder.save_checkpoint(job)


def _beginning(run: Run, folder: OutputFolder, jobs: Sequence[Job], notes: Sequence[str]) -> RunBegan:
    starts = [JobAtStart(job.name, job.status, job.step, job.data.num_steps, job.data.tokens) for job in jobs]
    config = run.model_dump(mode="json")
    return RunBegan(folder.run, folder.path, config, tuple(starts), tuple(notes), _told_before(jobs))


def _told_before(jobs: Sequence[Job]) -> tuple[Stepped | Evaluated, ...]:
    """What earlier sessions told of the steps that the jobs have taken, in the order of time."""
    lines = [(line["elapsed"], job.name, line) for job in jobs for line in job.log_history]
    return tuple(_event(name, line) for _, name, line in sorted(lines, key=lambda found: found[0]))


def _event(job: str, line: Mapping[str, Any]) -> Stepped | Evaluated:
    """The event of a line of a log history, which holds null for a loss that is not finite."""
    if "loss" not in line:
        loss = line["eval_loss"]
        return Evaluated(job, line["step"], math.nan if loss is None else loss)
    return Stepped(
        job, line["step"], line["loss"], line["grad_norm"], line["learning_rate"], line["tokens"], line["seconds"],
        line["elapsed"],
    )  # fmt: skip
