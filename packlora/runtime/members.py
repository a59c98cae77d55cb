"""Who takes part in a run: jobs join and leave between two windows of microbatches.

A change is recorded in run.json before it is made, so a run that is killed at any moment goes on with the same jobs in the same
rounds. A job that joins is checked as those of the run file are, before anything of the run is changed for it. One that leaves
ends with its adapter saved; then its adapter is taken off the model, and the memory is free.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packlora.adapters.attach import Adapter, attach_one, detach_one
from packlora.adapters.files import load_adapter, save_adapter
from packlora.adapters.kept_outputs import keep_outputs
from packlora.base.model import Base
from packlora.config import JobConfig, Run
from packlora.errors import InputError, WriteError, unwritten
from packlora.files import make_folder, write_folder
from packlora.plans.ask import Ask
from packlora.plans.cache import PlanCache
from packlora.plans.select import PlanChooser
from packlora.report.events import Event, JobJoined, Note
from packlora.run_file import changed_job, parse_jobs
from packlora.runtime.changes import Change, joined_rounds, leaves, with_jobs
from packlora.runtime.control import Add, Asked, Clone, Control, StopJob
from packlora.runtime.graphs import GraphedDevice, buffers_of, why_no_graphs
from packlora.runtime.job import Job
from packlora.runtime.memory import TokenBudget
from packlora.runtime.microbatch import Executor, SingleDevice
from packlora.runtime.prepare import PreparedJob, PreparedRun, asks_of_more, prepare_more
from packlora.runtime.record import RunRecord, described_job

FLOAT16_SCALE = 4096.0
"""Losses are multiplied with this before a float16 backward and gradients divided after it, so that small ones survive."""
START = "start"
"""Folder in that of a job which holds the adapter that it was begun with."""


def make_job(run: Run, item: PreparedJob, adapter: Adapter) -> Job:
    """A job before its first step, its adapter on the model."""
    if item.config.adapter.init_from is not None:
        load_adapter(item.config.adapter.init_from, adapter)
    return Job(
        item.config,
        item.data,
        item.eval_encoded.samples,
        adapter,
        FLOAT16_SCALE if run.dtype == "float16" else 1.0,
    )


def place(jobs: Sequence[Job], changes: Sequence[Change]) -> None:
    """Let restored jobs stand in their rounds. One that was asked to leave ends at the step at which it was asked."""
    rounds, left = joined_rounds(changes), leaves(changes)
    for job in jobs:
        job.joined = rounds.get(job.name, 0)
        if job.name in left:
            change = left[job.name]
            job.left = change.round
            if change.reason and job.status == "running" and job.stopped is None:
                job.stop(change.reason, change.step)


@dataclass(slots=True)
class Changed:
    """What was changed between two windows."""

    left: list[Job] = field(default_factory=list)
    told: list[Event] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.left or self.told)


class Members:
    """Makes changes of a run on one process.

    Args:
        run: with all jobs, also those that have left.
        record: of the run; holds the changes.
        changes: those of earlier sessions.
        single: the executor without graphs.
        executor: the one that trains.
    """

    def __init__(
        self, run: Run, prepared: PreparedRun, base: Base, single: SingleDevice, executor: Executor, record: RunRecord,
        changes: Sequence[Change], output_dir: Path,
    ) -> None:  # fmt: skip
        self.run, self.prepared, self.base, self.single, self.executor = run, prepared, base, single, executor
        self.record, self.changes, self.output_dir = record, list(changes), output_dir
        self.control = Control(output_dir)
        self._choosers: dict[Ask, PlanChooser] = {chooser.ask: chooser for chooser in single.attached.choosers}
        self._number = 0
        """Of the adapter that is attached next."""
        self.doubts: list[str] = []
        """Of jobs that were checked last: what can be trained, but is hardly meant."""

    def change(self, given: int, jobs: list[Job], budget: TokenBudget) -> Changed:
        """Make the changes that are asked for.

        Args:
            given: the round that is next; those before it were trained.
            jobs: that are on the model; those that join are added.

        Raises:
            WriteError: a change cannot be recorded; it was not made.
        """
        out, there = Changed(), {job.name: job for job in jobs}
        before = len(there)
        for asked in self.control.asked():
            if any(change.request == asked.id for change in self.changes):  # the run was killed before it said so
                self.control.answer(asked.id, True, "accepted before the run was interrupted")
                continue
            try:
                text = self._carry_out(asked, given, there, budget, out)
            except InputError as error:
                self.control.answer(asked.id, False, str(error))
                continue
            self.control.answer(asked.id, True, text)
        if len(there) > before:
            jobs += list(there.values())[before:]
            self.follow(jobs)
        return out

    def take_off(self, jobs: list[Job], given: int) -> list[Job]:
        """Take jobs that have ended and left off the model, and out of `jobs`. Returns them."""
        gone = [job for job in jobs if job.left is not None and job.left <= given and job.status != "running"]
        for job in gone:
            jobs.remove(job)
            detach_one(self.base.model, job.adapter)
            self.prepared.jobs = [item for item in self.prepared.jobs if item.config.name != job.name]
        if gone:
            self.follow(jobs)
        return gone

    def follow(self, jobs: Sequence[Job]) -> None:
        """These are the jobs on the model now: graphs and kept outputs are made for them."""
        if self.run.keep_outputs:
            self.base.kept_outputs = keep_outputs(self.base.model)
        if isinstance(self.executor, GraphedDevice) and jobs:
            dropout = any(job.dropout_key is not None for job in jobs)
            self.executor.change(buffers_of(jobs), dropout, why_no_graphs(self.run, self.base, jobs))

    def end(self) -> None:
        """The run ends."""
        self.control.refuse_all("the run has ended")

    # --- requests --------------------------------------------------------------------------------------------------------

    def _carry_out(self, asked: Asked, given: int, there: dict[str, Job], budget: TokenBudget, out: Changed) -> str:
        """Returns the answer. Raises InputError where it is refused."""
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
        if isinstance(request, Add):
            items = self.check(parse_jobs(request.jobs, "the request"), there, budget)
        else:
            items = self._cloned(request, there, budget)
        joined, told = self.join(items, given, there, budget, "request", asked.id)
        out.told += told
        names = ", ".join(repr(job.name) for job in joined)
        steps = ", ".join(str(job.data.num_steps) for job in joined)
        return f"{'job' if len(joined) == 1 else 'jobs'} {names} joined at round {given}, for {steps} optimizer steps"

    def _running(self, name: str, there: Mapping[str, Job]) -> Job:
        job = there.get(name)
        if job is None or job.status != "running":
            running = ", ".join(own.name for own in there.values() if own.status == "running") or "none"
            known = name in {own.name for own in self.run.jobs}
            raise InputError(
                f"{'job' if known else 'there is no job'} {name!r}{' has ended' * known}; running: {running}"
            )
        return job

    def _clone(self, request: Clone) -> JobConfig:
        source = next((job for job in self.run.jobs if job.name == request.job), None)
        if source is None:
            raise InputError(
                f"there is no job {request.job!r}; there are {', '.join(job.name for job in self.run.jobs)}"
            )
        tree = source.model_dump(mode="json", exclude_unset=True)
        tree["name"] = request.name
        if tree.get("seed") is None:
            tree["seed"] = self.run.seed_of(source)
        if request.weights:  # what the adapter is, its folder says
            own = tree.get("adapter", {})
            tree["adapter"] = {key: own[key] for key in ("lora_dropout", "dora_dropout") if key in own}
            tree["adapter"]["init_from"] = str((self.output_dir / request.name / START).absolute())
        return changed_job(tree, request.overrides)

    def _cloned(self, request: Clone, there: Mapping[str, Job], budget: TokenBudget) -> list[PreparedJob]:
        config = self._clone(request)
        if not request.weights:
            return self.check([config], there, budget)
        self._check_names([config])
        if request.job not in there:
            raise InputError(
                f"job {request.job!r} has left the model; begin with the adapter in its folder by adapter.init_from"
            )
        job, folder = there[request.job], self.output_dir / request.name
        try:
            make_folder(folder)
            write_folder(folder / START, lambda out: save_adapter(out, job.adapter, job.whole_of(job.adapter.flat)))
            return self.check([config], there, budget)
        except (OSError, InputError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"the adapter of {job.name!r} cannot be written to {folder}: {unwritten(error) or error}"
            ) from None

    # --- joining and leaving ---------------------------------------------------------------------------------------------

    def check(self, configs: Sequence[JobConfig], there: Mapping[str, Job], budget: TokenBudget) -> list[PreparedJob]:
        """Jobs that are to join, checked as those of a run file. Raises InputError."""
        self._check_names(configs)
        most = (
            budget.tokens if self.run.max_tokens_per_microbatch == "auto" else int(self.run.max_tokens_per_microbatch)
        )
        items, self.doubts = prepare_more(self.prepared, list(configs), most)
        if self.run.cuda_graphs is True and isinstance(self.executor, GraphedDevice):
            for item in items:
                if len(there) + len(items) > 1 and any(
                    own.use_dora and own.dropout and own.base_dropped for own in item.spec.modules.values()
                ):
                    raise InputError(
                        f"job {item.config.name!r}: DoRA with dropout beside other jobs has no CUDA graphs, and cuda_graphs is "
                        "true; set adapter.dora_dropout: low_rank, or lora_dropout: 0"
                    )
        return items

    def _check_names(self, configs: Sequence[JobConfig]) -> None:
        with_jobs(self.run, [*self.run.jobs, *configs])
        for config in configs:
            folder = self.output_dir / config.name
            if folder.exists() and [path.name for path in folder.iterdir()] != [START]:
                raise InputError(f"job {config.name!r}: {folder} is there already; choose another name")

    def join(
        self, items: Sequence[PreparedJob], given: int, there: dict[str, Job], budget: TokenBudget, by: Any,
        request: str | None = None, parameters: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> tuple[list[Job], list[Event]]:  # fmt: skip
        """Let jobs that were checked last join in round `given`; they are put into `there`. Returns them, and what to tell.

        Raises:
            WriteError: it cannot be recorded; nothing was changed.
        """
        most = budget.tokens if self.run.max_tokens_per_microbatch == "auto" else 0
        own = {item.config.name: dict((parameters or {}).get(item.config.name, {})) for item in items}
        changes = [
            Change(round=given, by=by, join=item.config, budget=most, request=request, parameters=own[item.config.name])
            for item in items
        ]
        run = with_jobs(self.run, [*self.run.jobs, *(item.config for item in items)])
        self._write(changes, {item.config.name: described_job(item) for item in items}, run)
        self.run = run
        asks = asks_of_more(self.prepared, list(items))
        cache = PlanCache(self.base.device)
        for ask in asks.values():
            if ask not in self._choosers:
                self._choosers[ask] = PlanChooser(self.base.device, cache, ask)
        choosers = {path: self._choosers[ask] for path, ask in asks.items()}
        attached = self.single.attached
        attached.choosers = tuple(dict.fromkeys([*attached.choosers, *choosers.values()]))
        out = []
        self._number = max([self._number, *(job.adapter.number + 1 for job in there.values())])
        for item in items:
            adapter = attach_one(
                self.base.model, attached, item.config.name, self._number, item.spec, item.data.seed, choosers
            )
            self._number += 1
            job = make_job(self.run, item, adapter)
            job.joined = given
            there[job.name] = job
            out.append(job)
            self.prepared.jobs.append(item)
            samples = item.encoded.samples + item.eval_encoded.samples
            budget.take(max(sample.num_tokens for sample in samples))
        told: list[Event] = [Note(text) for text in self.doubts]
        told += [
            JobJoined(job.name, given, job.data.num_steps, job.data.tokens, job.config.model_dump(mode="json"))
            for job in out
        ]
        return out, told

    def leave(self, jobs: Sequence[tuple[Job, str]], given: int, by: Any, request: str | None = None) -> None:
        """Let jobs leave at their present step, each for a reason; one that has ended already needs none.

        Raises:
            WriteError: it cannot be recorded; nothing was changed.
        """
        changes = [
            Change(
                round=max(given, job.joined + job.step), by=by, leave=job.name, step=job.step, reason=reason, request=request
            )
            for job, reason in jobs
        ]  # fmt: skip
        self._write(changes, {}, self.run)
        place([job for job, _ in jobs], self.changes)

    def _write(self, changes: Sequence[Change], described: Mapping[str, Any], run: Run) -> None:
        try:
            self.record.amend([*self.changes, *changes], described, run)
        except OSError as error:
            raise WriteError(f"run.json cannot be written: {unwritten(error) or error}") from error
        self.changes += changes
