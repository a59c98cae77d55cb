"""Who takes part in a run: jobs join and leave between two windows of microbatches, as open_members.py decides.

A change is recorded in run.json before it is made, so a run that is killed at any moment goes on with the same jobs in the same
rounds. A job that joins is checked as those of the run file are, before anything of the run is changed for it. One that leaves
ends with its adapter saved; then its adapter is taken off the model, and the memory is free.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from packlora.adapters.attach import Adapter, attach_one, detach_one
from packlora.base.model import Base
from packlora.config import JobConfig, Run
from packlora.engine.memory import TokenBudget
from packlora.engine.passes import Executor, Passes, insist
from packlora.errors import InputError, WriteError, reason_of, refusing
from packlora.events import Event, JobJoined, Note
from packlora.files import TEMPORARY
from packlora.parallel.alone import Alone, OneProcess
from packlora.plans.ask import Ask
from packlora.plans.cache import PlanCache
from packlora.plans.select import PlanChooser
from packlora.runtime.attach import make_job
from packlora.runtime.job import Job
from packlora.runtime.keep_outputs import keep_outputs
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.record import RunRecord, described_job
from packlora.sweep.changes import START, Change, check_folders, off, place, with_jobs
from packlora.sweep.prepare import asks_of_more, prepare_more

if TYPE_CHECKING:
    from packlora.engine.graphs import GraphedDevice


Agreed = Callable[[Callable[[], Any]], Any]
"""Runs a function and returns its result, see Members.attach."""


def refusing_nothing(compute: Callable[[], Any]) -> Any:
    """Result of `compute`; what it raises ends the run."""
    return compute()


def named(configs: Sequence[JobConfig]) -> str:
    """Jobs, for a message."""
    return f"{'job' if len(configs) == 1 else 'jobs'} {', '.join(repr(job.name) for job in configs)}"


def _is_free(folder: Path) -> bool:
    """Whether a path is a folder that was made for a job which did not join, as the run was killed before."""
    start = folder / START
    try:
        return (
            not folder.is_symlink()
            and set(os.listdir(folder)) <= {START, TEMPORARY + START}
            and not start.is_symlink()
            and (start.is_dir() or not os.path.lexists(start))
        )
    except OSError:  # no folder, or one that may not be read
        return False


class Members:
    """Makes changes of a run. All processes that train its jobs make the same; the first one writes what is recorded.

    Args:
        changes: those of earlier sessions.
        run: with all jobs, also those that have left.
        record: of the run; holds the changes.
        single: the executor without graphs.
        executor: the one that trains.
        group, mesh: the processes that train the jobs, all of the run.
    """

    def __init__(
        self, changes: Sequence[Change], run: Run, prepared: PreparedRun, base: Base, single: Passes,
        executor: Executor, record: RunRecord, output_dir: Path, group: Alone, mesh: OneProcess,
    ) -> None:  # fmt: skip
        self.group, self.mesh = group, mesh
        self.run, self.prepared, self.base, self.single, self.executor = run, prepared, base, single, executor
        self.record, self.changes, self.output_dir = record, list(changes), output_dir
        self._choosers: dict[Ask, PlanChooser] = {chooser.ask: chooser for chooser in single.attached.choosers}
        self._number = 0
        """Number of the adapter that is attached next."""
        self.doubts: list[str] = []
        """Doubts about the jobs that were checked last: what can be trained, but is hardly meant."""

    def take_off(self, jobs: list[Job], given: int) -> list[Job]:
        """See Changes."""
        gone = off(jobs, given)
        for job in gone:
            jobs.remove(job)
            detach_one(self.base.model, job.adapter.number)
            self.prepared.jobs = [item for item in self.prepared.jobs if item.config.name != job.name]
        if gone:
            self.follow(jobs)
        return gone

    def follow(self, jobs: Sequence[Job]) -> None:
        """These are the jobs on the model now: graphs and kept outputs are made for them."""
        if self.run.keep_outputs:
            self.base.kept_outputs = keep_outputs(self.base.model)
        if self._has_graphs and jobs:
            from packlora.runtime.cuda_graphs import buffers_of, columns_of, route, why_no_graphs

            buffers, dropout = buffers_of([job.state for job in jobs]), any(job.dropout_key is not None for job in jobs)
            cast("GraphedDevice", self.executor).change(
                buffers, dropout, why_no_graphs(self.run, self.base, jobs), columns_of(jobs), route(jobs)
            )

    @property
    def _has_graphs(self) -> bool:
        return self.executor is not self.single

    # --- joining and leaving ---------------------------------------------------------------------------------------------

    def check(self, configs: Sequence[JobConfig], there: Mapping[str, Job], budget: TokenBudget) -> list[PreparedJob]:
        """Jobs that are to join, checked as those of a run file. Raises InputError, on all processes, whatever goes wrong."""
        items = self.mesh.together(lambda: refusing(named(configs), lambda: self._checked(configs, there, budget)))
        if self.mesh.size > 1 and items:
            from packlora.runtime.alike import check_jobs

            def described() -> dict[str, Any]:
                return {item.config.name: described_job(item) for item in items}

            check_jobs(self.mesh.together(lambda: refusing(named(configs), described)), self.mesh, False)
        return items

    def _checked(
        self, configs: Sequence[JobConfig], there: Mapping[str, Job], budget: TokenBudget
    ) -> list[PreparedJob]:
        self.check_names(configs)
        check_folders(configs, there.values(), self.run)
        for config in configs:
            if config.rollout is not None and not self.run.generates:
                raise InputError(
                    f"job {config.name!r}: this run has begun without a job with a rollout, and plans ahead of what would be "
                    "generated; add the job to its run file and resume, or train it in a run of its own"
                )
        most = (
            budget.tokens if self.run.max_tokens_per_microbatch == "auto" else int(self.run.max_tokens_per_microbatch)
        )
        items, self.doubts = prepare_more(self.prepared, list(configs), most)
        if self.run.cuda_graphs is True and self._has_graphs:
            from packlora.runtime.cuda_graphs import has_two_products

            for item in items:
                if len(there) + len(items) > 1 and has_two_products(item.spec):
                    raise InputError(
                        f"job {item.config.name!r}: DoRA with dropout beside other jobs has no CUDA graphs, and cuda_graphs is "
                        "true; set adapter.dora_dropout: low_rank, or lora_dropout: 0"
                    )
        if not self.base.storage.is_whole:  # jobs join on one device, or on the stages of a pipeline
            import_module("packlora.pipeline.checks").check_new(self.prepared, items)
        return items

    def check_names(self, configs: Sequence[JobConfig]) -> None:
        with_jobs(self.run, [*self.run.jobs, *configs])
        for config in configs:
            folder = self.output_dir / config.name
            if os.path.lexists(folder) and not _is_free(folder):
                raise InputError(f"job {config.name!r}: {folder} is there already; choose another name")

    def attach(
        self, items: Sequence[PreparedJob], there: Mapping[str, Job], made: list[Job], agreed: Agreed = refusing_nothing
    ) -> None:
        """Put the adapters of jobs that were checked onto the model. The jobs are put into `made`, which `join` or `detach`
        takes; what fails leaves nothing of the job that it failed at.

        Args:
            agreed: runs what may fail on one process of several, and raises on all of them before one waits for another.

        Raises:
            MemoryError: there is no room, also without what the executor keeps.
            InputError: what a job begins with is not what it was.
        """
        shared = self.single.attached
        asks, cache = asks_of_more(self.prepared, list(items)), PlanCache(self.base.device)
        for ask in asks.values():
            if ask not in self._choosers:
                self._choosers[ask] = PlanChooser(self.base.device, cache, ask)
        choosers = {path: self._choosers[ask] for path, ask in asks.items()}
        shared.choosers = tuple(dict.fromkeys([*shared.choosers, *choosers.values()]))
        self._number = max([self._number, *(job.adapter.number + 1 for job in there.values())])
        for item in items:
            try:
                attached = partial(self._attached, item, choosers, agreed)
                made.append(insist(self.executor, attached) if self.group.processes == 1 else attached())
            except torch.OutOfMemoryError as error:
                raise MemoryError(
                    f"out of memory on {self.base.device} as job {item.config.name!r} joined; free memory there, or give it a "
                    "lower adapter.r"
                ) from error

    def attach_asked(self, items: Sequence[PreparedJob], there: Mapping[str, Job], made: list[Job]) -> None:
        """`attach` for a request: whatever goes wrong is an InputError, on all processes."""

        def agreed(compute: Callable[[], Any]) -> Any:
            return self.mesh.together(lambda: refusing(named([item.config for item in items]), compute))

        if self.mesh.size > 1:  # each step, as a process that has failed would let the others wait for it
            self.attach(items, there, made, agreed)
        else:
            agreed(lambda: self.attach(items, there, made))

    def _attached(self, item: PreparedJob, choosers: Mapping[str, PlanChooser], agreed: Agreed) -> Job:
        model, config, number = self.base.model, item.config, self._number
        self._number += 1
        try:
            given = (self.single.attached, config.name, number, item.spec, item.data.seed, choosers)
            adapter: Adapter = agreed(lambda: attach_one(model, *given))
            whole = self.group.whole([adapter])
            job: Job = agreed(lambda: make_job(self.run, item, adapter, self.base))
            whole(adapter, job.state)
        except BaseException:
            detach_one(model, number)
            raise
        return job

    def detach(self, made: Sequence[Job]) -> None:
        """Take off again what `attach` has put onto the model."""
        for job in made:
            detach_one(self.base.model, job.adapter.number)

    def join(
        self, items: Sequence[PreparedJob], made: Sequence[Job], given: int, there: dict[str, Job], budget: TokenBudget,
        by: Any, request: str | None = None, parameters: Mapping[str, Mapping[str, Any]] | None = None,
        leaving: Sequence[Change] = (),
    ) -> list[Event]:  # fmt: skip
        """Let jobs that were attached join in round `given`; they are put into `there`. Returns what to tell.

        Args:
            leaving: changes that are made at the same time.

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
        if not changes and not leaving:
            return []
        self._write([*leaving, *changes], items)
        self.run = run
        gone = {change.leave for change in leaving}
        place([job for job in there.values() if job.name in gone], self.changes)
        for item, job in zip(items, made, strict=True):
            job.joined = given
            there[job.name] = job
            self.prepared.jobs.append(item)
            budget.take(item.longest)
        told: list[Event] = [Note(text) for text in self.doubts]
        told += [
            JobJoined(job.name, given, job.data.num_steps, job.data.tokens, job.config.model_dump(mode="json"))
            for job in made
        ]
        return told

    def leave(self, jobs: Sequence[tuple[Job, str]], given: int, by: Any, request: str | None = None) -> None:
        """Let jobs leave at their present step, each for a reason; one that has ended already needs none.

        Raises:
            WriteError: it cannot be recorded; nothing was changed.
        """
        self._write(self.leaving(jobs, given, by, request), ())
        place([job for job, _ in jobs], self.changes)

    def leaving(self, jobs: Sequence[tuple[Job, str]], given: int, by: Any, request: str | None = None) -> list[Change]:
        """The same as changes that are yet to be made."""
        return [
            Change(
                round=max(given, job.joined + job.step), by=by, leave=job.name, step=job.step, reason=reason, request=request
            )
            for job, reason in jobs
        ]  # fmt: skip

    def _write(self, changes: Sequence[Change], joined: Sequence[PreparedJob]) -> None:
        def amend() -> None:
            try:
                if self.group.leads:
                    described = {item.config.name: described_job(item) for item in joined}
                    news: dict[str, Any] = {"changes": [change.record() for change in changes], "jobs": described}
                    news["joined"] = [item.config.model_dump(mode="json") for item in joined]
                    self.record.amend(news | {"saved": dict.fromkeys(described, 0)})
            except (OSError, ValueError) as error:  # ValueError: a number or a text that JSON does not have
                raise InputError(f"run.json cannot be written: {reason_of(error)}") from error

        try:
            self.mesh.together(amend)
        except InputError as error:
            raise WriteError(str(error)) from error
        self.changes += changes
