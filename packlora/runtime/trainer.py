"""The training loop, to be read from top to bottom.

Rounds: in round r every job's r-th global batch is due. Windows of some rounds are packed into shared microbatches by
schedule/, in a process beside this one and a window ahead. A job steps after the last microbatch that holds samples of its
global batch; nothing of its next one is run before that. A job's numbers depend on its own samples alone: see data/collate.py,
loss.py and ops/ for how that is kept.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from packlora.base.model import Base
from packlora.config import Run
from packlora.data.encode import Sample
from packlora.data.order import SampleOrder
from packlora.errors import WriteError, unwritten
from packlora.files import KeptFolder, remove_leftovers, write_json
from packlora.report.metrics import JsonLines, eval_lines, keep_lines, metric_lines, read_lines, write_lines
from packlora.report.progress import Progress
from packlora.report.report import write_report
from packlora.result import JobResult, Result
from packlora.runtime import checkpoint, profiler
from packlora.runtime.collate import PackedSample
from packlora.runtime.job import Job
from packlora.runtime.microbatch import Executor, run_microbatch
from packlora.runtime.prepare import Prepared
from packlora.runtime.profiler import Profile, free_memory
from packlora.runtime.record import peak_memory
from packlora.schedule.background import BackgroundPlanner
from packlora.schedule.planner import Planner
from packlora.schedule.types import Microbatch, Window


class Trainer:
    """The state of a running loop."""

    def __init__(
        self,
        run: Run,
        prepared: Prepared,
        base: Base,
        executor: Executor,
        jobs: list[Job],
        record: dict[str, Any],
        profile: Profile,
        notes: Sequence[str] = (),
    ) -> None:
        """notes: what to say before training starts; of a resumed run not what it has said before."""
        self.notes = notes
        self.run, self.prepared, self.base = run, prepared, base
        self.executor, self.jobs, self.record, self.profile = executor, jobs, record, profile
        self.by_name = {job.name: job for job in jobs}
        self.output_dir = Path(run.output_dir)
        self.budget = prepared.budget
        """Tokens of a microbatch; less than it was after memory ran out."""
        self.held_out_budget = prepared.budget
        """The same for evaluations, which may come in the middle of a window."""
        self.stepped: list[Job] = []
        """Jobs that have stepped since evaluations and checkpoints were last seen to."""
        self.began: dict[str, float] = {}
        """When the global batch that a job is in began."""
        self.stop: int | None = None
        self.tokens = 0
        self.start = time.perf_counter()
        self.folder = KeptFolder(self.output_dir)
        histories = {job.name: job.log_history for job in jobs}
        self._rebuild("metrics.jsonl", metric_lines(histories))
        evals = eval_lines(histories)
        self._rebuild("evals.jsonl", evals)
        # by job and step; None where it was not finite
        self.evals: dict[tuple[str, int], float | None] = {
            (line["job"], line["step"]): line["eval_loss"] for line in evals
        }
        first_round = self._planner().window_start(self._slowest())
        keep_lines(self.output_dir / "windows.jsonl", lambda line: line["window"] < first_round)
        path = self.output_dir / "microbatches.jsonl"
        batches = keep_lines(path, lambda line: line["index"] >= 0 and self._is_past(line))
        self.num_microbatches = max((line["index"] + 1 for line in batches), default=0)
        self.elapsed_before = max((line["elapsed"] for own in histories.values() for line in own), default=0.0)
        self.incomplete: dict[str, str] = {}
        """Logs that lack something, and why it could not be written."""
        self.metrics = JsonLines(self.output_dir / "metrics.jsonl", self._incomplete)
        self.eval_lines = JsonLines(self.output_dir / "evals.jsonl", self._incomplete)
        self.microbatch_lines = JsonLines(self.output_dir / "microbatches.jsonl", self._incomplete)
        self.window_lines = JsonLines(self.output_dir / "windows.jsonl", self._incomplete)
        self.logs = (self.metrics, self.eval_lines, self.microbatch_lines, self.window_lines)

    def _rebuild(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Make a log hold what the jobs' states say, whatever a crash has left of it, and what it holds of jobs left out."""
        path = self.output_dir / name
        others = [line for line in read_lines(path, "job", "step") if str(line["job"]) in self.prepared.left_out]
        if others or lines or path.exists():
            write_lines(path, [*others, *lines])

    def fit(self) -> Result:
        """Windows until every job is done or has failed, or a signal asks to stop.

        Raises:
            WriteError: a checkpoint or an adapter cannot be written; those of the other jobs were saved.
        """
        self.progress = Progress(self.jobs)
        with self._signals():
            with self.progress:
                for text in self.notes:
                    self.progress.message(f"note: {text}")
                try:
                    self._train()
                except WriteError as error:
                    kept = self._rescue()
                    self._finish()
                    raise WriteError(f"{error}. Kept: {kept}. Then continue with --resume") from error
            if not self._runs():
                self.stop = None  # too late to stop anything
            return self._finish()

    def _train(self) -> None:
        self._settle()  # held-out losses before the first step, and what an interruption left undone
        self.progress.training_starts()
        while self.stop is None and self._runs():
            self._windows()
        if self.stop is not None:
            self._save_before_stop()

    def _runs(self) -> bool:
        return any(job.status == "running" for job in self.jobs)

    # --- windows -------------------------------------------------------------------------------------------------------

    def _windows(self) -> None:
        """Train on the windows that are left, or until one must be planned again because its microbatches are too large."""
        with BackgroundPlanner(self._planner()) as plan:
            windows = plan.windows(self._slowest())
            while (window := self._next(windows)) is not None:
                if not self._window(window) or self.stop is not None:
                    return
                if not self._runs():
                    return
        raise AssertionError("the plan has ended, but a job has not")

    def _next(self, windows: Iterator[Window]) -> Window | None:
        """The next window, or None at the end. Where the process that plans has failed, the report says so."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            window = next(windows, None)
        for warning in caught:
            self._warn(str(warning.message))
        return window

    def _planner(self) -> Planner:
        schedule = self.run.schedule
        jobs = [job.data.planned for job in self.jobs]
        return Planner(jobs, self.budget, method=schedule.method, time_limit_s=schedule.time_limit_s)

    def _slowest(self) -> int:
        """Round that the slowest job is in. A resumed run plans from its window on, and so plans what it planned before."""
        return min((job.step for job in self.jobs if job.status == "running"), default=2**31)

    def _is_past(self, line: dict[str, Any]) -> bool:
        """Whether a line of microbatches.jsonl is of a microbatch that will not be run again."""
        own = [(self.by_name[name], batch) for name, batch in line["batches"].items() if name in self.by_name]
        return not any(self._is_due(job, batch) for job, batch in own)

    def _write_window(self, window: Window) -> None:
        report = window.report
        self.window_lines.write(
            window=window.first_round, rounds=window.num_rounds, method=report.method, capacity=self.budget,
            microbatches=report.microbatches, noops=report.noops, bound=report.bound, gap=report.gap, stopped=report.stopped,
            seconds=report.seconds, predicted=sum(self.profile.seconds(microbatch) for microbatch in window.microbatches),
        )  # fmt: skip
        for text in report.notes:
            self._warn(f"schedule, rounds from {window.first_round}: {text}")

    def _window(self, window: Window) -> bool:
        """Run a window's microbatches; False where it must be planned again.

        A job that a resumed run finds already past one of its global batches still takes part, and what it computes is
        discarded: the others then see exactly the microbatches that they would have seen without the interruption. So does a
        job that --max-steps has stopped, and one that has failed: matrix products of other shapes, other groups of layers and
        other plans round differently. Only microbatches that nobody needs are left out.
        """
        self._write_window(window)
        for slot, microbatch in enumerate(window.microbatches):
            if {placed.job for placed in microbatch.samples} & {job.name for job in self.stepped}:
                self._after_steps()  # before anything of these jobs' next global batches
                if self.stop is not None:
                    break  # evaluations that the signal cut short are made after --resume, at this step
            if not self._microbatch(microbatch, window.first_round, slot):
                return False
            for name, batch in microbatch.completes:
                self._step(self.by_name[name], batch)
            if self.stop is not None:
                break
        self._after_steps()
        return True

    def _step(self, job: Job, batch: int) -> None:
        """A job's global batch is complete: its optimizer steps, unless it has done so before."""
        if not self._is_due(job, batch):
            return
        assert job.step == batch, f"job {job.name!r} is at step {job.step}, but batch {batch} is complete"
        now, began = time.perf_counter(), self.began.pop(job.name)
        result = job.optimizer_step()
        if result is None:
            self._failed(job)
            return
        job.log_history[-1] |= {"seconds": now - began, "elapsed": self.elapsed_before + now - self.start}
        self.metrics.write(**metric_lines({job.name: job.log_history[-1:]})[0])
        self.progress.stepped(job, result)
        if result.notice is not None:
            self._warn(f"job {job.name!r}: {result.notice}")
        self.stepped.append(job)

    def _microbatch(self, microbatch: Microbatch, first_round: int, slot: int) -> bool:
        """Forward and backward; gradients go to the parameters, losses to the jobs. False where memory ran out and the window
        must be planned again with a lower budget.

        Args:
            microbatch: its samples; of a job, of one global batch only.
            first_round: of the window.
            slot: place in the window.

        Raises:
            MemoryError: out of memory, and there is no lower budget to go on with.
        """
        batches = {placed.job: placed.batch for placed in microbatch.samples}
        present = [(job, batches[job.name]) for job in self.jobs if job.name in batches]
        if not any(self._is_due(job, batch) for job, batch in present):
            return True
        start = time.perf_counter()
        names = {job.adapter.number: job.name for job, _ in present}
        samples = [
            PackedSample(
                job.adapter.number, job.data.samples[placed.sample], placed.sample, placed.batch, job.dropout_key
            )
            for placed in microbatch.samples
            for job in [self.by_name[placed.job]]
        ]
        samples.sort(key=lambda sample: sample.owner)
        weights = np.zeros(len(self.jobs))
        for job, batch in present:
            if self._is_due(job, batch):
                self.began.setdefault(job.name, start)
            weights[job.adapter.number] = job.grad_scale / job.label_tokens(batch)
        tokens = sum(sample.sample.num_tokens for sample in samples)
        try:
            ran = run_microbatch(self.executor, samples, weights)
        except torch.OutOfMemoryError as error:
            self._check_lower(tokens, error)
            ran = None
        if ran is None:  # here the error, and what it held in memory, is gone
            self._lower_budget(tokens)
            return False
        for job, batch in present:
            if self._is_due(job, batch):
                job.collect(ran.sums[job.adapter.number], ran.tokens[job.adapter.number])
            else:
                job.discard()
        self.tokens += sum(ran.tokens.values())
        self.microbatch_lines.write(
            index=self.num_microbatches, window=first_round, slot=slot, round=min(batch for _, batch in present),
            batches={job.name: batch for job, batch in present}, capacity=self.budget,
            tokens={names[number]: count for number, count in ran.tokens.items()},
            samples={names[number]: count for number, count in ran.samples.items()},
            seconds=time.perf_counter() - start, predicted=self.profile.seconds(microbatch),
        )  # fmt: skip
        self.num_microbatches += 1
        return True

    @staticmethod
    def _is_due(job: Job, batch: int) -> bool:
        """Whether the job has yet to step on this global batch: not after a failure, nor beyond the steps asked for."""
        return job.status != "failed" and job.step <= batch < job.data.num_steps

    # --- out of memory -------------------------------------------------------------------------------------------------

    def _check_lower(self, tokens: int, error: torch.OutOfMemoryError) -> None:
        """Raises MemoryError where there is no lower budget to go on with, or where it is the user's."""
        if self.run.max_tokens_per_microbatch == "auto" and self._lower(tokens) < tokens:
            return
        raise MemoryError(
            f"out of memory on {self.base.device} in a microbatch of {tokens} tokens; lower "
            "max_tokens_per_microbatch or set gradient_checkpointing: true, then continue with --resume"
        ) from error

    def _lower(self, tokens: int) -> int:
        """The budget to try after a microbatch of so many tokens did not fit; no less than the longest sample."""
        return max(tokens * 3 // 4, self.prepared.longest)

    def _lower_budget(self, tokens: int) -> None:
        """After memory ran out: nothing of the present global batches is kept, and what follows is planned with less."""
        for job in self.jobs:
            job.discard()
        self.began.clear()
        before, self.budget = self.budget, self._lower(tokens)
        free_memory(self.base.device)
        profiler.remember_failure(self.run, self.prepared, self.base, tokens)
        self.record["schedule"]["budget"] = self.budget
        self._warn(
            f"out of memory in a microbatch of {tokens} tokens: max_tokens_per_microbatch, which is auto, goes from {before} "
            f"to {self.budget}"
        )
        self._write_record()

    def _failed(self, job: Job) -> None:
        self.record["warnings"].append(f"job {job.name!r} was stopped: {job.failure}")
        self.progress.message(f"job {job.name!r} was stopped: {job.failure}; the other jobs go on")
        self._save_result(job)

    # --- after steps ---------------------------------------------------------------------------------------------------

    def _after_steps(self) -> None:
        """Evaluations and checkpoints of the jobs that have stepped, together where they have done so together."""
        self.folder.check()
        stepped, self.stepped = self.stepped, []
        due = [job for job in stepped if job.step >= job.data.num_steps or self._every(self.run.save_every, job)]
        if self.stop is None:
            self._evaluate([job for job in stepped if self._to_evaluate(job)])
        for job in due:
            if job.status == "running":
                self._save(job)
        if self.stop is None:
            self._settle()
        if due:
            self._write_record()
            self._write_report()

    def _settle(self) -> None:
        """Make the evaluations that are due and write the results of jobs that have taken their last step."""
        self._evaluate([job for job in self.jobs if self._to_evaluate(job)])
        for job in self.jobs:
            if job.status == "running" and job.step >= job.data.num_steps and self.stop is None:
                job.status = "done"
                self._save_result(job)
                for name in sorted({name.rpartition("/")[0] for name in job.untrained}):
                    self._warn(f"job {job.name!r}: {name} took no part in training, its adapter is as it began")

    @staticmethod
    def _every(steps: int, job: Job) -> bool:
        return steps > 0 and job.step > 0 and job.step % steps == 0

    def _to_evaluate(self, job: Job) -> bool:
        """Before the first step, at eval_every and after the last step, once each."""
        if job.status != "running" or (job.name, job.step) in self.evals:
            return False
        if job.step >= job.data.num_steps:
            return True
        return bool(job.eval_samples) and (job.step == 0 or self._every(self.run.eval_every, job))

    # --- files ---------------------------------------------------------------------------------------------------------

    def _save(self, job: Job) -> None:
        """A checkpoint; what the logs hold up to it is on the disk before it is there."""
        for lines in self.logs:
            lines.sync()
        run, limit = self.record["id"], self.run.save_total_limit
        self._written(job, lambda folder: checkpoint.save_checkpoint(folder, job, run, limit))
        self.record["saved"][job.name] = job.step

    def _save_result(self, job: Job) -> None:
        self.folder.check()
        self._written(job, lambda folder: checkpoint.save_result(folder, job, self.record["id"]))

    def _written(self, job: Job, write: Callable[[Path], object]) -> None:
        """Write a job's checkpoint or adapter; what fails is tried once more, without the leftovers that take up space.

        Raises:
            WriteError: it failed again.
        """
        folder = self.output_dir / job.name
        try:
            write(folder)
        except (OSError, SafetensorError):
            try:
                remove_leftovers(folder)
                write(folder)
            except (OSError, SafetensorError) as error:
                if job.status == "done":
                    job.status = "running"  # as its checkpoint says
                raise WriteError(
                    f"job {job.name!r}: step {job.step} cannot be written to {folder}: {unwritten(error) or error}"
                ) from error

    def _save_before_stop(self) -> None:
        self.folder.check()
        for job in self._unsaved():
            job.discard()
            self._save(job)

    def _unsaved(self) -> list[Job]:
        """Running jobs whose present step is in no checkpoint."""
        return [
            job
            for job in self.jobs
            if job.status == "running" and job.step > 0 and not self._checkpoint(job, job.step).exists()
        ]

    def _checkpoint(self, job: Job, step: int) -> Path:
        return self.output_dir / job.name / f"checkpoint-{step}"

    def _rescue(self) -> str:
        """After a job's checkpoint could not be written: save what can be saved, and say of each job what there is."""
        for job in self._unsaved():
            job.discard()
            with contextlib.suppress(WriteError):
                self._save(job)
        kept = []
        for job in self.jobs:
            saved = max((step for step in range(1, job.step + 1) if self._checkpoint(job, step).exists()), default=0)
            ended = job.status != "running" and (self.output_dir / job.name / checkpoint.STATE).exists()
            kept.append(f"{job.name}: {'its adapter' if ended else f'step {saved} of {job.step}'}")
        return ", ".join(kept)

    def _write_record(self) -> None:
        self.record["plans"] = self.executor.plans()
        self._write_log("run.json", lambda: write_json(self.output_dir / "run.json", self.record))

    def _write_report(self) -> None:
        self._write_log("report.html", lambda: write_report(self.output_dir))

    def _write_log(self, name: str, write: Callable[[], object]) -> None:
        """Write a file that training does not depend on."""
        try:
            write()
            self.incomplete.pop(name, None)
        except Exception as error:  # a defect of the report's own, too, must not cost the run
            self._incomplete(name, error)

    def _incomplete(self, name: str, error: Exception) -> None:
        """A log lacks something from now on; said once."""
        if name not in self.incomplete:
            self.incomplete[name] = reason = unwritten(error) or f"{type(error).__name__}: {error}"
            self._warn(f"{name} is incomplete: {reason}; training goes on")

    def _warn(self, text: str) -> None:
        self.record["warnings"].append(text)
        self.progress.message(f"note: {text}")

    @torch.no_grad()
    def _evaluate(self, jobs: Sequence[Job]) -> None:
        """Held-out loss of the jobs, without dropout, each in microbatches of its own: which others are due at the same time
        changes no bit of it.

        After its last step a job without held-out samples is tried on its last global batch instead: no later step would
        notice that the last one ruined it. That loss is not reported.
        """
        if not jobs:
            return
        samples = {job.name: job.eval_samples or job.data.last_batch() for job in jobs}
        total = None
        while total is None:
            total = self._held_out_losses(samples)
            if self.stop is not None:
                return
        for job in jobs:
            loss = float(total[job.adapter.number]) / sum(sample.num_labels for sample in samples[job.name])
            self.evals[job.name, job.step] = loss
            if job.eval_samples:
                elapsed = self.elapsed_before + time.perf_counter() - self.start
                finite = loss if math.isfinite(loss) else None
                job.log_history.append({"step": job.step, "epoch": job.epoch, "eval_loss": finite, "elapsed": elapsed})
                self.eval_lines.write(job=job.name, step=job.step, eval_loss=loss)
                self.progress.evaluated(job, loss)
            if not math.isfinite(loss) and job.step > 0:
                job.fail(f"held-out loss {loss:g}", revert=True)
                self._failed(job)

    def _held_out_losses(self, samples: dict[str, list[Sample]]) -> np.ndarray | None:
        """Sum of the label tokens' losses by job, or None: out of memory, to be tried again with a lower budget."""
        orders = [
            SampleOrder(name, np.array([sample.num_tokens for sample in own]), len(own), 0, 1, shuffle=False)
            for name, own in samples.items()
        ]
        total = np.zeros(len(self.jobs))
        budget = min(self.budget, self.held_out_budget)
        planners = [Planner([order], budget, method="greedy") for order in orders]
        for microbatch in (microbatch for planner in planners for microbatch in planner.window(0).microbatches):
            if self.stop is not None:
                break
            packed = [
                PackedSample(self.by_name[placed.job].adapter.number, samples[placed.job][placed.sample], 0, 0, None)
                for placed in microbatch.samples
            ]
            ran = None
            try:
                ran = self.executor.evaluate(packed, len(self.jobs))
            except torch.OutOfMemoryError as error:
                self._check_lower(microbatch.num_tokens, error)
            if ran is None:
                free_memory(self.base.device)
                self.held_out_budget = self._lower(microbatch.num_tokens)
                return None
            total += ran.sums.cpu().numpy()
        return total

    # --- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> Result:
        self.folder.check()
        for lines in self.logs:
            lines.close()
        seconds = time.perf_counter() - self.start
        left_out = self._left_out()
        fates = [job.status for job in self.jobs] + [job.status for job in left_out.values()]
        status = "done" if set(fates) == {"done"} else "failed"
        result = Result(
            "interrupted" if self._runs() else status, seconds, self.tokens, self.output_dir, self.output_dir / "report.html",
            signal=self.stop, incomplete=self.incomplete,
        )  # fmt: skip
        for job in self.jobs:
            known = {
                step: loss
                for (name, step), loss in self.evals.items()
                if name == job.name
                and step <= job.step
                and job.eval_samples
                and loss is not None
                and math.isfinite(loss)
            }
            after = max(known, default=0)
            result.jobs[job.name] = JobResult(
                job.status, job.step, self.output_dir / job.name, job.failure, known.get(0), known[after] if after else None,
                self.progress.average_rate(job),
            )  # fmt: skip
        ends = result.jobs | left_out
        result.jobs = {job.name: ends[job.name] for job in self.run.jobs}
        tokens = sum(job.tokens_seen for job in self.jobs)
        self.record["result"] = {
            "status": result.status,
            "seconds": self.elapsed_before + seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / (self.elapsed_before + seconds),
            "peak_memory_bytes": peak_memory(self.base.device),
            "jobs": {
                name: {
                    "status": job.status, "step": job.step, "failure": job.failure,
                    "eval_before": job.eval_before, "eval_after": job.eval_after,
                }
                for name, job in result.jobs.items()
            },
        }  # fmt: skip
        self._write_record()
        self._write_report()
        return result

    def _left_out(self) -> dict[str, JobResult]:
        """How the jobs stand whose data is gone."""
        out = {}
        for name, why in self.prepared.left_out.items():
            folder = self.output_dir / name
            status, step, failure = checkpoint.fate(folder, name, self.record["id"])
            if status == "done" and step < self.record["jobs"][name]["steps"]:
                status = "stopped"
            out[name] = JobResult(status, step, folder, why if status == "stopped" else failure)
        return out

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM, Ctrl-C and SIGHUP (the terminal is closed) ask to stop after the present microbatch. SIGTERM or Ctrl-C once
        more stops at once. SIGHUP does not: a shell that ends passes on what the kernel has sent already.
        """

        def ask(number: int, frame: types.FrameType | None) -> None:
            if self.stop is not None:
                if number != signal.SIGHUP and self.stop != signal.SIGHUP:
                    raise KeyboardInterrupt
                self.stop = number if self.stop == signal.SIGHUP else self.stop
                return
            self.stop = number
            name = signal.Signals(number).name
            with contextlib.suppress(RuntimeError):  # it came in the middle of another message
                self.progress.message(
                    f"{name}: finishing the present microbatch, then saving; once more stops without saving"
                )

        before = {}
        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                    before[number] = signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
