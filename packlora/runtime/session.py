"""Work of a run between its run file and its training loop, on every process of it: checks, model, adapters, checkpoints.

One process does all of it. Of several, each prepares the same, agrees with the others on who trains what, and trains its own
jobs; the first one owns the output folder's logs, run.json and what is shown.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from packlora.base.device import choose_device, usual_dtype
from packlora.base.model import Base
from packlora.changes import Changes, job_set, plugin
from packlora.config import Run
from packlora.data.reader import Reader
from packlora.engine.memory import T, free_memory
from packlora.engine.passes import Executor, Passes, one_error_for_memory
from packlora.events import Note, Subscriber
from packlora.files import content_of, remove_leftovers
from packlora.parallel.alone import OneProcess
from packlora.report.metrics import SAMPLES, Logs, read_lines
from packlora.report.progress import Progress
from packlora.report.report import ReportPage
from packlora.result import Result
from packlora.runtime import profiler
from packlora.runtime.attach import attach_jobs
from packlora.runtime.events import Emitter
from packlora.runtime.folder import OutputFolder, Standing
from packlora.runtime.job import Job
from packlora.runtime.placement import Placement
from packlora.runtime.prepare import prepare
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import FITTED, Profile
from packlora.runtime.record import (
    RunRecord,
    described_job,
    earlier_warnings,
    left_out_results,
    run_record,
    versions,
    write_record,
)
from packlora.runtime.trainer import Trainer
from packlora.runtime.windows import slowest, window_of
from packlora.terminal import Activity, Told, in_notebook, silent

if TYPE_CHECKING:
    from packlora.runtime.resume import SavedRun


class Session:
    """One call of packlora.train, on one of its processes; its output folder is made, and held.

    Args:
        run: the same on every process. mesh: the processes.
        resume_from: words of --from.
        reader: of the rows.
    """

    def __init__(
        self, run: Run, mesh: OneProcess, resume: bool, max_steps: int | None, resume_from: list[str], reader: Reader
    ) -> None:
        self.run, self.mesh, self.resume, self.max_steps, self.resume_from = run, mesh, resume, max_steps, resume_from
        self.executor: Executor | None = None
        self.reader = reader
        self.output_dir = Path(run.output_dir)
        self.logged = 0
        """Microbatches that earlier sessions have logged."""

    def must_be_the_same(self) -> dict[str, str]:
        """Properties that all processes must have alike, by name."""
        text = self.run.model_dump_json() + repr((self.resume, self.max_steps, self.resume_from))
        device = "cpu" if self.run.device == "cpu" or not torch.cuda.is_available() else "cuda"
        return {"run file and arguments": hashlib.sha256(text.encode()).hexdigest()[:12], "device": device} | versions()

    def train(self, subscribers: Sequence[Subscriber]) -> Result:
        """Train the jobs of this process by Trainer.fit. On the first process the subscribers hear of all jobs.

        Returns:
            How the whole run ended, on every process.
        """
        trainer = self.set_up()
        return self.placement.train(
            trainer, self.logged, lambda events: self._listening(events, subscribers), self._sample
        )

    def release(self) -> None:
        """Nothing is trained any more: free what the executor keeps."""
        if self.executor is not None:
            self.executor.release()

    @contextlib.contextmanager
    def _listening(self, events: Emitter, subscribers: Sequence[Subscriber]) -> Iterator[None]:
        """Let files, the terminal and subscribers hear the events of all jobs."""
        with _display() as progress:
            events.subscribe(*self.writers, progress, *subscribers)
            yield

    def set_up(self) -> Trainer | None:
        """Everything before the first step; run.json is the first thing that is written. None for a process without jobs."""
        mesh = self.mesh
        # 1. Check everything that can be wrong, and agree on who trains what.
        self.run = run = _of_one_dtype(self.run, mesh)
        if mesh.size > 1:
            import_module("packlora.runtime.alike").check_folder(Path(run.output_dir), mesh)
        self.saved = mesh.together(lambda: _saved(run, self.resume))
        if self.saved is not None:
            run = run.with_chosen(self.saved.fit.keys(run))
        self.job_set = mesh.together(lambda: job_set(run, self.saved))
        self.run = run = self.job_set.run
        # chat templates see as now when the run began, so that they write the same date in every session
        began = datetime.now().replace(microsecond=0) if self.saved is None else self.saved.began
        self.moment = datetime.fromisoformat(mesh.gather(began.isoformat())[0])
        self.starts, prepared = mesh.together(self._prepare)
        self.run = run = prepared.run
        described = {job.config.name: described_job(job) for job in prepared.jobs}
        if mesh.size > 1:
            import_module("packlora.runtime.alike").check_jobs(described, mesh, self.saved is not None)
        known_head = prepared.head_in_layers if self.saved is None else self.saved.schedule.head_in_layers
        prepared.head_in_layers = mesh.gather(known_head)[0]
        own, group = self._share_out(prepared), self.placement.group

        # 2. Load the base model once and put the jobs' adapters on it.
        base, self.single, jobs = mesh.together(lambda: _in_memory(lambda: self._load(own), prepared, mesh))
        mesh.same({"base model": self.fingerprint.weights, "config.json of the base model": self.fingerprint.config})

        # 3. Choose the size of microbatches where that is left to us.
        known = self._choose_budget(prepared, own, base, self.single, jobs)
        events = Emitter()
        self.executor = executor = self._executor(base, jobs, prepared.budget, events)

        # 4. Continue where checkpoints say, or start.
        record = run_record(prepared, described, base, known, self.saved, self.placement.layout)
        record["model"]["fingerprint"] = self.fingerprint.model_dump()
        record["id"], record["created"] = mesh.gather([record["id"], record["created"]])[0]
        notes = self._begin(prepared, jobs, record)

        # 5. The loop, and who writes files of what it tells.
        folder = OutputFolder(self.output_dir, record["id"], run.save_total_limit, events, group)
        writer = RunRecord(self.output_dir, record, executor.plans, folder.files)
        self.writers, failed = self._writers(folder, writer) if mesh.is_first else ([], [])
        notes += failed
        left_out, tokens = left_out_results(run, prepared.left_out if mesh.is_first else {}, record)
        if not jobs:
            return None
        loop = (run, own, base, executor, jobs, known, folder, events, notes, left_out, group, self.logged)
        changes = self._changes(prepared, base, jobs, writer, events)
        flow = self.placement.flow(own, known, self.single)
        return Trainer(*loop, changes=changes, tokens_of_gone=tokens, flow=flow)

    def _share_out(self, prepared: PreparedRun) -> PreparedRun:
        """Choose which process trains which jobs. Returns what this one trains."""
        self.placement = _placement(self.run, self.mesh, prepared)
        if not self.placement.is_open:
            self.job_set.check_layout(self.placement.layout, self.mesh.size)
        return self.placement.own()

    def _executor(self, base: Base, jobs: Sequence[Job], budget: int, events: Emitter) -> Executor:
        if self.run.cuda_graphs is not True and base.device.type != "cuda":
            return self.single
        from packlora.runtime.cuda_graphs import graphed

        return graphed(self.run, base, self.single, jobs, budget, lambda text: events.emit(Note(text)))

    def _changes(
        self, prepared: PreparedRun, base: Base, jobs: list[Job], record: RunRecord, events: Emitter
    ) -> Changes:
        """Changes of the jobs while the run trains: jobs that join and leave, and completions that jobs generate."""
        changes, executor = Changes(), self.executor
        if self.placement.is_open:
            own: dict[str, Any] = {"run": self.run, "single": self.single, "mesh": self.mesh}
            own |= {"prepared": prepared, "base": base, "executor": executor, "record": record}
            changes = self.job_set.open(self.output_dir, self.placement.group, **own)
        if self.run.generates:
            rollout = import_module("packlora.rl.changes").RolloutChanges
            changes = rollout(changes, base, executor, self.single, events, jobs, self.teachers, self.run.compares)
        return changes

    def _writers(self, folder: OutputFolder, writer: RunRecord) -> tuple[list[Subscriber], list[str]]:
        """Who hears of the run on its first process, and what to tell of those that cannot."""
        out: list[Subscriber] = [Logs(self.output_dir, folder.files), writer, ReportPage(self.output_dir, folder.files)]
        if not self.placement.is_open:
            out.append(plugin("control").Refusal(self.output_dir, self.mesh.size))
        if not self.run.trackers:
            return out, []
        from packlora.report.trackers import trackers

        told, failed = trackers(self.run.trackers, self.output_dir)
        return out + told, failed

    # --- the parts -----------------------------------------------------------------------------------------------------

    def _told(self) -> contextlib.AbstractContextManager[Told]:
        return Activity() if self.mesh.is_first else contextlib.nullcontext(silent)

    def _prepare(self) -> tuple[dict[str, int], PreparedRun]:
        starts = _starts(self.run, self.resume_from, self.job_set.left)
        gone, budgets = self.job_set.gone(starts), self.job_set.budgets
        with self._told() as self.reader.told:
            more = (self.max_steps, self.saved is not None, self.reader, gone, budgets, self.moment)
            prepared = self._fitted(prepare(self.run, *more), lambda run: prepare(run, *more))
        self.reader.forget()
        if starts:
            from packlora.runtime.resume import check_sent_back

            check_sent_back(starts, prepared.left_out)
        return starts, prepared

    def _fitted(self, prepared: PreparedRun, again: Callable[[Run], PreparedRun]) -> PreparedRun:
        """The run with what `fit` chooses; what it chose in an earlier session stands."""
        run, saved, device = prepared.run, self.saved, choose_device(self.run.device)
        if saved is not None:
            prepared.fit = saved.fit.model_dump(exclude_none=True)
        if run.fit != "off" and self.mesh.size == 1 and device.type in FITTED:
            prepared = import_module("packlora.runtime.fit").settled(prepared, device, None if saved else again)
        tokens = prepared.fit.get("max_tokens_per_microbatch")
        if tokens is not None and run.leaves("max_tokens_per_microbatch"):
            prepared.budget = max(min(prepared.budget, tokens), prepared.longest)
        return prepared

    def _sample(self, trainer: Trainer) -> None:
        """Let the adapters of these jobs write texts."""
        from packlora.runtime.sampling import Sampler

        group = self.placement.sampling
        lines = read_lines(self.output_dir / SAMPLES, "job", "step")
        known = {(str(job), step) for job, step in group.told([[line["job"], line["step"]] for line in lines])}
        parts = (self.single, trainer.by_name, self.run.eval_every, trainer.events)
        trainer.events.subscribe(Sampler(*parts, known, group))

    def _load(self, own: PreparedRun) -> tuple[Base, Passes, list[Job]]:
        if (device := choose_device(self.run.device)).type == "cuda":
            free_memory(device)  # of a run that this process has ended: its model is in cycles
            if self.mesh.size == 1:
                from packlora.engine.allocator import grow_segments

                grow_segments()
        with self._told() as told:
            told(f"loading {self.run.base_model}")
            base = self.placement.load()
        assert base.fingerprint is not None
        self.fingerprint = base.fingerprint
        if self.saved is not None:
            from packlora.runtime.restoring import same_base

            same_base(base.path, self.saved.model.fingerprint, self.fingerprint)
        if self.run.generates:
            self.teachers = import_module("packlora.rl.teacher").load_teachers(own.jobs, base)
        return base, *attach_jobs(own, base, self.placement)

    def _choose_budget(
        self, prepared: PreparedRun, own: PreparedRun, base: Base, executor: Executor, jobs: list[Job]
    ) -> Profile:
        """The first process's budget goes for all."""
        known = choose_budget(self.run, own if jobs else prepared, base, executor, jobs, self.saved)
        known = self.placement.profile(known)
        found = own.budget if jobs else prepared.budget
        prepared.budget = own.budget = max(self.mesh.gather(found)[0], prepared.longest)
        return known

    def _begin(self, prepared: PreparedRun, jobs: list[Job], record: dict[str, Any]) -> list[str]:
        """Bring jobs to where they go on from; write run.json, and logs that agree with it.

        Returns:
            What to tell before training starts.
        """
        saved, starts, mesh, keep = self.saved, self.starts, self.mesh, self.run.save_total_limit
        own_notes: list[str] = []
        if saved is not None:
            from packlora.runtime import restoring
            from packlora.runtime.resume import left_out_steps

            for name in prepared.left_out:
                record["jobs"][name]["steps"] = left_out_steps(self.run, name, saved, self.max_steps)
            mesh.together(lambda: restoring.same_data(saved, record))
            restore = partial(restoring.restore_jobs, self.output_dir, jobs, saved, starts)
            own_notes = mesh.together(lambda: _in_memory(restore, prepared, mesh))
        most = prepared.budget if self.run.max_tokens_per_microbatch == "auto" else 0
        record["changes"] = self.job_set.place(jobs, most)
        going = [job for job in jobs if job.step < job.data.num_steps]  # others have nothing to be planned for
        begins = window_of(self.run, slowest(going)).start
        standing = [asdict(Standing.of(job)) for job in jobs]
        told = mesh.gather([own_notes, standing, begins] if self.placement.group.leads else [[], [], begins])
        if not mesh.is_first:
            mesh.barrier()
            return []
        record["warnings"] += [note for notes, _, _ in told for note in notes]
        record["saved"] |= starts
        if starts:  # known before anything is put aside: broken off in between, --resume alone goes on all the same
            write_record(self.output_dir, record)
        names = [job.config.name for job in prepared.jobs]
        if saved is not None:
            record["warnings"] += restoring.put_aside(self.output_dir, names, starts, record["id"], keep)
        notes: list[str] = record["warnings"]
        record["warnings"] = earlier_warnings(saved, notes) + notes
        remove_leftovers(self.output_dir)
        write_record(self.output_dir, record)
        folder = OutputFolder(self.output_dir, record["id"], None, Emitter())
        stand = {one["name"]: Standing(**one) for _, own, _ in told for one in own}
        first = min(begins for _, _, begins in told)
        self.logged = folder.rebuild_logs([stand[name] for name in names], prepared.left_out, first)
        mesh.barrier()  # nobody writes a checkpoint before what lies beyond is put aside
        return notes


