"""The part of `packlora plan` about run files with parallel.pipeline."""

from __future__ import annotations

from packlora.parallel.layout import Layout
from packlora.pipeline.estimate import head_in_layers, planning_cost, stage_layers, staged
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile
from packlora.schedule.cost import CostModel


def planned(prepared: PreparedRun, known: Profile) -> tuple[Profile, CostModel, str]:
    """Profile of the pipeline, the cost that training plans it by, and how the layers are cut, in words.

    Args:
        known: of one device.
    """
    run, stages = prepared.run, prepared.run.parallel.stages
    counts = ", ".join(map(str, stage_layers(run, prepared, stages)))
    how = "as measured"
    if prepared.head_in_layers is None:
        how = "estimated; packlora tune measures it, for run files with parallel.pipeline"
    head = head_in_layers(run, prepared)
    said = f"stages of {counts} layers; the output layer and the loss take as long as {head:.2f} of them, {how}"
    return staged(known, run, prepared, stages), planning_cost(run, prepared, stages), said


def words(layout: Layout) -> tuple[str, str]:
    """Name a layout in words, and its devices for each job."""
    stages, devices = layout.pipeline, layout.devices_per_job
    return f"a pipeline of {stages}", f"is on {devices} devices, {devices // stages} for each of its stages"
