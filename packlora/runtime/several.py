"""Placement of a run over several processes: the choice of who trains what, the part of the model that each loads, and the way
of events to the first one. A run on one process loads nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import torch.distributed as dist
from transformers import PreTrainedModel

from packlora.adapters.linear import Attached
from packlora.base.demo_model import base_path
from packlora.base.model import Base
from packlora.base.weight_files import WeightFiles
from packlora.config import Run
from packlora.engine.passes import Passes, SingleDevice
from packlora.parallel.alone import ALONE, Alone, OneProcess
from packlora.parallel.cut import load_cut
from packlora.parallel.layout import Layout
from packlora.parallel.mesh import Mesh
from packlora.parallel.replicas import Replicas
from packlora.parallel.sharded import load_sharded
from packlora.result import Result
from packlora.runtime import profiler
from packlora.runtime.alike import digest
from packlora.runtime.choose import Choice, Replica, choose
from packlora.runtime.events import Emitter
from packlora.runtime.placement import Listen, Placement
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.relay import Hub, Relay, await_end, of_first
from packlora.runtime.signals import stop_signals
from packlora.runtime.trainer import Trainer


def placed(run: Run, mesh: OneProcess, prepared: PreparedRun) -> OverProcesses:
    """Placement of a run. All processes call it. Who trains what is chosen by what the first process knows of memory, and the
    least that a device has."""
    known = profiler.profile(run, prepared)
    told = mesh.gather([float(known.kept_bytes), float(known.bytes_per_token), known.room])
    kept, each, _ = told[0]
    known = replace(known, kept_bytes=kept, bytes_per_token=each, room=min(room for *_, room in told))
    taken = choose(prepared, mesh.size, known)
    package = taken.layout.package
    kind = OverProcesses if package is None else import_module(f"{package}.placement").PLACEMENT
    found: OverProcesses = kind(run, mesh, prepared, taken)
    return found


class OverProcesses(Placement):
    """Placement over the processes that torchrun started: jobs on groups of them, the model on one or several of a group.

    Args:
        taken: the choice of who trains what.
    """

    mesh: Mesh
    group: Replicas
    is_open = False

    def __init__(self, run: Run, mesh: OneProcess, prepared: PreparedRun, taken: Choice) -> None:
        super().__init__(run, mesh, prepared)
        self.layout = taken.layout
        self.group = self._processes()
        if self.layout.sharded and not run.parallel.is_sharded:
            prepared.warnings.append(f"parallel.shard_base is taken: {taken.reason}")

    @classmethod
    def check(cls, prepared: PreparedRun, skeleton: PreTrainedModel) -> None:
        """Refuse runs and models. Raises InputError.

        Args:
            skeleton: the base model without weights.
        """

    @classmethod
    def replica(cls, prepared: PreparedRun, layout: Layout) -> Replica:
        """Replica of a layout, as its time and memory are predicted."""
        return Replica()

    @property
    def sampling(self) -> Alone:  # type: ignore[override]
        """See Placement: the process that leads the jobs, or all of them where none has a whole model."""
        return self.group if self.layout.is_in_parts else ALONE

    def _processes(self) -> Replicas:
        if self.layout.exchange:
            found: Replicas = import_module("packlora.experts.replicas").ExchangingReplicas(self.mesh, self.layout)
            return found
        return Replicas(self.mesh, self.layout)

    def load(self) -> Base:
        """See Placement."""
        run, prepared, group = self.run, self.prepared, self.group
        given = (run, prepared.tokenizer, prepared.longest_run)
        if group.model is not None:
            return load_cut(*given, group, weights=self._weights())
        if self.layout.is_in_parts:
            return load_sharded(*given, group.base, self._weights())
        return super().load()

    def _weights(self) -> WeightFiles:
        """Open the files of a base model that several processes load together.

        Raises:
            InputError: a process cannot read them, or has others. On every process, before one waits for another's part.
        """
        path = base_path(self.run.base_model)

        def opened() -> tuple[WeightFiles, str]:
            files = WeightFiles(path, self.run.revision)
            return files, digest(files)

        files, own = self.mesh.together(opened)
        self.mesh.same({"base model": own})
        return files

    def passes(self, base: Base, attached: Attached) -> Passes:
        """See Placement."""
        return SingleDevice(base, attached, self._multiple())

    def _multiple(self) -> int:
        """Divisor of the numbers of tokens: processes that share the tokens of a microbatch."""
        slices = self.group.holders
        return dist.get_world_size(slices) if slices is not None and self.run.parallel.sequence_parallel else 1

    def train(self, trainer: Trainer | None, logged: int, listen: Listen, sample: Callable[[Trainer], None]) -> Result:
        """See Placement. What is told of the jobs goes to the first process."""
        mesh, layout, group = self.mesh, self.layout, self.group
        told = trainer.events if trainer is not None else Emitter()
        with contextlib.ExitStack() as held:
            outer, hub = told, None
            if mesh.is_first:
                outer = Emitter()
                hub = Hub(mesh, layout, outer, told, [job.name for job in self.run.jobs], logged)
                told.subscribe(hub)
                told.look = hub.look
                held.enter_context(listen(outer))
            elif group.leads:
                told.subscribe(relay := Relay(mesh, layout.group_of(mesh.rank), told))
                told.look = relay.look
            if trainer is not None and (group.leads or layout.is_in_parts):
                sample(trainer)
            result = trainer.fit() if trainer is not None else None
            with stop_signals(outer):
                if hub is not None:
                    result = hub.finish()
                else:
                    await_end(mesh, outer.stop)
        return of_first(mesh, result)
