"""The part of `packlora plan` about a pipeline: `--stages`, and run files with parallel.pipeline."""

from __future__ import annotations

from packlora.config import Run
from packlora.errors import InputError
from packlora.parallel.layout import Layout
from packlora.pipeline.estimate import head_in_layers, planning_cost, stage_layers, staged
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile
from packlora.schedule.cost import CostModel


def asked(run: Run, stages: int, gpus: int | None) -> tuple[int, int | None]:
    """Stages that are planned, and devices over which jobs are spread beside, or None.

    Args:
        stages, gpus: as the options say, 1 and None without them.

    Raises:
        InputError: the options do not go together, or with the run file.
    """
    own = run.parallel.stages
    if own == 1:
        if gpus is not None:
            raise InputError("--gpus spreads jobs over devices, --stages the layers of the model; give one of them")
        return stages, gpus
    if stages not in (1, own):
        raise InputError(f"--stages is {stages}, but parallel.pipeline is {own}; give one of them")
    if gpus is not None:
        run.parallel.check(gpus)
    return own, None if gpus == own else gpus


def planned(prepared: PreparedRun, known: Profile, stages: int) -> tuple[Profile, CostModel | None]:
    """Profile of the pipeline, and the cost that training plans it by; None without parallel.pipeline: the profile's.

    Args:
        known: of one device.
    """
    run = prepared.run
    cost = planning_cost(run, prepared, stages) if run.parallel.stages > 1 else None
    return staged(known, run, prepared, stages), cost


def sentence(prepared: PreparedRun, stages: int) -> str:
    """How the layers are cut."""
    run = prepared.run
    counts = ", ".join(map(str, stage_layers(run, prepared, stages)))
    how = "as measured"
    if prepared.head_in_layers is None:
        how = "estimated; packlora tune measures it, for run files with parallel.pipeline"
    head = head_in_layers(run, prepared)
    return f"stages of {counts} layers; the output layer and the loss take as long as {head:.2f} of them, {how}"


def words(layout: Layout) -> tuple[str, str]:
    """Name a layout in words, and its devices for each job."""
    stages, devices = layout.pipeline, layout.devices_per_job
    return f"a pipeline of {stages}", f"is on {devices} devices, {devices // stages} for each of its stages"
