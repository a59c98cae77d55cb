"""The training loop on one stage of a pipeline: trainer.py's, but for what runs between two quiet moments.

Microbatches of all jobs pass through the stages without a flush, over the borders of windows too (parallel/pipeline.py). The
pipeline runs dry only where something must find it so: an evaluation, a checkpoint, a job's end, a stop. Which one is next is
in the totals that all stages get with a step, so all of them end before the same slot.

A step is taken by what is known before it: loss and norm. What it has made of the parameters, whether they are finite and have
changed, goes down with the sums of the job's next step, or is told when the pipeline is dry. Both come before the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from packlora.parallel.layout import planned
from packlora.parallel.pipeline import Kind, Links, Slot, actions
from packlora.report.events import Note
from packlora.runtime.evaluate import is_multiple
from packlora.runtime.job import Job, StepResult
from packlora.runtime.pipeline_times import PipelineTimes
from packlora.runtime.stage import StageDevice, StagePending
from packlora.runtime.trainer import Trainer, event_of
from packlora.runtime.wave import Wave, waves_of
from packlora.runtime.windows import Plan, planned_windows
from packlora.schedule.cost import CostModel
from packlora.schedule.types import Microbatch

SQUARE, FOUND, LOSS, LARGEST, CHANGED = 0, 1, 2, -2, -1
"""Columns of sums and totals, float64 [1 + steps, 5 + M]. From LOSS on they are those of Job.sums, of the job with the most
metrics. LARGEST and CHANGED are the largest of all stages, the others are added up. Row 0 says in column LARGEST whether the
pipeline is to run dry; the others are of the jobs that step, in the order of the slot. FOUND: parameters with a gradient.
LARGEST, CHANGED: of the job's step before, see Job.confirm."""


@dataclass(slots=True)
class _Inside:
    """A slot in the pipeline. own: the microbatch of this replica. complete: jobs and global batches that end in the slot. due:
    jobs that take part."""

    wave: Wave
    own: Microbatch | None
    complete: list[tuple[Job, int]]
    due: list[Job]
    pending: StagePending | None = None
    incoming: torch.Tensor | None = None
    gradients: list[torch.Tensor] = field(default_factory=list)
    """For the stage below, see StagePending."""
    sums: torch.Tensor | None = None

    @property
    def microbatch(self) -> Microbatch:
        assert self.own is not None
        return self.own


def join_found(jobs: Sequence[Job], links: Links) -> None:
    """Let jobs know of parameters that have got a gradient in another replica alone."""
    most = iter(
        links.found_by_one([int(name not in job.state.without) for job in jobs for name in job.state.parameters])
    )
    for job in jobs:
        job.state.without = {name for name in job.state.parameters if not next(most)}


def put_sums(row: torch.Tensor, job: Job) -> None:
    """Write the sums of this stage for a job that is about to step."""
    assert job.state.sums is not None
    row[SQUARE], row[FOUND] = job.state.square(), len(job.state.parameters) - len(job.state.without)
    row[LOSS : LOSS + len(job.state.sums)] = job.state.sums


def take_totals(row: torch.Tensor, job: Job) -> None:
    """Give a job what all stages have added up."""
    job.state.sums = row[LOSS : LOSS + 1 + job.learning.num_metrics]


