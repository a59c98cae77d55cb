"""Placement of a run on pipelines: each process holds a stage of the base model, and of the adapters what is on it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from packlora.adapters.linear import Attached
from packlora.base.device import choose_device
from packlora.base.model import Base
from packlora.config import Run
from packlora.engine.passes import Passes
from packlora.experts import layouts
from packlora.parallel.alone import OneProcess
from packlora.parallel.layout import Layout
from packlora.pipeline.checks import check
from packlora.pipeline.estimate import planning_cost, stage_layers, staged
from packlora.pipeline.flow import StageFlow
from packlora.pipeline.layouts import StagedReplica
from packlora.pipeline.links import Links
from packlora.pipeline.passes import StageDevice
from packlora.pipeline.stages import Stage, load_stage
from packlora.runtime.choose import Choice, Replica
from packlora.runtime.flow import Flow
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile
from packlora.runtime.several import OverProcesses


class OverStages(OverProcesses):
    """Placement on pipelines, over the processes that torchrun started."""

    group: Links

    def __init__(self, run: Run, mesh: OneProcess, prepared: PreparedRun, taken: Choice) -> None:
        super().__init__(run, mesh, prepared, taken)
        if taken.layout.pipeline > run.parallel.stages:
            prepared.warnings.append(f"parallel.pipeline is {taken.layout.pipeline}: {taken.reason}")

    @classmethod
    def check(cls, prepared: PreparedRun, skeleton: PreTrainedModel) -> None:
        """See OverProcesses."""
        check(prepared, skeleton)

    @classmethod
    def replica(cls, prepared: PreparedRun, layout: Layout) -> Replica:
        """See OverProcesses."""
        return StagedReplica(prepared, layout)

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """See Placement: where the pipelines share all jobs."""
        return len(self.layout.groups) == 1

    def _processes(self) -> Links:
        device = choose_device(self.run.device)
        own = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        return Links(self.mesh, self.layout, own)

    def load(self) -> Base:
        """See Placement."""
        run, prepared = self.run, self.prepared
        counts = stage_layers(run, prepared, self.layout.pipeline)
        return load_stage(run, prepared.tokenizer, prepared.longest_run, self.mesh, self.group, counts, self._weights())

    def passes(self, base: Base, attached: Attached) -> Passes:
        """See Placement."""
        assert isinstance(base.storage, Stage)
        return StageDevice(base, attached, base.storage, self._multiple())

    def profile(self, known: Profile) -> Profile:
        """See Placement."""
        known = layouts.profile(known, self.prepared, self.layout)
        return staged(known, self.run, self.prepared, self.layout.pipeline)

    def flow(self, own: PreparedRun, known: Profile, passes: Passes) -> Flow:
        """See Placement."""
        assert isinstance(passes, StageDevice)
        cost = planning_cost(self.run, self.prepared, self.layout.pipeline)
        return StageFlow(self.run, own.shape, self.group, passes.clock, known.cost, cost)


PLACEMENT = OverStages
