"""Changes of a run's members between two windows: requests of packlora add, stop and clone, and a sweep."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from packlora.adapters.files import save_adapter
from packlora.changes import SHOWN, Changed, Changes
from packlora.config import BASE, JobConfig
from packlora.engine.memory import TokenBudget, free_memory, synchronize
from packlora.engine.passes import insist
from packlora.errors import InputError, WriteError, plural, quoted, refusing
from packlora.events import Note
from packlora.files import make_folders, write_folder
from packlora.report.metrics import BestEffort
from packlora.result import JobResult
from packlora.run_file import changed_job, parse_jobs
from packlora.runtime.job import Job
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.windows import window_of
from packlora.sweep.candidates import Sweep
from packlora.sweep.changes import START, Change, off
from packlora.sweep.control import Add, Asked, Clone, Control, StopJob, asked_from
from packlora.sweep.members import Members, named


class OpenMembers(Members, Changes):
    """Members that change as is asked for (packlora/changes.py, Changes). Arguments as of Members."""

    def __init__(self, changes: Sequence[Change], **parts: Any) -> None:
        super().__init__(changes, **parts)
        self.control = Control(self.output_dir)
        self.sweep: Sweep | None = None
        self._too_many: int | None = None
        """Number of jobs on the model beside which a candidate found no memory last."""
        if self.run.sweep is not None:
            self.sweep = Sweep(self.run)
            self.sweep.follow(changes)
            self.sweep.read(self.output_dir, list(self.prepared.left_out))

    def first(self, jobs: Sequence[Job]) -> int | None:
        """The round that a sweep has yet to decide for: where it was broken off between the last step of a window and what is
        decided after it."""
        going = {job.joined + job.step for job in jobs if job.status == "running"}
        if self.sweep is None or len(going) != 1:
            return None
        (round_,) = going
        return round_ if 0 < round_ == window_of(self.run, round_).start else None

    def pending(self, round_: int, jobs: Sequence[Job]) -> bool:
        """Whether something is asked for, as the first process finds it, a sweep has to decide, or jobs are to be taken off."""
        return self.sweep is not None or self._is_asked() or bool(off(jobs, round_))

    def _is_asked(self) -> bool:
        return bool(self.group.told(self.group.leads and bool(self.control.asked())))

    def _asked(self) -> list[Asked]:
        """Requests to the first process, as all processes hear of them."""
        found = self.control.asked() if self.group.leads else []
        return [asked_from(tree) for tree in self.group.told([asked.to_json() for asked in found])]

    def _answer(self, asked: Asked, accepted: bool, text: str) -> None:
        if self.group.leads:
            self.control.answer(asked.id, accepted, text)

    def change(self, given: int, jobs: list[Job], budget: TokenBudget) -> Changed | None:
        """Make the changes that are asked for, see Changes."""
        out, there = Changed(), {job.name: job for job in jobs}
        if self.changes and not any(job.status == "running" for job in jobs):
            last = max(change.round for change in self.changes)  # perhaps of jobs that are off the model
            given = max(given, window_of(self.run, max(last - 1, 0)).stop)
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
            insist(self.executor, partial(self.follow, jobs))
        return out if out.left or out.told or off(jobs, given) else None

    def take_off(self, jobs: list[Job], given: int) -> list[Job]:
        gone = super().take_off(jobs, given)
        if self.sweep is not None:
            for job in gone:
                self.sweep.see(job)
        return gone

    def end(self, jobs: Sequence[Job], files: BestEffort) -> None:
        """See Changes."""
        if self.sweep is not None:
            for job in jobs:
                self.sweep.see(job)
            sweep = self.sweep
            if self.group.leads:
                files.write(SHOWN, lambda: sweep.write(self.output_dir))
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
        """Candidates leave, and others join, as the sweep decides. What was decided for a round is not decided again, when the
        rounds behind it were decided for. A candidate that finds no memory joins when fewer jobs are on the model."""
        sweep.follow(self.changes)
        if any(change.by == "sweep" and change.round > given for change in self.changes):
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
        if self._too_many is not None and len(there) >= self._too_many and _will_leave(there.values()):
            drawn = []
        try:
            items = self.check([config for config, _ in drawn], there, budget)
        except InputError as error:
            drawn, sweep.is_closed = [], True
            out.told.append(Note(f"the sweep has no more candidates: {error}"))
        parameters = {config.name: own for config, own in drawn}
        made, lack = list[Job](), ""
        try:
            self.attach(items, there, made)
        except MemoryError as error:
            if self.group.processes > 1 or not (made or left or _will_leave(there.values())):
                raise
            lack = str(error)
        items = items[: len(made)]
        out.told += self.join(items, made, given, there, budget, "sweep", parameters=parameters, leaving=changes)
        sweep.follow(self.changes)
        if lack:
            self._too_many = len(there)
            out.told.append(Note(f"the next candidate waits until another job has left: {lack}"))

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
            self.attach_asked(items, there, made)
            out.told += self.join(items, made, given, there, budget, "request", asked.id)
        steps = ", ".join(plural(job.data.num_steps, "optimizer step") for job in made)
        return f"{named(configs)} joined at round {given}, for {steps}"

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
        self.mesh.together(lambda: self.check_names(configs))
        folders = [self.output_dir / config.name for config in configs if self.group.leads]
        try:
            self.mesh.together(lambda: refusing(named(configs), lambda: make_folders(folders)))
            yield
        except (InputError, WriteError):
            self.detach(made)
            free_memory(self.base.device)
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _running(self, name: str, there: Mapping[str, Job]) -> Job:
        self._refuse_template(name)
        job = there.get(name)
        if job is None or job.status != "running":
            running = ", ".join(own.name for own in there.values() if own.status == "running") or "none"
            known = name in {own.name for own in self.run.jobs}
            raise InputError(
                f"{'job' if known else 'there is no job'} {quoted(name)}{' has ended' * known}; running: {running}"
            )
        return job

    def _refuse_template(self, name: str) -> None:
        """Raises InputError for the job that a sweep makes candidates from, which has no adapter itself."""
        if self.sweep is not None and name == self.sweep.template.name:
            raise InputError(
                f"job {name!r} is not trained itself; its candidates are: {', '.join(self.sweep.trials) or 'none'}"
            )

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
            self._refuse_template(request.job)
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

        self.mesh.together(lambda: refusing(f"the adapter of {request.job!r} cannot be written to {folder}", write))


def _will_leave(jobs: Iterable[Job]) -> bool:
    """Whether some of these jobs still train, or are to be taken off the model."""
    return any(job.status == "running" or job.left is not None for job in jobs)