class PipelinedTrainer(Trainer):
    """Training loop of one stage of a pipeline.

    Args:
        cost: what a microbatch costs on each stage, for the planner; the same on every process and in every session.
    """

    executor: StageDevice

    def __init__(self, *args: Any, cost: CostModel, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cost, self.links = cost, self.executor.stage.links
        self._inside: dict[int, _Inside] = {}
        self._waves: Iterator[Wave | None] = iter(())
        self._border: int | None = None
        """The round before which members change, once the pipeline is dry."""
        self._quiet = self._ended = False
        """Whether nothing more enters the pipeline; whether there is nothing more."""
        self.times = PipelineTimes(self.run, self.prepared.shape, self.links, self.base.device, self.profile.cost)
        self._unconfirmed: dict[str, torch.Tensor] = {}
        """Map from a job that has stepped to columns LARGEST and CHANGED of this stage."""
        self._failed: list[Job] = []
        self._do: dict[Kind, Callable[[int], None]] = {
            Kind.NOOP: self._noop, Kind.RECEIVE_HIDDEN: self._receive_hidden, Kind.FORWARD: self._forward,
            Kind.SEND_HIDDEN: self._send_hidden, Kind.RECEIVE_GRADIENT: self._receive_gradient,
            Kind.BACKWARD: self._backward, Kind.SEND_GRADIENT: self._send_gradient, Kind.RECEIVE_SUMS: self._receive_sums,
            Kind.ADD_SUMS: self._add_sums, Kind.SEND_SUMS: self._send_sums, Kind.RECEIVE_TOTALS: self._receive_totals,
            Kind.SEND_TOTALS: self._send_totals, Kind.STEP: self._take_steps,
        }  # fmt: skip

    def _train_windows(self) -> None:
        size, capacity = self.links.size, self.budget.tokens
        with planned_windows(
            self.run, self.jobs, planned(capacity, size), self.profile, self.events, self.team.group, self.cost
        ) as plan:
            self._waves = self._all_waves(plan, size, capacity)
            while self._goes_on():
                assert not self._ended, "the plan has ended, but a job has not"
                self._run_dry()
                if (border := self._border) is not None:
                    self._border = None
                    self._change(border, plan)

    def _all_waves(self, plan: Plan, size: int, capacity: int) -> Iterator[Wave | None]:
        """Waves of all windows; None behind one after which jobs are to join or to leave."""
        for window in plan.windows:
            yield from waves_of(window, size, capacity)
            if self.members is not None and self.members.is_asked():
                self._border = window.first_round + window.num_rounds
                yield None

    def _run_dry(self) -> None:
        """Run microbatches through the pipeline until it is empty; then report failed jobs, evaluate and save what is due."""
        self._quiet = False
        self._inside.clear()  # slots are counted anew
        self.times.begin()
        self.runner.begin()
        for action in actions(self.links.stage, self.links.stages, self._enter):
            self._do[action.kind](action.slot)
        self.links.drain()
        if (times := self.times.told(self.by_name)) is not None:
            self.events.emit(times)
        self._confirm_all()
        self.team.agree(0, [])
        failed, self._failed = self._failed, []
        for job in failed:
            self._fail(job)
        self._after_steps()

    def _enter(self, slot: int) -> Slot | None:
        """Slot that enters the pipeline, the same on all stages."""
        wave = None if self._quiet else next(self._waves, None)
        self._inside.pop(slot - self.links.stages, None)  # one in which no job has stepped
        if wave is None:
            self._ended |= not self._quiet and self._border is None
            return None
        own = self.runner.own(wave)
        self.times.entered(wave.window.first_round, own)
        due = self.runner.due(wave)
        if not due:
            return Slot(runs=False, steps=False)
        assert all(job.step == batch for job, batch in due), "a global batch would begin before the step it follows"
        complete = [(self.by_name[name], batch) for name, batch in wave.completes if self.by_name[name].is_due(batch)]
        if not self.evaluator.learn(due):  # all stages are here; they have agreed on a stop
            self._quiet = True
            return None
        for job, _ in due:
            self.runner.began.setdefault(job.name, self._elapsed())
        self._inside[slot] = _Inside(wave, own, complete, [job for job, _ in due])
        return Slot(runs=own is not None, steps=bool(complete))

    def _noop(self, slot: int) -> None:
        if slot in self._inside:  # of other replicas it is none
            self._count_tokens(self._inside[slot])

    # --- forward and backward ------------------------------------------------------------------------------------------

    def _shape(self, slot: int) -> tuple[int, int, int]:
        return self.executor.shape(self._inside[slot].microbatch.num_tokens)

    def _receive_hidden(self, slot: int) -> None:
        self._inside[slot].incoming = self.links.up.receive(self._shape(slot), self.executor.stage.dtype)

    def _forward(self, slot: int) -> None:
        inside = self._inside[slot]
        parts = self.runner.packer.packed(inside.microbatch)
        tokens, incoming, inside.incoming = inside.microbatch.num_tokens, inside.incoming, None
        below = None if self.links.is_first else self.executor.receive_totals(parts)
        forward = partial(self.executor.forward, parts, incoming, below)
        with self.times.clock.span("forward", slot):
            inside.pending = self.budget.attempt(tokens, forward)

    def _send_hidden(self, slot: int) -> None:
        pending = self._inside[slot].pending
        assert pending is not None
        self.executor.send_up(pending, self._shape(slot))

    def _receive_gradient(self, slot: int) -> None:
        pending = self._inside[slot].pending
        assert pending is not None
        self.executor.receive_down(pending, self._shape(slot))

    def _backward(self, slot: int) -> None:
        inside = self._inside[slot]
        microbatch, pending = inside.microbatch, inside.pending
        assert pending is not None
        with self.times.clock.span("backward", slot):
            done = self.budget.attempt(microbatch.num_tokens, lambda: self.executor.backward(pending))
        assert done is not None
        inside.gradients, inside.pending = pending.gradients(), None
        due = {job.name for job in inside.due}
        for name in dict.fromkeys(placed.job for placed in microbatch.samples):
            job = self.by_name[name]
            if name in due:
                job.state.collect(done.sums[job.adapter.number])
            else:
                job.discard()
        self._count_tokens(inside)

    def _count_tokens(self, inside: _Inside) -> None:
        """Count the tokens of all replicas, and tell their microbatches."""
        tokens = dict.fromkeys((job.name for job in inside.due), 0)
        for rank, microbatch in enumerate(inside.wave.microbatches):
            if any(placed.job in tokens for placed in microbatch.samples):
                self.runner.ran(inside.wave, rank)
            for placed in microbatch.samples:
                if placed.job in tokens:
                    tokens[placed.job] += placed.length
        for job in inside.due:
            job.count(tokens[job.name])
        for told in self.runner.told():
            self.events.emit(told)
        self.runner.begin()

    def _send_gradient(self, slot: int) -> None:
        self.executor.send_down(self._inside[slot].gradients, self._shape(slot))
        self._inside[slot].gradients = []

    # --- steps ---------------------------------------------------------------------------------------------------------

    def _rows(self, slot: int) -> tuple[int, int]:
        complete = self._inside[slot].complete
        return 1 + len(complete), 5 + max((job.learning.num_metrics for job, _ in complete), default=0)

    def _receive_sums(self, slot: int) -> None:
        self._inside[slot].sums = self.links.down.receive(self._rows(slot), torch.float64)

    def _add_sums(self, slot: int) -> None:
        inside = self._inside[slot]
        own = torch.zeros(self._rows(slot), dtype=torch.float64, device=self.base.device)
        own[0, LARGEST] = self.team.is_asked
        if self.links.size > 1:
            jobs = [job for job, _ in inside.complete]
            join_found(jobs, self.links)
            self.team.add_up(jobs)
        for row, (job, _) in zip(own[1:], inside.complete, strict=True):
            put_sums(row, job)
            if job.name in self._unconfirmed:
                row[LARGEST:] = self._unconfirmed[job.name]
        if inside.sums is not None:
            own[:, :LARGEST] += inside.sums[:, :LARGEST]
            own[:, LARGEST:] = torch.maximum(own[:, LARGEST:], inside.sums[:, LARGEST:])
        inside.sums = self.links.agreed(own) if self.links.is_first else own

    def _send_sums(self, slot: int) -> None:
        sums = self._inside[slot].sums
        assert sums is not None
        self.links.down.send(sums, self._rows(slot), torch.float64)

    def _receive_totals(self, slot: int) -> None:
        self._inside[slot].sums = self.links.up.receive(self._rows(slot), torch.float64)

    def _send_totals(self, slot: int) -> None:
        sums = self._inside[slot].sums
        assert sums is not None
        self.links.up.send(sums, self._rows(slot), torch.float64)

    def _take_steps(self, slot: int) -> None:
        """Step the jobs whose global batches end in the slot."""
        inside = self._inside.pop(slot)
        assert inside.sums is not None
        asked, *rows = inside.sums.tolist()  # the device is waited for
        self._quiet |= asked[LARGEST] > 0
        for (job, batch), totals, row in zip(inside.complete, inside.sums[1:], rows, strict=True):
            self._confirm(job, row[LARGEST], row[CHANGED])
            if not job.is_due(batch):
                job.discard()
                continue
            assert job.step == batch, "a step was left out"
            take_totals(totals, job)
            job.state.found_elsewhere = int(row[FOUND])
            numbers = job.optimizer_step(totals[SQUARE].sqrt())
            self._count(job, job.count_step(row[LOSS], math.sqrt(row[SQUARE])), numbers[2:])

    def _count(self, job: Job, result: StepResult | None, made: torch.Tensor) -> None:
        """Tell a step, or that it may not be."""
        elapsed = self._elapsed()
        seconds = elapsed - self.runner.began.pop(job.name)
        if result is None:
            self._failed.append(job)
            self._quiet = True
            return
        job.log_history[-1] |= {"seconds": seconds, "elapsed": elapsed}
        self._unconfirmed[job.name] = made
        self.stepped[job.name] = job
        self.events.emit(event_of(job.name, job.log_history[-1]))
        self._quiet |= (
            job.step >= job.data.num_steps
            or is_multiple(job.step, self.run.save_every)
            or self.evaluator.is_due(job)
            or job.name in self.stop.jobs
        )

    def _confirm(self, job: Job, largest: float, changed: float) -> None:
        """Tell what the job's last step has made of the parameters, if it was not told yet."""
        if self._unconfirmed.pop(job.name, None) is None:
            return
        result = job.confirm(largest, changed)
        if result is None:
            self._failed.append(job)
            self._quiet = True
        elif result.notice is not None:
            self.events.emit(Note(f"job {job.name!r}: {result.notice}"))

    def _confirm_all(self) -> None:
        if not self._unconfirmed:
            return
        made = torch.stack(list(self._unconfirmed.values())).cpu()
        most = self.links.largest_of(made)
        for name, (largest, changed) in zip(list(self._unconfirmed), most.tolist(), strict=True):
            self._confirm(self.by_name[name], largest, changed)
