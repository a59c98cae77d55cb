"""Changes of a run's members between two windows: requests of packlora add, stop and clone, and a sweep."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packlora.adapters.files import save_adapter
from packlora.base.model import Base
from packlora.config import BASE, JobConfig, Run
from packlora.engine.memory import TokenBudget, free_memory, synchronize
from packlora.engine.passes import Executor, SingleDevice
from packlora.errors import InputError, WriteError, quoted, refusing
from packlora.files import make_folders, write_folder
from packlora.parallel.agreement import together
from packlora.parallel.mesh import OneProcess
from packlora.parallel.replicas import Alone
from packlora.report.events import Event, Note
from packlora.report.metrics import BestEffort
from packlora.result import JobResult
from packlora.run_file import changed_job, parse_jobs
from packlora.runtime.changes import START, Change
from packlora.runtime.control import Add, Asked, Clone, Control, StopJob, asked_from
from packlora.runtime.job import Job
from packlora.runtime.members import Members, named
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.record import RunRecord

if TYPE_CHECKING:
    from packlora.engine.stage_passes import StageDevice
    from packlora.runtime.sweep import Sweep


@dataclass(slots=True)
class Changed:
    """Changes that were made between two windows."""

    left: list[Job] = field(default_factory=list)
    told: list[Event] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.left or self.told)


class OpenMembers(Members):
    """Members that change as is asked for. Arguments as of Members."""

    def __init__(
        self, run: Run, prepared: PreparedRun, base: Base, single: SingleDevice | StageDevice, executor: Executor,
        record: RunRecord, changes: Sequence[Change], output_dir: Path, group: Alone, mesh: OneProcess,
    ) -> None:  # fmt: skip
        super().__init__(run, prepared, base, single, executor, record, changes, output_dir, group, mesh)
        self.control = Control(output_dir)
        self.sweep: Sweep | None = None
        if run.sweep is not None:
            from packlora.runtime.sweep import Sweep

            self.sweep = Sweep(run)
            self.sweep.follow(changes)
            self.sweep.read(output_dir, list(prepared.left_out))

    def is_asked(self) -> bool:
        """Whether something is asked for, as the first process finds it, or a sweep has to decide."""
        return self.sweep is not None or bool(self.group.told(self.group.leads and bool(self.control.asked())))

    def _asked(self) -> list[Asked]:
        """Requests to the first process, as all processes hear of them."""
        found = self.control.asked() if self.group.leads else []
        return [asked_from(tree) for tree in self.group.told([asked.to_json() for asked in found])]

    def _answer(self, asked: Asked, accepted: bool, text: str) -> None:
        if self.group.leads:
            self.control.answer(asked.id, accepted, text)

    def change(self, given: int, jobs: list[Job], budget: TokenBudget) -> Changed:
        """Make the changes that are asked for.

        Args:
            given: the round that is next; those before it were trained.
            jobs: that are on the model; those that join are added.

        Raises:
            WriteError: what a sweep has decided cannot be recorded; it was not made. A request that cannot be met or recorded
                is refused, and costs the run nothing.
            MemoryError: there is no room for a sweep's next candidate.
        """
        out, there = Changed(), {job.name: job for job in jobs}
        before = len(there)
        if self.sweep is not None:
            self._sweep(self.sweep, given, there, budget, out)
        for asked in self._asked():
            if any(change.request == asked.id for change in self.changes):  # the run was killed before it said so
                self._answer(asked, True, "accepted before the run was interrupted")
                continue
            try:
                text = self._carry_out(asked, given, there, budget, out)
            except (InputError, WriteError) as error:
                self._answer(asked, False, str(error))
                continue
            self._answer(asked, True, text)
        if len(there) > before:
            jobs += list(there.values())[before:]
            self.follow(jobs)
        return out

    def take_off(self, jobs: list[Job], given: int) -> list[Job]:
        gone = super().take_off(jobs, given)
        if self.sweep is not None:
            for job in gone:
                self.sweep.see(job)
        return gone

    def end(self, jobs: Sequence[Job], files: BestEffort) -> None:
        """The session ends, with these jobs on the model."""
        if self.sweep is not None:
            for job in jobs:
                self.sweep.see(job)
            sweep = self.sweep
            if self.group.leads:
                from packlora.report.metrics import SWEEP

                files.write(SWEEP, lambda: sweep.write(self.output_dir))
        if self.group.leads:
            self.control.refuse_all("the run has ended")

    def judged(self, ends: Mapping[str, JobResult]) -> Mapping[str, JobResult]:
        """Select the results by which a run is done or has failed. Candidates that fail are no failure of a sweep, if another
        is done."""
        tried = self.sweep.trials.keys() if self.sweep is not None else set()
        if not any(ends[name].status == "done" for name in tried & ends.keys()):
            return ends
        return {name: end for name, end in ends.items() if name not in tried or end.status == "done"}

    # --- a sweep ---------------------------------------------------------------------------------------------------------

    def _sweep(self, sweep: Sweep, given: int, there: dict[str, Job], budget: TokenBudget, out: Changed) -> None:
        """Candidates leave, and others join, as the sweep decides. What was decided for a round is not decided again."""
        sweep.follow(self.changes)
        if any(change.by == "sweep" and change.round >= given for change in self.changes):
            return
        for job in there.values():
            sweep.see(job)
        decided = sweep.decide(given)
        left = [(there[name], reason) for name, reason in decided.items()]
        changes = self.leaving(left, given, "sweep")
        for job, reason in left:
            out.left.append(job)
            if reason:
                steps = f"step {job.step} of {job.data.configured_steps}"
                out.told.append(Note(f"job {job.name!r} ends at {steps}: {reason}"))
        sweep.follow(changes)
        drawn, items = sweep.successors(), list[PreparedJob]()
        try:
            items = self.check([config for config, _ in drawn], there, budget)
        except InputError as error:
            drawn, sweep.is_closed = [], True
            out.told.append(Note(f"the sweep has no more candidates: {error}"))
        parameters = {config.name: own for config, own in drawn}
        made: list[Job] = []
        self.attach(items, there, made)
        out.told += self.join(items, made, given, there, budget, "sweep", parameters=parameters, leaving=changes)
        sweep.follow(self.changes)

    # --- requests --------------------------------------------------------------------------------------------------------

    def _carry_out(self, asked: Asked, given: int, there: dict[str, Job], budget: TokenBudget, out: Changed) -> str:
        """Returns the answer. Raises InputError or WriteError where it is refused."""
        request = asked.request
        if isinstance(request, str):
            raise InputError(request)
        if isinstance(request, StopJob):
            job = self._running(request.job, there)
            if job.step == 0:
                raise InputError(f"job {job.name!r} has not taken a step yet, so it has no adapter to end with")
            self.leave([(job, "packlora stop")], given, "request", asked.id)
            out.left.append(job)
            steps = f"step {job.step} of {job.data.configured_steps}"
            out.told.append(Note(f"job {job.name!r} ends at {steps}, as asked by packlora stop"))
            return f"job {job.name!r} ends at step {job.step}; its adapter is saved to {self.output_dir / job.name}"
        configs = self._asked_for(request, there)
        made: list[Job] = []
        with self._folders(configs, made):
            if isinstance(request, Clone) and request.weights:
                self._write_start(request, there)
            items = self.check(configs, there, budget)
            together(self.mesh, lambda: refusing(named(configs), lambda: self.attach(items, there, made)))
            out.told += self.join(items, made, given, there, budget, "request", asked.id)
        steps = ", ".join(str(job.data.num_steps) for job in made)
        return f"{named(configs)} joined at round {given}, for {steps} optimizer steps"

    def _asked_for(self, request: Add | Clone, there: Mapping[str, Job]) -> list[JobConfig]:
        """The jobs that are to join."""
        if isinstance(request, Add):
            configs = parse_jobs(request.jobs, "the request")
        else:
            configs = [self._clone(request, there)]
        if self.sweep is not None:
            self.sweep.refuse_names(config.name for config in configs)
        return configs

    @contextlib.contextmanager
    def _folders(self, configs: Sequence[JobConfig], made: Sequence[Job]) -> Iterator[None]:
        """The folders of jobs that are to join, which go again where they do not, and so do those of `made` from the model."""
        together(self.mesh, lambda: self.check_names(configs))
        folders = [self.output_dir / config.name for config in configs if self.group.leads]
        try:
            together(self.mesh, lambda: refusing(named(configs), lambda: make_folders(folders)))
            yield
        except (InputError, WriteError):
            self.detach(made)
            free_memory(self.base.device)
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _running(self, name: str, there: Mapping[str, Job]) -> Job:
        job = there.get(name)
        if job is None or job.status != "running":
            running = ", ".join(own.name for own in there.values() if own.status == "running") or "none"
            known = name in {own.name for own in self.run.jobs}
            raise InputError(
                f"{'job' if known else 'there is no job'} {quoted(name)}{' has ended' * known}; running: {running}"
            )
        return job

    def _clone(self, request: Clone, there: Mapping[str, Job]) -> JobConfig:
        source = next((job for job in self.run.jobs if job.name == request.job), None)
        if source is None:
            raise InputError(
                f"there is no job {quoted(request.job)}; there are {', '.join(job.name for job in self.run.jobs)}"
            )
        tree = source.model_dump(mode="json", exclude_unset=True)
        tree["name"] = request.name
        if tree.get("seed") is None:
            tree["seed"] = self.run.seed_of(source)
        if request.weights:
            if request.job not in there:
                raise InputError(
                    f"job {request.job!r} has left the model; begin with the adapter in its folder by adapter.init_from"
                )
            tree["adapter"] = self._from_weights(request, source, there[request.job])
        config = changed_job(tree, request.overrides)
        if request.weights and source.has_reference and config.has_reference and config.train.reference is None:
            config.train.reference = source.reference_adapter or BASE  # not what it begins with
        if config.name != request.name:
            raise InputError(f"--set name={config.name}: the new job is called {request.name!r}; leave that out")
        return config

    def _from_weights(self, request: Clone, source: JobConfig, job: Job) -> dict[str, Any]:
        """The adapter of a clone: what its folder says, but for dropout, which PEFT's files of experts have not."""
        return {
            "init_from": str((self.output_dir / request.name / START).absolute()),
            "lora_dropout": job.adapter.spec.peft.lora_dropout, "dora_dropout": source.adapter.dora_dropout,
        }  # fmt: skip

    def _write_start(self, request: Clone, there: Mapping[str, Job]) -> None:
        """The present adapter of a job, as another one's beginning."""
        job, folder = there[request.job], self.output_dir / request.name / START

        def write() -> None:
            whole = job.state.whole_of(job.adapter.flat)
            synchronize(self.base.device)
            if self.group.leads:
                write_folder(folder, lambda out: save_adapter(out, job.adapter, whole))

        together(self.mesh, lambda: refusing(f"the adapter of {request.job!r} cannot be written to {folder}", write))
