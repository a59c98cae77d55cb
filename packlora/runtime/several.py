"""Additions of a run on several processes: the choice of who trains what, the part of the model that each loads, and the way of
events to the first one. A run on one process loads nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from packlora.base.device import choose_device
from packlora.base.model import Base
from packlora.config import Run
from packlora.parallel.cut import load_cut
from packlora.parallel.layout import Layout
from packlora.parallel.mesh import Mesh
from packlora.parallel.pipeline import Links
from packlora.parallel.replicas import Alone, Replicas
from packlora.parallel.sharded import load_sharded
from packlora.parallel.stages import load_stage
from packlora.result import Result
from packlora.runtime import profiler
from packlora.runtime.choose import choose
from packlora.runtime.events import Emitter
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.relay import Hub, Relay, await_end, result_from, result_of
from packlora.runtime.signals import stop_signals
from packlora.runtime.trainer import Trainer


def choose_layout(run: Run, mesh: Mesh, prepared: PreparedRun) -> Layout:
    """Choose by what the first process knows of memory, and the least that a device has."""
    known = profiler.profile(run, prepared)
    told = mesh.gather([float(known.kept_bytes), float(known.bytes_per_token), known.room])
    kept, each, _ = told[0]
    known = replace(known, kept_bytes=kept, bytes_per_token=each, room=min(room for *_, room in told))
    taken = choose(prepared, mesh.size, known)
    if taken.layout.sharded and not run.parallel.is_sharded:
        prepared.warnings.append(f"parallel.shard_base is taken: {taken.reason}")
    if taken.layout.pipeline > run.parallel.stages:
        prepared.warnings.append(f"parallel.pipeline is {taken.layout.pipeline}: {taken.reason}")
    return taken.layout


def group_of(run: Run, mesh: Mesh, layout: Layout) -> Replicas:
    """The processes that train the same jobs as this one."""
    if layout.pipeline == 1:
        return Replicas(mesh, layout)
    device = choose_device(run.device)
    return Links(mesh, layout, torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device)


def load_part(run: Run, prepared: PreparedRun, mesh: Mesh, group: Alone) -> Base | None:
    """Load this process's part of the base model; None where it has all of it."""
    if group.stages > 1:
        counts = profiler.stage_layers(run, prepared, group.stages)
        return load_stage(run, prepared.tokenizer, prepared.longest_run, mesh, cast(Links, group), counts)
    if group.model is not None:
        return load_cut(run, prepared.tokenizer, prepared.longest_run, group)
    if group.shards is not None:
        return load_sharded(run, prepared.tokenizer, prepared.longest_run, group.shards)
    return None


def train_together(
    run: Run, mesh: Mesh, layout: Layout, group: Alone, trainer: Trainer | None, logged: int,
    listen: Callable[[Emitter], contextlib.AbstractContextManager[None]], sample: Callable[[Trainer], None],
) -> Result:  # fmt: skip
    """Train this process's jobs, and hand what is told of them to the first process.

    Args:
        trainer: of the jobs; None for a process without any.
        logged: microbatches that earlier sessions have logged.
        listen: subscribes to the events of all jobs, on the first process.
        sample: subscribes what generates texts.

    Returns:
        How the whole run ended, on every process.
    """
    told = trainer.events if trainer is not None else Emitter()
    with contextlib.ExitStack() as held:
        outer, hub = told, None
        if mesh.is_first:
            outer = Emitter()
            hub = Hub(mesh, layout, outer, told, [job.name for job in run.jobs], logged)
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
