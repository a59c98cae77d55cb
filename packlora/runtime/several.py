"""Placement of a run over several processes: the choice of who trains what, the part of the model that each loads, and the way
of events to the first one. A run on one process loads nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from packlora.adapters.linear import Attached
from packlora.base.device import choose_device
from packlora.base.model import Base
from packlora.engine.passes import Passes, SingleDevice
from packlora.engine.stage_passes import StageDevice
from packlora.parallel.alone import ALONE, Alone
from packlora.parallel.cut import load_cut
from packlora.parallel.layout import Layout
from packlora.parallel.mesh import Mesh
from packlora.parallel.pipeline import Links
from packlora.parallel.replicas import Replicas
from packlora.parallel.sharded import load_sharded
from packlora.parallel.stages import Stage, load_stage
from packlora.result import Result
from packlora.runtime import estimate, profiler
from packlora.runtime.choose import choose
from packlora.runtime.events import Emitter
from packlora.runtime.pipeline_times import PipelineTimes
from packlora.runtime.placement import Listen, Placement
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile
from packlora.runtime.relay import Hub, Relay, await_end, result_from, result_of
from packlora.runtime.signals import stop_signals
from packlora.runtime.trainer import Trainer


class OverProcesses(Placement):
    """Placement over the processes that torchrun started: jobs on groups of them, the model on one or several of a group."""

    mesh: Mesh
    group: Replicas

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """See Placement: on pipelines that share all jobs."""
        return self.layout.pipeline > 1 and len(self.layout.groups) == 1

    @property
    def sampling(self) -> Alone:  # type: ignore[override]
        """See Placement: the process that leads the jobs, or all of them where none has a whole model."""
        return self.group if self.layout.is_in_parts else ALONE

    def _share_out(self) -> tuple[Layout, Replicas]:
        layout = self._choose_layout()
        if layout.pipeline == 1:
            return layout, Replicas(self.mesh, layout)
        device = choose_device(self.run.device)
        own = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        return layout, Links(self.mesh, layout, own)

    def _choose_layout(self) -> Layout:
        """Choose by what the first process knows of memory, and the least that a device has."""
        run, prepared = self.run, self.prepared
        known = profiler.profile(run, prepared)
        told = self.mesh.gather([float(known.kept_bytes), float(known.bytes_per_token), known.room])
        kept, each, _ = told[0]
        known = replace(known, kept_bytes=kept, bytes_per_token=each, room=min(room for *_, room in told))
        taken = choose(prepared, self.mesh.size, known)
        prepared.warnings += taken.notes(run.parallel)
        return taken.layout

    def load(self) -> Base:
        """See Placement."""
        run, prepared, group = self.run, self.prepared, self.group
        given = (run, prepared.tokenizer, prepared.longest_run)
        if isinstance(group, Links):
            return load_stage(*given, self.mesh, group, estimate.stage_layers(run, prepared, group.stages))
        if group.model is not None:
            return load_cut(*given, group)
        if self.layout.is_in_parts:
            return load_sharded(*given, group.base)
        return super().load()

    def passes(self, base: Base, attached: Attached) -> Passes:
        """See Placement."""
        slices = self.group.holders
        multiple = dist.get_world_size(slices) if slices is not None and self.run.parallel.sequence_parallel else 1
        if isinstance(stage := base.storage, Stage):
            return StageDevice(base, attached, stage, multiple)
        return SingleDevice(base, attached, multiple)

    def profile(self, known: Profile) -> Profile:
        """See Placement."""
        if self.layout.pipeline == 1:
            return known
        known = estimate.sharing_experts(known, self.run, self.prepared, self.layout.expert)
        return estimate.staged(known, self.run, self.prepared, self.layout.pipeline)

    def pipeline(self, own: PreparedRun, known: Profile, passes: Passes) -> dict[str, Any]:
        """See Placement."""
        if not isinstance(passes, StageDevice):
            return {}
        cost = estimate.planning_cost(self.run, self.prepared, self.group.stages)
        return {"cost": cost, "times": PipelineTimes(self.run, own.shape, passes.stage.links, passes.clock, known.cost)}

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
                held.enter_context(listen(outer))
            elif group.leads:
                told.subscribe(Relay(mesh, layout.group_of(mesh.rank), told))
            if trainer is not None and (group.leads or layout.is_in_parts):
                sample(trainer)
            result = trainer.fit() if trainer is not None else None
            with stop_signals(outer):
                if hub is not None:
                    result = hub.finish()
                else:
                    await_end(mesh)
        return result_from(mesh.gather(result_of(result))[0])
