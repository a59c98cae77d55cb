"""A run's output folder while it trains: that it stays where it is, what jobs write there, and its logs after an interruption.

What a checkpoint and an adapter hold is checkpoint.py's; run.json is record.py's, lines of logs are report/metrics.py's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from packlora.engine.memory import launched
from packlora.errors import InputError, WriteError, unwritten
from packlora.events import CheckpointBegins, CheckpointSaved, Note
from packlora.files import TEMPORARY, KeptFolder, leftovers, remove_leftovers
from packlora.parallel.alone import ALONE, Alone
from packlora.report.metrics import (
    EVALS,
    METRICS,
    MICROBATCHES,
    SAMPLES,
    WINDOWS,
    BestEffort,
    eval_lines,
    keep_lines,
    metric_lines,
    read_lines,
    write_lines,
)
from packlora.runtime import checkpoint
from packlora.runtime.events import Emitter
from packlora.runtime.job import Job

T = TypeVar("T")
WRITERS = 4
"""So many checkpoints may be on their way at a time, each of another job."""


def make_output(folder: Path) -> None:
    """Make the output folder, and sure that it can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{TEMPORARY}probe-{os.getpid()}"
        probe.unlink(missing_ok=True)
        probe.touch(exist_ok=False)  # nor does it follow a link
        probe.unlink(missing_ok=True)  # a run that holds the folder may have tidied up
    except OSError as error:
        raise InputError(f"output_dir {folder}: cannot write there: {error}") from None


@contextlib.contextmanager
def unmake_folder(folder: Path) -> Iterator[None]:
    """Leave no trace of a failure: an output folder that was made for this run goes again if nothing was written to it."""
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        yield
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


@dataclass(slots=True)
class Standing:
    """How a job stands when a session begins: what the logs must agree with.

    lost: step up to which its log history could not be read; what the logs say of these steps stays.
    """

    name: str
    status: str
    step: int
    num_steps: int
    log_history: list[dict[str, Any]]
    logging_steps: int
    lost: int

    @staticmethod
    def of(job: Job) -> Standing:
        return Standing(
            job.name, job.status, job.step, job.data.num_steps, job.log_history, job.logging_steps, job.pieces.lost
        )

    def is_due(self, batch: int) -> bool:
        """See Job.is_due."""
        return self.status != "failed" and self.step <= batch < self.num_steps