def _saved(run: Run, resume: bool) -> SavedRun | None:
    """Content of the run.json of the run that is resumed; None for a fresh run. Raises InputError as check_output."""
    if not content_of(Path(run.output_dir)):
        return None
    from packlora.runtime.resume import check_output

    return check_output(run, resume)


def _in_memory(load: Callable[[], T], prepared: PreparedRun, mesh: OneProcess) -> T:
    """Return the result of `load`. Raises MemoryError, which says what would fit, where memory runs out on one device."""
    try:
        with one_error_for_memory():
            return load()
    except torch.OutOfMemoryError as error:
        said = str(error)
    raise import_module("packlora.runtime.fit").no_room(prepared, said, mesh.size)


def _display() -> Progress:
    """The display of a run: in a notebook one output that changes, else a table or lines."""
    if not in_notebook():
        return Progress()
    from packlora.report.notebook import Notebook

    return Notebook()


def _starts(run: Run, words: list[str], left: Collection[str]) -> dict[str, int]:
    """See resume.starting_steps."""
    if not words:
        return {}
    from packlora.runtime.resume import starting_steps

    return starting_steps(run, words, left)


def _placement(run: Run, mesh: OneProcess, prepared: PreparedRun) -> Placement:
    """Placement of a run on the processes that were started; all of them call it."""
    if mesh.size == 1:
        return Placement(run, mesh, prepared)
    from packlora.runtime.several import placed

    return placed(run, mesh, prepared)


def choose_budget(
    run: Run, prepared: PreparedRun, base: Base, executor: Executor, jobs: list[Job], saved: SavedRun | None
) -> Profile:
    """Profile of the model on this device; sets the budget where the run file leaves it to the profiler.

    A resumed run keeps the budget that it had. On a CPU, where a larger one brings nothing, it is the usual one.
    """
    if run.max_tokens_per_microbatch != "auto" or not base.storage.is_whole:  # no process may measure by itself
        return profiler.profile(run, prepared)
    if saved is not None and saved.config.max_tokens_per_microbatch == "auto":
        prepared.budget = max(saved.schedule.budget, prepared.longest)
        return profiler.profile(run, prepared)
    known = profiler.profile(run, prepared, base, executor, jobs)
    if base.device.type == "cuda":
        prepared.budget = profiler.choose(profiler.predictions(prepared, known)).budget
    return known


def _of_one_dtype(run: Run, mesh: OneProcess) -> Run:
    """A copy with what its dtype stands for, by the first process: others may not see the output folder yet."""
    return run.model_copy(update={"dtype": mesh.gather(mesh.together(lambda: usual_dtype(run)))[0]})