class OutputFolder:
    """The folder of a run in progress.

    Args:
        run: the run's id.
        keep: so many of the newest checkpoints of each job; None keeps all.
        events: hear of checkpoints.
        group: trains the jobs. Its first process writes their files; all of its replica have slices of what is written, so they
            make the same calls.
    """

    def __init__(self, path: Path, run: str, keep: int | None, events: Emitter, group: Alone = ALONE) -> None:
        self.path, self.run, self.keep, self.events, self.group = path, run, keep, events, group
        self.files = BestEffort(lambda text: events.emit(Note(text)))
        self._kept = KeptFolder(path)
        self._writer = concurrent.futures.ThreadPoolExecutor(WRITERS, "checkpoints")
        self._writing: dict[str, concurrent.futures.Future[tuple[int, Path]]] = {}
        """Checkpoints by job that were not told of, its step and folder; the oldest first."""
        self._alone = threading.Lock()
        self._untidy: set[str] = set()
        """Jobs with files that could not be removed, as was told."""

    def close(self) -> None:
        """End the threads that write, when what they have begun is written."""
        self._writer.shutdown(wait=True, cancel_futures=True)

    def check(self) -> None:
        """Tell of checkpoints that are on the disk by now.

        Raises:
            FileNotFoundError: the folder was deleted, moved away or replaced by another.
            WriteError: a checkpoint could not be written.
        """
        self._kept.check()
        for job in [name for name, writing in self._writing.items() if writing.done()]:
            self._tell(job)

    def finish(self, job: Job | None = None) -> None:
        """Wait until a job's checkpoint is on the disk, or those of all. Raises as check."""
        for name in list(self._writing) if job is None else [job.name]:
            self._tell(name)

    def _tell(self, job: str) -> None:
        """Tell of a job's checkpoint, when it is on the disk."""
        if (writing := self._writing.pop(job, None)) is not None:
            try:
                written = writing.result()
            finally:  # a folder that is gone is the better reason
                self._kept.check()
            self.events.emit(CheckpointSaved(job, *written))
            if self.keep is not None and leftovers(self.path / job, checkpoint.PREFIX):
                self._tidy(job)

    def _tidy(self, job: str) -> None:
        """Try again to remove what is not needed any more. Tell once that it cannot be."""
        note = checkpoint.tidy(self.path / job, job, self.run, self.keep) if self.keep is not None else None
        if note is not None and job not in self._untidy:
            self._untidy.add(job)
            self.events.emit(Note(note))

    def of(self, job: Job) -> Path:
        return self.path / job.name

    def save_checkpoint(self, job: Job) -> None:
        """A checkpoint of the job's present step, which is written while training goes on; what the logs hold up to it is on
        the disk before it is there. The job's checkpoint before is waited for, and that of another job where WRITERS are on
        their way, so no more copies of jobs are in memory.

        Raises:
            FileNotFoundError, WriteError: as check.
        """
        if not self.group.saves:
            return
        if self.group.leads:
            self._kept.check()
            self.finish(job)
            while len(self._writing) >= WRITERS:
                self._tell(next(iter(self._writing)))
            self.events.emit(CheckpointBegins(job.name, job.step))
        snapshot = checkpoint.Snapshot.of(job)
        if not self.group.leads:
            job.pieces.lines = len(job.log_history)  # which the first process writes
            return

        def write(folder: Path) -> tuple[int, Path]:
            return snapshot.step, checkpoint.save_checkpoint(folder, job, snapshot, self.run, self.keep)

        self._writing[job.name] = self._writer.submit(self._write, job, snapshot.step, write)

    def save_unsaved(self, jobs: Sequence[Job]) -> None:
        """Checkpoints of those running jobs whose present step is in none; all that are being written are on the disk then.
        Raises as check."""
        self.check()
        self.finish()
        if not jobs:
            return
        unsaved = self.group.told([job.name for job in self._unsaved(jobs)])  # the others may not see it yet
        for job in jobs:
            if job.name in unsaved:
                job.discard()
                self.save_checkpoint(job)
        self.finish()

    def rescue(self, jobs: Sequence[Job]) -> str:
        """Whatever ends the run: save what this process can save by itself, so nothing of which others have slices. Returns
        what there is of each job, in words."""
        self._finish_what_can()
        for job in self._unsaved(jobs) if self.group.model is None else ():
            if job.state.is_stepping:
                continue
            with contextlib.suppress(Exception):  # whatever ended the run, the device's own failure too
                job.discard()
                self.save_checkpoint(job)
        self._finish_what_can()
        out = []
        for job in jobs:
            saved = max((step for step in checkpoint.steps(self.of(job)) if step <= job.step), default=0)
            ended = job.status != "running" and (self.of(job) / checkpoint.STATE).exists()
            out.append(f"{job.name}: {'its adapter' if ended else f'step {saved} of {job.step}'}")
        return ", ".join(out)

    def _finish_what_can(self) -> None:
        for job in list(self._writing):
            with contextlib.suppress(Exception):
                self._tell(job)

    def save_result(self, job: Job) -> None:
        """The adapter of a job that has ended, behind its last checkpoint.

        Raises:
            WriteError: it cannot be written; a job that was done is running again, as its checkpoint says.
            FileNotFoundError: the folder is gone.
        """
        if not self.group.saves:
            return
        job.state.join_untrained()
        whole, wait = job.state.whole_of(job.adapter.flat), launched(job.adapter.flat.device)
        if not self.group.leads:
            return
        try:
            self.finish(job)
            wait()
            self._write(job, job.step, lambda folder: checkpoint.save_result(folder, job, whole, self.run))
            self._tidy(job.name)
        except WriteError:
            if job.status == "done":
                job.status = "running"
            raise

    def _write(self, job: Job, step: int, write: Callable[[Path], T]) -> T:
        """Try a failed write once more, without the leftovers that take up space and while nothing else is tried again."""
        folder = self.of(job)
        self._kept.check()
        try:
            return write(folder)
        except (OSError, SafetensorError):
            with self._alone:
                self._kept.check()
                try:
                    remove_leftovers(folder)
                    return write(folder)
                except (OSError, SafetensorError) as error:
                    raise WriteError(
                        f"job {job.name!r}: step {step} cannot be written to {folder}: {unwritten(error) or error}"
                    ) from error

    def _unsaved(self, jobs: Sequence[Job]) -> list[Job]:
        return [
            job
            for job in jobs
            if job.status == "running" and job.step > 0 and not self._checkpoint(job, job.step).exists()
        ]

    def _checkpoint(self, job: Job, step: int) -> Path:
        return self.of(job) / f"checkpoint-{step}"

    # --- logs ----------------------------------------------------------------------------------------------------------

    def rebuild_logs(self, jobs: Sequence[Standing], left_out: Mapping[str, str], first_round: int) -> int:
        """Make the logs hold what the jobs' states say, whatever a crash has left of them.

        Args:
            left_out: jobs that are not trained now; their lines stay, and so do those of jobs that have failed.
            first_round: of the first window that is planned again.

        Returns:
            The microbatches that are logged.
        """
        histories, every = {job.name: job.log_history for job in jobs}, {job.name: job.logging_steps for job in jobs}
        failed = [job.name for job in jobs if job.status == "failed"]  # the step that was undone tells why
        upto = {job.name: job.lost for job in jobs if job.lost} | dict.fromkeys([*left_out, *failed], math.inf)
        self._rebuild(METRICS, metric_lines(histories, every), upto)
        self._rebuild(EVALS, eval_lines(histories), upto)
        keep_lines(self.path / WINDOWS, lambda line: line["window"] < first_round)
        by_name = {job.name: job for job in jobs}

        def is_kept(line: dict[str, Any]) -> bool:
            own = [(by_name[name], batch) for name, batch in line["batches"].items() if name in by_name]
            return line["index"] >= 0 and not any(job.is_due(batch) for job, batch in own)

        def is_of_a_step(line: dict[str, Any]) -> bool:
            own = by_name.get(line["job"])
            return type(line["step"]) is int and (own is None or line["step"] <= own.step)

        keep_lines(self.path / SAMPLES, is_of_a_step)
        lines = keep_lines(self.path / MICROBATCHES, is_kept)
        return max((line["index"] + 1 for line in lines), default=0)

    def _rebuild(self, name: str, lines: list[dict[str, Any]], upto: Mapping[str, float]) -> None:
        """upto: by job, the step up to which what the file says of it stays."""

        known = {(line["job"], line["step"]) for line in lines}

        def stays(line: dict[str, Any]) -> bool:
            job, step = str(line["job"]), line["step"]
            return type(step) is int and step <= upto.get(job, -1) and (job, step) not in known

        path = self.path / name
        others = [line for line in read_lines(path, "job", "step") if stays(line)]
        if others or lines or path.exists():
            write_lines(path, [*others, *lines])
